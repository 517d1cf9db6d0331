package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Messages;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** Stream consumers: order per key, cumulative acknowledgements, sharing of segments among consumers. */
final class StreamCases {
    private static final String SUBSCRIPTION = "stream";
    private static final Duration HANDOVER_LIMIT = Duration.ofSeconds(30);
    /** Less than the 30 s after which others get the segments of a consumer that reads none of its own. */
    private static final Duration JOIN_LIMIT = Duration.ofSeconds(20);
    private static final int SUBSCRIBE_TRIES = 5;

    private StreamCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("stream", StreamCases::inOrderAndResumed);
        cases.put("stream_multi", StreamCases::manyAtOnce);
        cases.put("stream_handover", StreamCases::joinAndLeave);
        cases.put("stream_join_under_load", StreamCases::joinUnderLoad);
        cases.put("stream_same_name", StreamCases::sameNameTakesOver);
        cases.put("stream_join_at_once", StreamCases::joinAtOnce);
    }

    /** Half is read and acknowledged, the consumer goes, a new one goes on exactly after the last acknowledged. */
    private static void inOrderAndResumed(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        int messages = run.intArg("messages", 400);
        new Load(run, client, topic.name(), tally).send(messages);
        PulsarClient firstClient = run.client();
        StreamConsumer<String> first = Readers.stream(firstClient, topic.name(), SUBSCRIPTION).consumerName("reader").subscribe();
        int[] seen = new int[1];
        Message<String>[] last = newHolder();
        Readers.readUntil(first::receive, () -> seen[0] == messages / 2, message -> {
            all.add(message.value());
            last[0] = message;
            seen[0]++;
        });
        first.acknowledgeCumulative(last[0].id());
        first.close();
        firstClient.close();
        StreamConsumer<String> second = Readers.stream(client, topic.name(), SUBSCRIPTION).consumerName("reader").subscribe();
        Readers.readUntil(second::receive, all::complete, message -> {
            all.add(message.value());
            last[0] = message;
        });
        second.acknowledgeCumulative(last[0].id());
        second.close();
        StreamConsumer<String> third = run.closing(
                Readers.stream(client, topic.name(), SUBSCRIPTION).consumerName("reader").subscribe());
        int left = Readers.readUntilQuiet(third::receive, message -> { });
        tally.report(run);
        all.report(run, "");
        run.fact("left_after_acks", left);
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    private static Message<String>[] newHolder() {
        return new Message[1];
    }

    private static void manyAtOnce(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received received = tally.new Received();
        new Load(run, client, topic.name(), tally).send(200);
        StreamConsumer<String> consumer = run.closing(Readers.stream(client, topic.name(), SUBSCRIPTION).subscribe());
        int largest = 0;
        while (!received.complete()) {
            Messages<String> batch = consumer.receiveMulti(50, Duration.ofMillis(200));
            for (Message<String> message : batch) {
                received.add(message.value());
            }
            if (batch.count() > 0) {
                largest = Math.max(largest, batch.count());
                consumer.acknowledgeCumulative(batch.lastId());
            }
        }
        received.report(run, "");
        run.fact("largest_batch", largest);
    }

    /**
     * One consumer reads; a second joins and both read; the first closes and the second reads all. In between
     * everything sent is received and acknowledged, so nothing may come twice, but for what is sent while the second
     * takes segments over.
     */
    private static void joinAndLeave(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient producing = run.client();
        PulsarClient firstClient = run.client();
        PulsarClient secondClient = run.flag("oneClient") ? firstClient : run.client();
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        Load load = run.closing(new Load(run, producing, topic.name(), tally));
        Reader first = new Reader(run, firstClient, topic, "first", all);
        load.send(200);
        boolean alone = awaitComplete(all);
        int firstAlone = first.count();
        Reader second = new Reader(run, secondClient, topic, "second", all);
        // While segments are handed over the first may still read, and what it has not acknowledged by then comes again.
        long settled = System.nanoTime() + HANDOVER_LIMIT.toNanos();
        int firstBefore;
        int secondBefore;
        boolean together;
        do {
            firstBefore = first.count();
            secondBefore = second.count();
            load.send(200);
            together = awaitComplete(all);
        } while (together && System.nanoTime() < settled
                && (first.keysSharedWith(second, firstBefore, secondBefore) > 0 || second.count() == secondBefore));
        run.fact("repeated_in_handover", all.total() - all.distinct());
        firstBefore = first.count();
        secondBefore = second.count();
        load.send(200);
        together = together && awaitComplete(all);
        run.fact("complete_alone", alone);
        run.fact("complete_together", together);
        run.fact("first_read_alone", firstAlone);
        run.fact("first_read_together", first.count() - firstBefore);
        run.fact("second_read_together", second.count() - secondBefore);
        run.fact("keys_read_by_both", first.keysSharedWith(second, firstBefore, secondBefore));
        int secondTogether = second.count();
        first.stop();
        if (!run.flag("oneClient")) {
            firstClient.close();
        }
        long left = System.nanoTime();
        load.send(200);
        run.fact("complete_after_leave", awaitComplete(all));
        run.fact("handover_ms", (System.nanoTime() - left) / 1_000_000);
        run.fact("second_read_after_leave", second.count() - secondTogether);
        run.fact("busy_retries", first.busyRetries + second.busyRetries);
        second.stop();
        tally.report(run);
        all.report(run, "");
    }

    /** A second consumer joins while messages flow; first deliveries stay in order and nothing is lost. */
    private static void joinUnderLoad(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        Load load = run.closing(new Load(run, run.client(), topic.name(), tally));
        Reader first = new Reader(run, run.client(), topic, "first", all);
        load.start();
        tally.awaitAcknowledged(300);
        Reader second = new Reader(run, run.client(), topic, "second", all);
        tally.awaitAcknowledged(tally.acknowledgedCount() + 300);
        first.stop();
        tally.awaitAcknowledged(tally.acknowledgedCount() + 300);
        load.stop();
        run.fact("complete", awaitComplete(all));
        run.fact("first_read", first.count());
        run.fact("second_read", second.count());
        run.fact("busy_retries", first.busyRetries + second.busyRetries);
        second.stop();
        Set<String> again = new HashSet<>(all.repeated());
        run.fact("repeated", again.size());
        tally.report(run);
        all.report(run, "");
    }

    /**
     * Consumers join at the same moment, so that segments are taken from some while they take up their first ones, and
     * then one after the other leaves.
     */
    private static void joinAtOnce(CaseRun run) throws Exception {
        int consumers = run.intArg("consumers", 3);
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 6));
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        Load load = run.closing(new Load(run, run.client(), topic.name(), tally));
        load.send(200);
        List<CompletableFuture<Reader>> joining = new ArrayList<>();
        for (int i = 0; i < consumers; i++) {
            String name = "reader" + i;
            PulsarClient client = run.client();
            joining.add(CompletableFuture.supplyAsync(() -> {
                try {
                    return new Reader(run, client, topic, name, all);
                } catch (Exception failure) {
                    throw new CompletionException(failure);
                }
            }));
        }
        List<Boolean> complete = new ArrayList<>();
        List<Reader> readers = new ArrayList<>();
        for (CompletableFuture<Reader> each : joining) {
            readers.add(each.get());
        }
        complete.add(awaitComplete(all, JOIN_LIMIT));
        for (Reader each : readers.subList(1, consumers)) {
            each.stop();
            load.send(200);
            complete.add(awaitComplete(all, JOIN_LIMIT));
        }
        run.fact("complete", complete);
        readers.get(0).stop();
        tally.report(run);
        all.report(run, "");
    }

    private static boolean awaitComplete(Tally.Received received) throws InterruptedException {
        return awaitComplete(received, HANDOVER_LIMIT);
    }

    private static boolean awaitComplete(Tally.Received received, Duration limit) throws InterruptedException {
        long deadline = System.nanoTime() + limit.toNanos();
        while (!received.complete()) {
            if (System.nanoTime() > deadline) {
                return false;
            }
            Thread.sleep(20);
        }
        return true;
    }

    /** A consumer that comes back under its name gets its segments at once, though the old one never said goodbye. */
    private static void sameNameTakesOver(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        Load load = run.closing(new Load(run, client, topic.name(), tally));
        PulsarClient oldClient = run.client();
        Reader old = new Reader(run, oldClient, topic, "same", all);
        load.send(200);
        awaitComplete(all);
        old.abandon();
        oldClient.shutdown();
        long gone = System.nanoTime();
        Reader fresh = new Reader(run, run.client(), topic, "same", all);
        load.send(200);
        run.fact("complete", awaitComplete(all));
        run.fact("takeover_ms", (System.nanoTime() - gone) / 1_000_000);
        run.fact("fresh_read", fresh.count());
        fresh.stop();
        all.report(run, "");
    }

    /** A stream consumer that reads and acknowledges in a thread of its own. */
    private static final class Reader {
        private final StreamConsumer<String> consumer;
        private final Readers.Background thread;
        private final AtomicInteger count = new AtomicInteger();
        private final Map<String, Integer> lastReadOfKey = new ConcurrentHashMap<>();
        private volatile boolean stopping;
        private int busyRetries;

        Reader(CaseRun run, PulsarClient client, ScalableTopic topic, String name, Tally.Received all) throws Exception {
            consumer = run.closing(subscribe(client, topic, name));
            thread = Readers.background("reader-" + name, () -> Readers.readUntil(
                    consumer::receive, () -> stopping, message -> {
                        all.add(message.value(), name);
                        lastReadOfKey.put(message.key().orElse(""), count.incrementAndGet());
                        consumer.acknowledgeCumulative(message.id());
                    }));
        }

        /** The stock client does not try again when the old owner still holds a segment; a user would. */
        private StreamConsumer<String> subscribe(PulsarClient client, ScalableTopic topic, String name) throws Exception {
            while (true) {
                try {
                    return Readers.stream(client, topic.name(), SUBSCRIPTION).consumerName(name).subscribe();
                } catch (Exception refusal) {
                    if (!String.valueOf(refusal).contains("already connected") || busyRetries == SUBSCRIBE_TRIES) {
                        throw refusal;
                    }
                    busyRetries++;
                    Thread.sleep(200);
                }
            }
        }

        int count() {
            return count.get();
        }

        /** Keys that this one has read after its message number {@code after}, and the other one after its {@code otherAfter}. */
        int keysSharedWith(Reader other, int after, int otherAfter) {
            Set<String> shared = new HashSet<>(other.lastReadOfKey.keySet());
            shared.removeIf(key -> lastReadOfKey.getOrDefault(key, 0) <= after
                    || other.lastReadOfKey.getOrDefault(key, 0) <= otherAfter);
            return shared.size();
        }

        void stop() throws Exception {
            abandon();
            consumer.close();
        }

        void abandon() throws Exception {
            stopping = true;
            thread.join();
        }
    }
}
