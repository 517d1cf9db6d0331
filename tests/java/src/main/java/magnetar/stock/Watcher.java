package magnetar.stock;

import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.function.Consumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** A subscription that is read all the time, each message acknowledged at once and remembered in the order it came. */
final class Watcher {
    private final List<String> values = new ArrayList<>();
    private final Set<String> distinct = new HashSet<>();
    private final Set<String> topics = new HashSet<>();
    private long lastNanos = System.nanoTime();

    private Watcher() {
    }

    static Watcher queue(CaseRun run, PulsarClient client, String topic, String subscription) throws Exception {
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic, subscription).subscribe());
        return new Watcher().reading(consumer::receive, message -> consumer.acknowledge(message.id()));
    }

    static Watcher stream(CaseRun run, PulsarClient client, String topic, String subscription) throws Exception {
        StreamConsumer<String> consumer = run.closing(Readers.stream(client, topic, subscription).subscribe());
        return new Watcher().reading(consumer::receive, message -> consumer.acknowledgeCumulative(message.id()));
    }

    private Watcher reading(Readers.Receive<String> receive, Consumer<Message<String>> acknowledge) {
        Readers.background("watcher", () -> Readers.readUntil(receive, () -> false, message -> {
            add(message);
            acknowledge.accept(message);
        }));
        return this;
    }

    private synchronized void add(Message<String> message) {
        values.add(message.value());
        distinct.add(message.value());
        topics.add(String.valueOf(message.topic()));
        lastNanos = System.nanoTime();
        notifyAll();
    }

    /** Returns when all of these have come; the case's deadline ends a wait in vain. */
    synchronized void await(Collection<String> expected) throws InterruptedException {
        while (!distinct.containsAll(expected)) {
            wait();
        }
    }

    /** Returns when nothing has come for {@link Readers#QUIET} to any of them, counted from the call at the earliest. */
    static void awaitQuiet(Collection<Watcher> watchers) throws InterruptedException {
        long begin = System.nanoTime();
        for (Watcher watcher : watchers) {
            watcher.awaitQuiet(begin);
        }
    }

    private synchronized void awaitQuiet(long begin) throws InterruptedException {
        while (true) {
            long quietNanos = System.nanoTime() - Math.max(begin, lastNanos);
            long leftMs = Readers.QUIET.toMillis() - quietNanos / 1_000_000;
            if (leftMs <= 0) {
                return;
            }
            wait(leftMs);
        }
    }

    /** How many of these have come, each counted once. */
    synchronized long seen(Collection<String> some) {
        return some.stream().filter(distinct::contains).count();
    }

    synchronized int duplicates() {
        return values.size() - distinct.size();
    }

    synchronized List<String> values() {
        return List.copyOf(values);
    }

    /** Of how many segments (or other topics) messages have come. */
    synchronized int topics() {
        return topics.size();
    }
}
