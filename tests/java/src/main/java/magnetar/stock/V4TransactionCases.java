package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.client.api.transaction.TransactionCoordinatorClient;
import org.apache.pulsar.client.api.transaction.TxnID;
import org.apache.pulsar.client.impl.MessageIdImpl;
import org.apache.pulsar.client.impl.PulsarClientImpl;

/** Transactions of the v4 client on {@code persistent://} topics. */
final class V4TransactionCases {
    private static final int QUIET_MS = 300;
    private static final int LIMIT_MS = 15_000;
    private static final int COUNT = 10;

    private V4TransactionCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_txn_topics", V4TransactionCases::topics);
        cases.put("v4_txn_acks", V4TransactionCases::acknowledgements);
        cases.put("v4_txn_conflict", V4TransactionCases::conflict);
        cases.put("v4_txn_timeout", V4TransactionCases::timeout);
        cases.put("v4_txn_repeated", V4TransactionCases::repeated);
        cases.put("v4_txn_admin", V4TransactionCases::admin);
    }

    /** Cases that need a v5 client beside the v4 one. */
    static void addMixedTo(Map<String, Case> cases) {
        cases.put("v4_txn_mixed", V4TransactionCases::mixed);
    }

    private static PulsarClient client(CaseRun run) throws Exception {
        return run.closing(PulsarClient.builder().serviceUrl(run.url()).enableTransaction(true).build());
    }

    private static Transaction begin(PulsarClient client, long timeoutMs) throws Exception {
        return client.newTransaction().withTransactionTimeout(timeoutMs, TimeUnit.MILLISECONDS).build().get();
    }

    private static void end(CaseRun run, Transaction transaction) throws Exception {
        (Transactions.commits(run) ? transaction.commit() : transaction.abort()).get();
    }

    private static Producer<String> producer(CaseRun run, PulsarClient client, String topic, boolean batching) throws Exception {
        return run.closing(client.newProducer(Schema.STRING)
                .topic(topic)
                .enableBatching(batching)
                .batchingMaxPublishDelay(1, TimeUnit.SECONDS)
                .sendTimeout(0, TimeUnit.MILLISECONDS)
                .create());
    }

    private static Consumer<String> consumer(CaseRun run, PulsarClient client, String topic, SubscriptionType type)
            throws Exception {
        return run.closing(client.newConsumer(Schema.STRING)
                .topic(topic)
                .subscriptionName("s")
                .subscriptionType(type)
                .enableBatchIndexAcknowledgment(true)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .subscribe());
    }

    /** Sends {@code COUNT} messages, in one batch where the producer makes batches. */
    private static void send(Producer<String> producer, Transaction transaction, String name) throws Exception {
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (int i = 0; i < COUNT; i++) {
            var message = transaction == null ? producer.newMessage() : producer.newMessage(transaction);
            sends.add(message.value(name + "|" + i).sendAsync());
        }
        producer.flush();
        for (CompletableFuture<MessageId> each : sends) {
            each.get();
        }
    }

    /** Messages that come, until so many have and then none more comes. Nothing is acknowledged. */
    private static List<Message<String>> read(Consumer<String> consumer, int count) throws Exception {
        List<Message<String>> messages = new ArrayList<>();
        while (true) {
            int waitMs = messages.size() < count ? LIMIT_MS : QUIET_MS;
            Message<String> message = consumer.receive(waitMs, TimeUnit.MILLISECONDS);
            if (message == null) {
                return messages;
            }
            messages.add(message);
        }
    }

    private static String first(CaseRun run) {
        return "persistent://public/default/" + run.localName();
    }

    /** Messages on an ordinary and a partitioned topic; readers learn of the end at once. */
    private static void topics(CaseRun run) throws Exception {
        boolean batching = run.flag("batching");
        PulsarClient client = client(run);
        String partitioned = run.localName() + "-partitioned";
        run.admin().createOrdinary("public/default", partitioned, 3);
        List<String> topics = List.of(first(run), "persistent://public/default/" + partitioned);
        List<Producer<String>> producers = new ArrayList<>();
        List<Consumer<String>> consumers = new ArrayList<>();
        for (String topic : topics) {
            producers.add(producer(run, client, topic, batching));
            consumers.add(consumer(run, client, topic, SubscriptionType.Shared));
        }
        Reader<String> reader = run.closing(
                client.newReader(Schema.STRING).topic(topics.get(0)).startMessageId(MessageId.earliest).create());
        Transaction transaction = begin(client, 60_000);
        for (Producer<String> producer : producers) {
            send(producer, transaction, "inside");
        }
        List<Integer> seen = new ArrayList<>();
        for (Consumer<String> consumer : consumers) {
            seen.add(read(consumer, 0).size());
        }
        run.fact("seen_while_open", seen);
        run.fact("available_while_open", reader.hasMessageAvailable());
        end(run, transaction);
        run.fact("available", reader.hasMessageAvailable());
        run.fact("state", transaction.getState().name());
        List<Integer> after = new ArrayList<>();
        for (Consumer<String> consumer : consumers) {
            after.add(read(consumer, Transactions.commits(run) ? COUNT : 0).size());
        }
        run.fact("seen", after);
        int readerSaw = 0;
        while (reader.hasMessageAvailable()) {
            reader.readNext();
            readerSaw++;
        }
        run.fact("reader_saw", readerSaw);
    }

    /** Six of ten messages are acknowledged in a transaction: by {@code mode}, one by one or cumulatively. */
    private static void acknowledgements(CaseRun run) throws Exception {
        String mode = run.arg("mode", "individual");
        boolean cumulative = mode.equals("cumulative");
        SubscriptionType type = cumulative ? SubscriptionType.Exclusive : SubscriptionType.Shared;
        PulsarClient client = client(run);
        send(producer(run, client, first(run), mode.equals("batch")), null, "offered");
        Consumer<String> consumer = consumer(run, client, first(run), type);
        List<Message<String>> offered = read(consumer, COUNT);
        Transaction transaction = begin(client, 60_000);
        if (cumulative) {
            consumer.acknowledgeCumulativeAsync(offered.get(5).getMessageId(), transaction).get();
        } else {
            for (Message<String> message : offered.subList(0, 6)) {
                consumer.acknowledgeAsync(message.getMessageId(), transaction).get();
            }
        }
        end(run, transaction);
        boolean again = !Transactions.commits(run) && !cumulative;
        run.fact("redelivered", read(consumer, again ? 6 : 0).size());
        consumer.close();
        int left = Transactions.commits(run) ? 4 : COUNT;
        run.fact("left", read(consumer(run, client, first(run), type), left).size());
    }

    /** One message in two transactions. */
    private static void conflict(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        send(producer(run, client, first(run), false), null, "offered");
        Consumer<String> consumer = consumer(run, client, first(run), SubscriptionType.Shared);
        MessageId message = read(consumer, COUNT).get(0).getMessageId();
        Transaction holder = begin(client, 60_000);
        Transaction other = begin(client, 60_000);
        consumer.acknowledgeAsync(message, holder).get();
        run.fact("refusal", Transactions.refusal(() -> consumer.acknowledgeAsync(message, other).get()));
        run.fact("commit_of_other", Transactions.refusal(() -> other.commit().get()));
        run.fact("commit_of_holder", Transactions.refusal(() -> holder.commit().get()));
        consumer.close();
        Consumer<String> next = consumer(run, client, first(run), SubscriptionType.Shared);
        run.fact("left", read(next, COUNT - 1).size());
    }

    /** A transaction that nobody ends holds back readers until its time is up. */
    private static void timeout(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        Producer<String> producer = producer(run, client, first(run), false);
        Consumer<String> consumer = consumer(run, client, first(run), SubscriptionType.Exclusive);
        Transaction transaction = begin(client, 2000);
        producer.newMessage(transaction).value("inside").send();
        producer.send("after");
        run.fact("seen_before", read(consumer, 0).size());
        run.fact("seen", read(consumer, 1).stream().map(Message::getValue).toList());
        run.fact("commit", Transactions.refusal(() -> transaction.commit().get()));
    }

    /** What a client sends again after a lost connection, and what only a faulty one sends. */
    private static void repeated(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        producer(run, client, first(run), false);
        TransactionCoordinatorClient coordinators = ((PulsarClientImpl) client).getTcClient();
        TxnID id = coordinators.newTransaction(60, TimeUnit.SECONDS);
        for (int i = 0; i < 2; i++) {
            coordinators.addPublishPartitionToTxn(id, List.of(first(run)));
        }
        run.fact("missing_topic",
                Transactions.refusal(() -> coordinators.addPublishPartitionToTxn(id, List.of(first(run) + "-missing"))));
        coordinators.commit(id);
        run.fact("again", Transactions.refusal(() -> coordinators.commit(id)));
        run.fact("otherwise", Transactions.refusal(() -> coordinators.abort(id)));
        run.fact("late", Transactions.refusal(() -> coordinators.addPublishPartitionToTxn(id, List.of(first(run)))));
        TxnID unknown = new TxnID(id.getMostSigBits(), 1L << 40);
        run.fact("unknown", Transactions.refusal(() -> coordinators.commit(unknown)));
    }

    /** What the library of {@code pulsar-admin} shows of an open transaction, and that it aborts it. */
    private static void admin(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        var admin = run.closing(org.apache.pulsar.client.admin.PulsarAdmin.builder()
                .serviceHttpUrl(run.arg("web", ""))
                .build()).transactions();
        Producer<String> producer = producer(run, client, first(run), false);
        send(producer, null, "offered");
        Consumer<String> consumer = consumer(run, client, first(run), SubscriptionType.Shared);
        Transaction transaction = begin(client, 60_000);
        TxnID id = transaction.getTxnID();
        producer.newMessage(transaction).value("inside").send();
        MessageIdImpl message = (MessageIdImpl) read(consumer, COUNT).get(0).getMessageId();
        consumer.acknowledgeAsync(message, transaction).get();
        int coordinator = (int) id.getMostSigBits();
        run.fact("coordinators", admin.listTransactionCoordinators().size());
        run.fact("ongoing", admin.getCoordinatorStatsById(coordinator).ongoingTxnSize);
        run.fact("slow", admin.getSlowTransactions(0, TimeUnit.MILLISECONDS).containsKey(id.toString()));
        var metadata = admin.getTransactionMetadata(id);
        run.fact("status", metadata.status);
        run.fact("produced", metadata.producedPartitions.keySet().equals(java.util.Set.of(first(run))));
        run.fact("acked", metadata.ackedPartitions.get(first(run)).keySet());
        run.fact("in_buffer", admin.getTransactionInBufferStats(id, first(run)).startPosition != null);
        run.fact("buffer", admin.getTransactionBufferStats(first(run), false, false).ongoingTxnSize);
        run.fact("pending_acks", admin.getPendingAckStats(first(run), "s", false).ongoingTxnSize);
        run.fact("position", admin.getPositionStatsInPendingAck(
                first(run), "s", message.getLedgerId(), message.getEntryId(), null).state.name());
        run.fact("internal", Transactions.refusal(() -> admin.getCoordinatorInternalStats(coordinator, false)));
        run.fact("replicas", Transactions.refusal(() -> admin.scaleTransactionCoordinators(1)));
        admin.abortTransaction(id);
        run.fact("redelivered", read(consumer, 1).size());
        run.fact("commit", Transactions.refusal(() -> transaction.commit().get()));
    }

    /** A transaction of a v4 client, and a later one of a v5 client that commits first, on one ordinary topic. */
    private static void mixed(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        var newer = run.transactionalClient(java.time.Duration.ofMinutes(1));
        Producer<String> producer = producer(run, client, first(run), false);
        var newerProducer = Transactions.producer(run, newer, first(run));
        Consumer<String> consumer = consumer(run, client, first(run), SubscriptionType.Shared);
        Watcher watcher = Watcher.queue(run, newer, first(run), "watcher");
        Transaction transaction = begin(client, 60_000);
        send(producer, transaction, "older");
        var newerTransaction = newer.newTransaction();
        List<String> values = Transactions.values("newer", COUNT);
        Transactions.send(newerProducer, newerTransaction, values);
        Transactions.end(newerTransaction, true);
        run.fact("seen_while_open", List.of(read(consumer, 0).size(), watcher.seen(values)));
        end(run, transaction);
        int count = Transactions.commits(run) ? 2 * COUNT : COUNT;
        run.fact("seen", read(consumer, count).size());
        watcher.await(values);
        run.fact("older_seen_by_v5", watcher.seen(olderValues()));
    }

    private static List<String> olderValues() {
        List<String> values = new ArrayList<>();
        for (int i = 0; i < COUNT; i++) {
            values.add("older|" + i);
        }
        return values;
    }
}
