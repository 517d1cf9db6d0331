package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Acknowledgements in transactions: taken back by an abort, kept by a commit, exclusive while it is open. */
final class TransactionAckCases {
    private static final Duration LONG = Duration.ofSeconds(120);
    private static final Duration STEP = Duration.ofMillis(100);

    private TransactionAckCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("txn_transform", TransactionAckCases::transform);
        cases.put("txn_cumulative", TransactionAckCases::cumulative);
        cases.put("txn_same_segment", TransactionAckCases::writeAndAcknowledgeOneSegment);
        cases.put("txn_conflict", TransactionAckCases::conflict);
        cases.put("txn_acks", TransactionAckCases::manyAcks);
    }

    /** Consume, transform, produce: ten messages at a time, every third transaction aborted, until all came through. */
    private static void transform(CaseRun run) throws Exception {
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic in = run.scalableTopic("in", 4);
        ScalableTopic out = run.scalableTopic("out", 2);
        Watcher output = Watcher.stream(run, run.client(), out.name(), "output");
        List<String> inputs = Transactions.values("in", run.intArg("messages", 200));
        Transactions.send(Transactions.producer(run, client, in.name()), null, inputs);
        QueueConsumer<String> consumer = Readers.queue(client, in.name(), "transform").subscribe();
        Producer<String> producer = Transactions.producer(run, client, out.name());
        Set<String> done = new HashSet<>();
        int aborted = 0;
        int again = 0;
        for (int round = 0; done.size() < inputs.size(); round++) {
            List<Message<String>> batch = receiveUpTo(consumer, 10);
            if (batch.isEmpty()) {
                continue;
            }
            Transaction transaction = client.newTransaction();
            List<String> results = new ArrayList<>();
            for (Message<String> message : batch) {
                again += done.contains(message.value()) ? 1 : 0;
                results.add("out of " + message.value());
                consumer.acknowledge(message.id(), transaction);
            }
            Transactions.send(producer, transaction, results);
            if (round % 3 == 0) {
                transaction.abort();
                aborted += batch.size();
                continue;
            }
            transaction.commit();
            batch.forEach(message -> done.add(message.value()));
        }
        List<String> expected = inputs.stream().map(input -> "out of " + input).toList();
        output.await(expected);
        Watcher.awaitQuiet(List.of(output));
        consumer.close();
        QueueConsumer<String> second = run.closing(Readers.queue(client, in.name(), "transform").subscribe());
        run.fact("left_after_acks", Readers.readUntilQuiet(second::receive, message -> { }));
        run.fact("inputs", inputs.size());
        run.fact("aborted_inputs", aborted);
        run.fact("received_after_commit", again);
        run.fact("outputs", output.seen(expected));
        run.fact("output_duplicates", output.duplicates());
    }

    private static List<Message<String>> receiveUpTo(QueueConsumer<String> consumer, int limit) throws Exception {
        List<Message<String>> batch = new ArrayList<>();
        while (batch.size() < limit) {
            Message<String> message = consumer.receive(STEP);
            if (message == null) {
                break;
            }
            batch.add(message);
        }
        return batch;
    }

    /** A cumulative acknowledgement that is aborted has not happened; one that is committed has. */
    private static void cumulative(CaseRun run) throws Exception {
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 2));
        Tally tally = new Tally();
        new Load(run, client, topic.name(), tally).send(200);
        List<String> all = new ArrayList<>();
        Transaction aborted = client.newTransaction();
        StreamConsumer<String> first = Readers.stream(client, topic.name(), "stream").consumerName("reader").subscribe();
        acknowledgeHalf(first, aborted, all);
        Transactions.awaitAnswered(aborted);
        run.fact("abort_refusal", Transactions.refusal(aborted::abort));
        int[] again = new int[1];
        Readers.readUntilQuiet(first::receive, message -> again[0] += all.contains(message.value()) ? 1 : 0);
        run.fact("same_consumer_again", again[0]);
        first.close();
        Tally.Received afterAbort = tally.new Received();
        Transaction committed = client.newTransaction();
        StreamConsumer<String> second = Readers.stream(client, topic.name(), "stream").consumerName("reader").subscribe();
        List<String> half = new ArrayList<>();
        acknowledgeHalf(second, committed, half);
        half.forEach(afterAbort::add);
        Readers.readUntil(second::receive, afterAbort::complete, message -> afterAbort.add(message.value()));
        run.fact("commit_refusal", Transactions.refusal(committed::commit));
        second.close();
        StreamConsumer<String> third = run.closing(
                Readers.stream(client, topic.name(), "stream").consumerName("reader").subscribe());
        Tally.Received left = tally.new Received();
        Readers.readUntilQuiet(third::receive, message -> left.add(message.value()));
        afterAbort.report(run, "after_abort_");
        left.report(run, "after_commit_");
        run.fact("acknowledged_again", half.stream().filter(value -> left.has(Tally.identity(value))).count());
    }

    private static void acknowledgeHalf(StreamConsumer<String> consumer, Transaction transaction, List<String> values)
            throws Exception {
        List<Message<String>> read = new ArrayList<>();
        Readers.readUntil(consumer::receive, () -> read.size() == 100, read::add);
        read.forEach(message -> values.add(message.value()));
        consumer.acknowledgeCumulative(read.get(read.size() - 1).id(), transaction);
    }

    /** Each transaction writes to the one segment that it acknowledges on, under the eyes of its consumer. */
    private static void writeAndAcknowledgeOneSegment(CaseRun run) throws Exception {
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(1);
        Producer<String> producer = Transactions.producer(run, client, topic.name());
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "live").subscribe());
        List<String> deliveries = new ArrayList<>();
        Transactions.send(producer, null, List.of("start|0"));
        Transaction aborted = client.newTransaction();
        acknowledgeNext(consumer, aborted, deliveries);
        Transactions.send(producer, aborted, List.of("aborted|0"));
        Transactions.awaitAnswered(aborted);
        aborted.abort();
        Transaction committed = client.newTransaction();
        acknowledgeNext(consumer, committed, deliveries);
        Transactions.send(producer, committed, List.of("committed|0"));
        committed.commit();
        Transaction last = client.newTransaction();
        acknowledgeNext(consumer, last, deliveries);
        last.commit();
        run.fact("deliveries", deliveries);
        run.fact("left", Readers.readUntilQuiet(consumer::receive, message -> { }));
    }

    private static void acknowledgeNext(QueueConsumer<String> consumer, Transaction transaction, List<String> deliveries)
            throws Exception {
        Message<String> message = null;
        while (message == null) {
            message = consumer.receive(STEP);
        }
        deliveries.add(message.value());
        consumer.acknowledge(message.id(), transaction);
    }

    /** Two transactions acknowledge one message: the second is refused, can only abort, and leaves the first alone. */
    private static void conflict(CaseRun run) throws Exception {
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(1);
        ScalableTopic out = run.scalableTopic("out", 1);
        Watcher output = Watcher.queue(run, run.client(), out.name(), "output");
        Producer<String> outputs = Transactions.producer(run, client, out.name());
        Transactions.send(Transactions.producer(run, client, topic.name()), null, List.of("message|0"));
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "both").subscribe());
        Message<String> message = consumer.receive();
        Transaction first = client.newTransaction();
        Transaction second = client.newTransaction();
        consumer.acknowledge(message.id(), first);
        Transactions.awaitAnswered(first);
        Transactions.send(outputs, first, List.of("of the first|0"));
        Transactions.send(outputs, second, List.of("of the second|0"));
        consumer.acknowledge(message.id(), second);
        Transactions.awaitAnswered(second);
        run.fact("second_commit", Transactions.refusal(second::commit));
        run.fact("second_state", second.state().name());
        run.fact("first_end", Transactions.refusal(() -> Transactions.end(first, Transactions.commits(run))));
        Transactions.send(outputs, null, List.of("after|0"));
        output.await(List.of("after|0"));
        Watcher.awaitQuiet(List.of(output));
        run.fact("outputs", output.values().stream().sorted().toList());
        List<String> again = new ArrayList<>();
        Transaction third = client.newTransaction();
        Readers.readUntilQuiet(consumer::receive, redelivered -> {
            again.add(redelivered.value());
            consumer.acknowledge(redelivered.id(), third);
        });
        run.fact("again", again);
        run.fact("third_commit", Transactions.refusal(third::commit));
    }

    /** {@code operations} acknowledgements in one transaction. */
    private static void manyAcks(CaseRun run) throws Exception {
        int operations = run.intArg("operations", 100);
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(4);
        Transactions.send(
                Transactions.producer(run, client, topic.name()), null, Transactions.values("message", operations));
        PulsarClient reading = run.transactionalClient(LONG);
        QueueConsumer<String> consumer = Readers.queue(reading, topic.name(), "acks").subscribe();
        Transaction transaction = reading.newTransaction();
        int[] acknowledged = new int[1];
        Readers.readUntil(consumer::receive, () -> acknowledged[0] == operations, message -> {
            consumer.acknowledge(message.id(), transaction);
            acknowledged[0]++;
        });
        Transactions.awaitAnswered(transaction);
        long begin = System.nanoTime();
        Transactions.end(transaction, Transactions.commits(run));
        run.fact("end_ms", (System.nanoTime() - begin) / 1_000_000);
        int expected = Transactions.commits(run) ? 0 : operations;
        run.fact("same_consumer_again", distinct(run, consumer, "same_consumer", expected));
        consumer.close();
        QueueConsumer<String> second = run.closing(Readers.queue(client, topic.name(), "acks").subscribe());
        run.fact("left", distinct(run, second, "second_consumer", expected));
    }

    /** How many different messages come: waits for the expected number, then for silence. */
    private static int distinct(CaseRun run, QueueConsumer<String> consumer, String name, int expected) throws Exception {
        Set<String> values = new HashSet<>();
        Readers.readUntil(consumer::receive, () -> values.size() >= expected, message -> {
            values.add(message.value());
            run.fact(name + "_so_far", values.size());
        });
        Readers.readUntilQuiet(consumer::receive, message -> values.add(message.value()));
        return values.size();
    }
}
