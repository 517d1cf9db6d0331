package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.topic;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.LongRunningProcessStatus;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TableView;

/** Compaction: the v4 client's readers, consumers and table views, and the admin library. */
final class V4Compaction {
    private static final int LIMIT_MS = 15_000;
    private static final int QUIET_MS = 500;
    private static final int KEYS = 20;
    private static final String NAMESPACE = "public/default";

    private V4Compaction() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_compaction", V4Compaction::compaction);
        cases.put("v4_compacted_table", V4Compaction::table);
        cases.put("v4_compaction_threshold", V4Compaction::threshold);
    }

    private static Producer<byte[]> producer(CaseRun run, PulsarClient client) throws Exception {
        return run.closing(client.newProducer()
                .topic(topic(run))
                .enableBatching(run.flag("batching"))
                .batchingMaxPublishDelay(20, TimeUnit.MILLISECONDS)
                .compressionType(CompressionType.valueOf(run.arg("compression", "NONE")))
                .sendTimeout(LIMIT_MS, TimeUnit.MILLISECONDS)
                .create());
    }

    /** Sends values of all keys; those of every fifth key are null. Returns what a table has then. */
    private static Map<String, String> send(Producer<byte[]> producer, String round, Map<String, String> before)
            throws Exception {
        Map<String, String> expected = new TreeMap<>(before);
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (int i = 0; i < 3 * KEYS; i++) {
            String key = "k" + i % KEYS;
            boolean deletes = i >= 2 * KEYS && i % 5 == 0;
            String value = round + "-" + i;
            sends.add(producer.newMessage().key(key).value(deletes ? null : value.getBytes()).sendAsync());
            if (deletes) {
                expected.remove(key);
            } else {
                expected.put(key, value);
            }
        }
        sends.add(producer.newMessage().value("no key".getBytes()).sendAsync());
        for (CompletableFuture<MessageId> send : sends) {
            send.get();
        }
        return expected;
    }

    private static String compact(PulsarAdmin admin, String topic) throws Exception {
        admin.topics().triggerCompaction(topic);
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS); System.nanoTime() < end;) {
            LongRunningProcessStatus status = admin.topics().compactionStatus(topic);
            if (status.status != LongRunningProcessStatus.Status.RUNNING) {
                return status.status.name();
            }
            Thread.sleep(20);
        }
        return "no end";
    }

    /** All that a reader has until there is nothing available. */
    private static List<Message<byte[]>> read(CaseRun run, PulsarClient client, MessageId start) throws Exception {
        List<Message<byte[]>> found = new ArrayList<>();
        try (Reader<byte[]> reader =
                client.newReader().topic(topic(run)).readCompacted(true).startMessageId(start).create()) {
            while (reader.hasMessageAvailable()) {
                Message<byte[]> message = reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS);
                if (message == null) {
                    run.fact("reader_waited", true);
                    break;
                }
                found.add(message);
            }
        }
        return found;
    }

    private static Map<String, String> values(List<Message<byte[]>> messages) {
        Map<String, String> values = new TreeMap<>();
        for (Message<byte[]> message : messages) {
            if (message.getData() == null || message.getData().length == 0) {
                values.remove(message.getKey());
            } else if (message.getKey() != null) {
                values.put(message.getKey(), new String(message.getData()));
            }
        }
        return values;
    }

    private static List<Message<byte[]>> drain(Consumer<byte[]> consumer) throws Exception {
        List<Message<byte[]>> found = new ArrayList<>();
        while (true) {
            Message<byte[]> message = consumer.receive(found.isEmpty() ? LIMIT_MS : QUIET_MS, TimeUnit.MILLISECONDS);
            if (message == null) {
                return found;
            }
            found.add(message);
            consumer.acknowledgeCumulative(message);
        }
    }

    /** Two compactions of a topic, each read by readers and consumers. */
    private static void compaction(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        PulsarAdmin admin = admin(run);
        String topic = topic(run);
        admin.topics().createNonPartitionedTopic(topic);
        Producer<byte[]> producer = producer(run, client);
        Map<String, String> expected = send(producer, "a", Map.of());
        run.fact("not_run", admin.topics().compactionStatus(topic).status.name());
        run.fact("same_before", values(read(run, client, MessageId.earliest)).equals(expected));
        run.fact("status", compact(admin, topic));
        List<Message<byte[]>> first = read(run, client, MessageId.earliest);
        run.fact("count", first.size());
        run.fact("same", values(first).equals(expected));
        run.fact("removed", admin.topics().getStats(topic).getCompaction().getLastCompactionRemovedEventCount());
        expected = send(producer, "b", expected);
        List<Message<byte[]>> between = read(run, client, MessageId.earliest);
        run.fact("count_between", between.size());
        run.fact("same_between", values(between).equals(expected));
        run.fact("status_again", compact(admin, topic));
        List<Message<byte[]>> second = read(run, client, MessageId.earliest);
        run.fact("count_again", second.size());
        run.fact("same_again", values(second).equals(expected));
        MessageId middle = second.get(second.size() / 2 - 1).getMessageId();
        run.fact("count_from_middle", read(run, client, middle).size());
        for (SubscriptionType type : List.of(SubscriptionType.Exclusive, SubscriptionType.Failover)) {
            Consumer<byte[]> consumer = run.closing(client.newConsumer()
                    .topic(topic)
                    .subscriptionName(type.name())
                    .subscriptionType(type)
                    .readCompacted(true)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                    .subscribe());
            run.fact("same_" + type.name(), values(drain(consumer)).equals(expected));
            consumer.close();
        }
        Consumer<byte[]> plain = run.closing(client.newConsumer()
                .topic(topic)
                .subscriptionName("plain")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .subscribe());
        run.fact("plain_is_whole", drain(plain).size() >= 3 * KEYS + 1);
    }

    private static boolean becomes(TableView<byte[]> table, Map<String, String> expected) throws Exception {
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS); System.nanoTime() < end;) {
            Map<String, String> found = new HashMap<>();
            table.forEach((key, value) -> found.put(key, new String(value)));
            if (found.equals(expected)) {
                return true;
            }
            Thread.sleep(20);
        }
        return false;
    }

    /** Table views, made before and after a compaction, of a topic with or without partitions. */
    private static void table(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        PulsarAdmin admin = admin(run);
        String topic = topic(run);
        int partitions = run.intArg("partitions", 0);
        if (partitions > 0) {
            admin.topics().createPartitionedTopic(topic, partitions);
        } else {
            admin.topics().createNonPartitionedTopic(topic);
        }
        Producer<byte[]> producer = producer(run, client);
        Map<String, String> expected = send(producer, "a", Map.of());
        TableView<byte[]> early = run.closing(client.newTableView().topic(topic).create());
        run.fact("early", becomes(early, expected));
        if (partitions == 0) {
            run.fact("status", compact(admin, topic));
        }
        for (int i = 0; i < partitions; i++) {
            run.fact("status", compact(admin, topic + "-partition-" + i));
        }
        TableView<byte[]> late = run.closing(client.newTableView().topic(topic).create());
        run.fact("late", becomes(late, expected));
        expected = send(producer, "b", expected);
        run.fact("early_again", becomes(early, expected));
        run.fact("late_again", becomes(late, expected));
    }

    /** The threshold of a namespace, as the admin library sets and reads it. */
    private static void threshold(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        List<Long> found = new ArrayList<>();
        found.add(admin.namespaces().getCompactionThreshold(NAMESPACE));
        admin.namespaces().setCompactionThreshold(NAMESPACE, 1L << 40);
        found.add(admin.namespaces().getCompactionThreshold(NAMESPACE));
        admin.namespaces().removeCompactionThreshold(NAMESPACE);
        found.add(admin.namespaces().getCompactionThreshold(NAMESPACE));
        run.fact("thresholds", String.valueOf(found));
    }
}
