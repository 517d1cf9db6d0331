package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Messages in transactions: who sees them, and when. */
final class TransactionCases {
    private static final Duration LONG = Duration.ofSeconds(120);

    private TransactionCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("txn_visibility", TransactionCases::visibility);
        cases.put("txn_reshape", TransactionCases::reshape);
        cases.put("txn_timeout", TransactionCases::timeout);
        cases.put("txn_late_send", TransactionCases::lateSend);
        cases.put("txn_sends", TransactionCases::manySends);
        cases.put("txn_persistent", TransactionCases::persistentTopic);
    }

    /** A transaction over two topics with {@code segments} each: nothing of it while it is open, then all or nothing. */
    private static void visibility(CaseRun run) throws Exception {
        int count = run.intArg("messages", 100);
        boolean commit = Transactions.commits(run);
        PulsarClient client = run.transactionalClient(LONG);
        List<ScalableTopic> topics = List.of(
                run.scalableTopic("a", run.intArg("segments", 4)), run.scalableTopic("b", run.intArg("segments", 4)));
        List<Producer<String>> producers = new ArrayList<>();
        List<Watcher> watchers = new ArrayList<>();
        for (ScalableTopic topic : topics) {
            producers.add(Transactions.producer(run, client, topic.name()));
            watchers.add(Watcher.queue(run, run.client(), topic.name(), "queue"));
            watchers.add(Watcher.stream(run, run.client(), topic.name(), "stream"));
        }
        sendToEach(producers, watchers, "before");
        List<String> inside = Transactions.values("inside", count);
        Transaction transaction = client.newTransaction();
        for (Producer<String> producer : producers) {
            Transactions.send(producer, transaction, inside);
        }
        Watcher.awaitQuiet(watchers);
        run.fact("seen_while_open", watchers.stream().map(watcher -> watcher.seen(inside)).toList());
        Transactions.end(transaction, commit);
        run.fact("state", transaction.state().name());
        sendToEach(producers, watchers, "after");
        for (Watcher watcher : watchers) {
            if (commit) {
                watcher.await(inside);
            }
        }
        Watcher.awaitQuiet(watchers);
        run.fact("seen", watchers.stream().map(watcher -> watcher.seen(inside)).toList());
        run.fact("duplicates", watchers.stream().map(Watcher::duplicates).toList());
        run.fact("segments_seen", watchers.stream().map(Watcher::topics).toList());
        List<Watcher> fresh = new ArrayList<>();
        for (ScalableTopic topic : topics) {
            Watcher watcher = Watcher.queue(run, run.client(), topic.name(), "fresh");
            watcher.await(Transactions.values("after", 40));
            fresh.add(watcher);
        }
        Watcher.awaitQuiet(fresh);
        run.fact("reread", fresh.stream().map(watcher -> watcher.seen(inside)).toList());
    }

    /** Forty messages without a transaction to each topic, seen by both of its watchers. */
    private static void sendToEach(List<Producer<String>> producers, List<Watcher> watchers, String name)
            throws Exception {
        List<String> values = Transactions.values(name, 40);
        for (Producer<String> producer : producers) {
            Transactions.send(producer, null, values);
        }
        for (Watcher watcher : watchers) {
            watcher.await(values);
        }
    }

    /** The layout changes twice while a transaction is open that wrote before, between and after the changes. */
    private static void reshape(CaseRun run) throws Exception {
        boolean split = run.arg("change", "split").equals("split");
        boolean commit = Transactions.commits(run);
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(split ? 2 : 4);
        Watcher queue = Watcher.queue(run, run.client(), topic.name(), "queue");
        Watcher stream = Watcher.stream(run, run.client(), topic.name(), "stream");
        Producer<String> producer = Transactions.producer(run, client, topic.name());
        Tally plain = new Tally();
        Tally inside = new Tally();
        Transaction transaction = client.newTransaction();
        List<String> insideValues = new ArrayList<>(sendTallied(producer, transaction, inside));
        for (int change = 0; change < 2; change++) {
            List<Long> active = new ArrayList<>(run.admin().activeSegments(topic).values());
            if (split) {
                run.admin().split(topic, active.get(0));
            } else {
                run.admin().merge(topic, active.get(0), active.get(1));
            }
            insideValues.addAll(sendTallied(producer, transaction, inside));
        }
        Watcher.awaitQuiet(List.of(queue, stream));
        run.fact("seen_while_open", List.of(queue.seen(insideValues), stream.seen(insideValues)));
        Transactions.end(transaction, commit);
        List<String> after = sendTallied(producer, null, plain);
        run.fact("inside_total", insideValues.size());
        for (Watcher watcher : List.of(queue, stream)) {
            watcher.await(after);
            if (commit) {
                watcher.await(insideValues);
            }
        }
        Watcher.awaitQuiet(List.of(queue, stream));
        run.fact("seen", List.of(queue.seen(insideValues), stream.seen(insideValues)));
        run.fact("duplicates", List.of(queue.duplicates(), stream.duplicates()));
        Tally.Received inOrder = inside.new Received();
        stream.values().stream().filter(insideValues::contains).forEach(inOrder::add);
        inOrder.report(run, "stream_");
        run.fact("active_segments", run.admin().activeSegments(topic).size());
    }

    private static List<String> sendTallied(Producer<String> producer, Transaction transaction, Tally tally)
            throws Exception {
        List<String> values = new ArrayList<>();
        for (int i = 0; i < 80; i++) {
            String key = (transaction == null ? "p" : "t") + i % 40;
            String value = tally.next(key, 10);
            var message = producer.newMessage().key(key).value(value);
            (transaction == null ? message : message.transaction(transaction)).send();
            tally.acknowledged(value);
            values.add(value);
        }
        return values;
    }

    /** Nobody ends the transaction: at its deadline it counts as aborted, and what was sent behind it is delivered. */
    private static void timeout(CaseRun run) throws Exception {
        Duration timeout = Duration.ofSeconds(run.intArg("transactionTimeoutS", 3));
        PulsarClient client = run.transactionalClient(timeout);
        ScalableTopic topic = run.scalableTopic(2);
        Watcher queue = Watcher.queue(run, run.client(), topic.name(), "queue");
        Watcher stream = Watcher.stream(run, run.client(), topic.name(), "stream");
        Producer<String> producer = Transactions.producer(run, client, topic.name());
        List<String> inside = Transactions.values("inside", 40);
        List<String> behind = Transactions.values("behind", 40);
        Transaction transaction = client.newTransaction();
        long deadline = System.nanoTime() + timeout.toNanos();
        Transactions.send(producer, transaction, inside);
        Transactions.send(producer, null, behind);
        run.fact("seen_before_deadline", queue.seen(behind) + stream.seen(behind));
        queue.await(behind);
        run.fact("queue_ms_after_deadline", (System.nanoTime() - deadline) / 1_000_000);
        stream.await(behind);
        run.fact("stream_ms_after_deadline", (System.nanoTime() - deadline) / 1_000_000);
        Watcher.awaitQuiet(List.of(queue, stream));
        run.fact("seen", List.of(queue.seen(inside), stream.seen(inside)));
        run.fact("state", transaction.state().name());
        run.fact("local_refusal", Transactions.refusal(transaction::commit));
        Transactions.pretendOpen(transaction);
        run.fact("commit_refusal", Transactions.refusal(transaction::commit));
        Transaction next = client.newTransaction();
        List<String> fresh = Transactions.values("next", 4);
        Transactions.send(producer, next, fresh);
        next.commit();
        queue.await(fresh);
        stream.await(fresh);
        run.fact("next_seen", List.of(queue.seen(fresh), stream.seen(fresh)));
    }

    /**
     * Sends after the end: the client refuses them itself; one that reaches the broker is refused there, on a segment
     * that took part in the transaction and on one that did not.
     */
    private static void lateSend(CaseRun run) throws Exception {
        boolean commit = Transactions.commits(run);
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic known = run.scalableTopic("known", 1);
        ScalableTopic unknown = run.scalableTopic("unknown", 1);
        Watcher knownWatcher = Watcher.queue(run, run.client(), known.name(), "queue");
        Watcher unknownWatcher = Watcher.queue(run, run.client(), unknown.name(), "queue");
        Producer<String> toKnown = Transactions.producer(run, client, known.name());
        Producer<String> toUnknown = Transactions.producer(run, client, unknown.name());
        Transaction transaction = client.newTransaction();
        List<String> inside = Transactions.values("inside", 5);
        Transactions.send(toKnown, transaction, inside);
        Transactions.end(transaction, commit);
        List<String> behind = Transactions.values("behind", 5);
        Transactions.send(toKnown, null, behind);
        // The segment's owner has heard of the end when it delivers what lies behind the transaction.
        knownWatcher.await(behind);
        List<String> late = List.of("late|0");
        run.fact("local_refusal", Transactions.refusal(() -> Transactions.send(toKnown, transaction, late)));
        Transactions.pretendOpen(transaction);
        run.fact("known_refusal", Transactions.refusal(() -> Transactions.send(toKnown, transaction, late)));
        run.fact("unknown_refusal", Transactions.refusal(() -> Transactions.send(toUnknown, transaction, late)));
        List<String> after = Transactions.values("after", 5);
        Transactions.send(toKnown, null, after);
        Transactions.send(toUnknown, null, after);
        knownWatcher.await(after);
        unknownWatcher.await(after);
        run.fact("late_seen", knownWatcher.seen(late) + unknownWatcher.seen(late));
        run.fact("seen", knownWatcher.seen(inside));
    }

    /** {@code operations} sends in one transaction. */
    private static void manySends(CaseRun run) throws Exception {
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        Watcher queue = Watcher.queue(run, run.client(), topic.name(), "queue");
        Producer<String> producer = Transactions.producer(run, client, topic.name());
        List<String> inside = Transactions.values("inside", run.intArg("operations", 100));
        Transaction transaction = client.newTransaction();
        Transactions.send(producer, transaction, inside);
        Watcher.awaitQuiet(List.of(queue));
        run.fact("seen_while_open", queue.seen(inside));
        long begin = System.nanoTime();
        Transactions.end(transaction, Transactions.commits(run));
        run.fact("end_ms", (System.nanoTime() - begin) / 1_000_000);
        List<String> after = Transactions.values("after", 40);
        Transactions.send(producer, null, after);
        queue.await(after);
        if (Transactions.commits(run)) {
            queue.await(inside);
        }
        Watcher.awaitQuiet(List.of(queue));
        run.fact("seen", queue.seen(inside));
        run.fact("duplicates", queue.duplicates());
    }

    /** One transaction over a scalable topic and an ordinary one, with messages and acknowledgements on both. */
    private static void persistentTopic(CaseRun run) throws Exception {
        boolean commit = Transactions.commits(run);
        PulsarClient client = run.transactionalClient(LONG);
        ScalableTopic scalable = run.scalableTopic("scalable", 2);
        String ordinary = "persistent://public/default/" + run.localName() + "-ordinary";
        List<String> inside = Transactions.values("inside", 20);
        List<String> offered = Transactions.values("offered", 20);
        List<Watcher> watchers = new ArrayList<>();
        List<Producer<String>> producers = new ArrayList<>();
        List<QueueConsumer<String>> consumers = new ArrayList<>();
        for (String topic : List.of(scalable.name(), ordinary)) {
            watchers.add(Watcher.queue(run, run.client(), topic, "watcher"));
            consumers.add(Readers.queue(client, topic, "acknowledging").subscribe());
            producers.add(Transactions.producer(run, client, topic));
        }
        Transaction transaction = client.newTransaction();
        for (int i = 0; i < producers.size(); i++) {
            Transactions.send(producers.get(i), null, offered);
            QueueConsumer<String> consumer = consumers.get(i);
            int[] acknowledged = new int[1];
            Readers.readUntil(consumer::receive, () -> acknowledged[0] == offered.size(), message -> {
                consumer.acknowledge(message.id(), transaction);
                acknowledged[0]++;
            });
            Transactions.send(producers.get(i), transaction, inside);
            Watcher.awaitQuiet(List.of(watchers.get(i)));
        }
        run.fact("seen_while_open", watchers.stream().map(watcher -> watcher.seen(inside)).toList());
        Transactions.end(transaction, commit);
        List<Integer> left = new ArrayList<>();
        List<Long> seen = new ArrayList<>();
        for (int i = 0; i < producers.size(); i++) {
            Transactions.send(producers.get(i), null, List.of("after|0"));
            watchers.get(i).await(commit ? inside : List.of());
            watchers.get(i).await(List.of("after|0"));
            Watcher.awaitQuiet(List.of(watchers.get(i)));
            seen.add(watchers.get(i).seen(inside));
            consumers.get(i).close();
            Watcher again = Watcher.queue(run, run.client(), i == 0 ? scalable.name() : ordinary, "acknowledging");
            again.await(List.of("after|0"));
            Watcher.awaitQuiet(List.of(again));
            left.add((int) again.seen(offered));
        }
        run.fact("seen", seen);
        run.fact("offered_again", left);
    }
}
