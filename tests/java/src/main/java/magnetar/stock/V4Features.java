package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.topic;
import static magnetar.stock.V4Clients.until;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.ConsumerCryptoFailureAction;
import org.apache.pulsar.client.api.CryptoKeyReader;
import org.apache.pulsar.client.api.DeadLetterPolicy;
import org.apache.pulsar.client.api.KeySharedPolicy;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Range;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.RegexSubscriptionMode;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TableView;

/** Features that v4 applications use: letters, chunks, encryption, keys, patterns, readers, tables, partitions. */
final class V4Features {
    private static final int OPERATION_TIMEOUT_S = 10;
    private static final int LIMIT_MS = 15_000;
    private static final int QUIET_MS = 500;
    private static final int COUNT = 100;

    private V4Features() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_retry_letters", V4Features::letters);
        cases.put("v4_chunks", V4Features::chunks);
        cases.put("v4_encryption", V4Features::encryption);
        cases.put("v4_sticky_ranges", V4Features::sticky);
        cases.put("v4_auto_split", V4Features::autoSplit);
        cases.put("v4_pattern", V4Features::pattern);
        cases.put("v4_reader", V4Features::reader);
        cases.put("v4_table_view", V4Features::tableView);
        cases.put("v4_partitions_grow", V4Features::growth);
    }

    private static Message<String> next(Consumer<String> consumer) throws Exception {
        Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        if (message == null) {
            throw new IllegalStateException("no message came to " + consumer.getTopic());
        }
        return message;
    }

    /** Acknowledged values until nothing more comes. */
    private static List<String> drain(Consumer<String> consumer) throws Exception {
        List<String> values = new ArrayList<>();
        for (Message<String> message; (message = consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS)) != null;) {
            consumer.acknowledgeAsync(message).get();
            values.add(message.getValue());
        }
        return values;
    }

    /** A message goes through the retry topic until it is a dead letter. */
    private static void letters(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING)
                .topic(topic(run))
                .subscriptionName("s")
                .subscriptionType(SubscriptionType.Shared)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .enableRetry(true)
                .deadLetterPolicy(DeadLetterPolicy.builder()
                        .maxRedeliverCount(2)
                        .initialSubscriptionName("letters")
                        .build())
                .subscribe());
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(topic(run)).create());
        MessageId sent = producer.newMessage().key("k").property("own", "p").value("m").send();
        List<String> deliveries = new ArrayList<>();
        Map<String, String> properties = Collections.emptyMap();
        for (int i = 0; i < 3; i++) {
            Message<String> message = next(consumer);
            properties = message.getProperties();
            deliveries.add(properties.getOrDefault("RECONSUMETIMES", "0"));
            consumer.reconsumeLater(message, 300, TimeUnit.MILLISECONDS);
        }
        run.fact("deliveries", deliveries);
        run.fact("own", properties.get("own"));
        run.fact("real_topic", topic(run).equals(properties.get("REAL_TOPIC")));
        run.fact("real_subscription", properties.get("REAL_SUBSCRIPTION"));
        run.fact("same_origin", sent.toString().equals(properties.get("ORIGIN_MESSAGE_ID")));
        // The dead letter waits for whoever comes: its producer made the subscription.
        PulsarAdmin admin = admin(run);
        String dead = topic(run) + "-s-DLQ";
        run.fact("subscription_made", until(() -> {
            try {
                return admin.topics().getSubscriptions(dead).contains("letters");
            } catch (Exception notYet) {
                return false;
            }
        }));
        Consumer<String> letters = run.closing(
                client.newConsumer(Schema.STRING).topic(dead).subscriptionName("letters").subscribe());
        Message<String> letter = next(letters);
        run.fact("letter", letter.getValue() + " " + letter.getKey());
        run.fact("nothing_more", consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS) == null);
        run.fact("backlog", admin.topics().getStats(topic(run)).getSubscriptions().get("s").getMsgBacklog());
    }

    /** A message in many chunks between others, through a consumer and a reader. */
    private static void chunks(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        Consumer<byte[]> consumer =
                run.closing(client.newConsumer().topic(topic(run)).subscriptionName("s")
                        .startMessageIdInclusive().subscribe());
        Producer<byte[]> producer = run.closing(client.newProducer()
                .topic(topic(run)).enableBatching(false).enableChunking(true).chunkMaxMessageSize(10_000).create());
        byte[] large = new byte[123_456];
        for (int i = 0; i < large.length; i++) {
            large[i] = (byte) (i % 251);
        }
        producer.send("first".getBytes());
        MessageId id = producer.send(large);
        producer.send("last".getBytes());
        List<Integer> sizes = new ArrayList<>();
        boolean same = false;
        for (int i = 0; i < 3; i++) {
            Message<byte[]> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            sizes.add(message.getData().length);
            same |= Arrays.equals(message.getData(), large);
            consumer.acknowledgeAsync(message).get();
        }
        run.fact("sizes", sizes);
        run.fact("same", same);
        PulsarAdmin admin = admin(run);
        run.fact("acknowledged", until(() -> {
            try {
                return admin.topics().getStats(topic(run)).getSubscriptions().get("s").getMsgBacklog() == 0;
            } catch (Exception failure) {
                return false;
            }
        }));
        consumer.seek(id);
        Message<byte[]> again = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("after_seek", again.getData().length);
        try (Reader<byte[]> reader = client.newReader().topic(topic(run)).startMessageId(id)
                .startMessageIdInclusive().create()) {
            Message<byte[]> read = reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS);
            run.fact("read", read != null && Arrays.equals(read.getData(), large));
        }
    }

    /** The broker passes encrypted messages through; who has the key reads them. */
    private static void encryption(CaseRun run) throws Exception {
        CryptoKeyReader reader = new RsaKeyReader();
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        Consumer<String> with = run.closing(client.newConsumer(Schema.STRING).topic(topic(run))
                .subscriptionName("with").cryptoKeyReader(reader).subscribe());
        Consumer<byte[]> without = run.closing(client.newConsumer().topic(topic(run))
                .subscriptionName("without").cryptoFailureAction(ConsumerCryptoFailureAction.CONSUME).subscribe());
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(topic(run))
                .enableBatching(run.flag("batching")).batchingMaxPublishDelay(50, TimeUnit.MILLISECONDS)
                .addEncryptionKey("key").cryptoKeyReader(reader).create());
        List<String> sent = new ArrayList<>();
        for (int i = 0; i < 10; i++) {
            sent.add("secret-" + i);
            producer.sendAsync(sent.get(i));
        }
        producer.flush();
        run.fact("same", drain(with).equals(sent));
        Message<byte[]> sealed = without.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("hidden", !new String(sealed.getData()).contains("secret"));
        run.fact("key", sealed.getEncryptionCtx().isPresent()
                && sealed.getEncryptionCtx().get().getKeys().containsKey("key"));
    }

    private static Consumer<String> keyShared(CaseRun run, PulsarClient client, KeySharedPolicy policy)
            throws Exception {
        return run.closing(client.newConsumer(Schema.STRING).topic(topic(run)).subscriptionName("s")
                .subscriptionType(SubscriptionType.Key_Shared).keySharedPolicy(policy).subscribe());
    }

    private static void sendKeys(CaseRun run, PulsarClient client) throws Exception {
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic(run))
                .enableBatching(false).create()) {
            for (int i = 0; i < COUNT; i++) {
                producer.newMessage().key("k" + i % 20).value("k" + i % 20 + "|" + i).sendAsync();
            }
            producer.flush();
        }
    }

    private static Set<String> keysOf(List<String> values) {
        Set<String> keys = new TreeSet<>();
        values.forEach(value -> keys.add(value.split("\\|")[0]));
        return keys;
    }

    private static boolean inOrder(List<String> values) {
        Map<String, Integer> last = new HashMap<>();
        for (String value : values) {
            String[] parts = value.split("\\|");
            Integer before = last.put(parts[0], Integer.parseInt(parts[1]));
            if (before != null && before >= Integer.parseInt(parts[1])) {
                return false;
            }
        }
        return true;
    }

    /** Consumers with hash ranges of their own; overlapping ones are refused. */
    private static void sticky(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        Consumer<String> low = keyShared(run, client, KeySharedPolicy.stickyHashRange().ranges(Range.of(0, 32767)));
        Consumer<String> high =
                keyShared(run, client, KeySharedPolicy.stickyHashRange().ranges(Range.of(32768, 65535)));
        try {
            keyShared(run, client, KeySharedPolicy.stickyHashRange().ranges(Range.of(1000, 2000)));
            run.fact("overlap", "ok");
        } catch (PulsarClientException failure) {
            run.fact("overlap", failure.getClass().getSimpleName());
        }
        try {
            keyShared(run, client, KeySharedPolicy.autoSplitHashRange());
            run.fact("other_mode", "ok");
        } catch (PulsarClientException failure) {
            run.fact("other_mode", failure.getClass().getSimpleName());
        }
        sendKeys(run, client);
        List<String> lower = drain(low);
        List<String> upper = drain(high);
        run.fact("count", lower.size() + upper.size());
        run.fact("disjoint", Collections.disjoint(keysOf(lower), keysOf(upper)));
        run.fact("both", !lower.isEmpty() && !upper.isEmpty());
        run.fact("ordered", inOrder(lower) && inOrder(upper));
        // Messages of a range that nobody has wait for its owner.
        low.close();
        sendKeys(run, client);
        run.fact("upper_again", keysOf(drain(high)).equals(keysOf(upper)));
        Consumer<String> back = keyShared(run, client, KeySharedPolicy.stickyHashRange().ranges(Range.of(0, 32767)));
        run.fact("lower_again", keysOf(drain(back)).equals(keysOf(lower)));
    }

    /** Consumers that come and go keep the order of each key. */
    private static void autoSplit(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        List<Consumer<String>> consumers = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            consumers.add(keyShared(run, client, KeySharedPolicy.autoSplitHashRange()));
        }
        sendKeys(run, client);
        List<Set<String>> keys = new ArrayList<>();
        int count = 0;
        boolean ordered = true;
        for (Consumer<String> consumer : consumers) {
            List<String> values = drain(consumer);
            count += values.size();
            ordered &= inOrder(values);
            keys.add(keysOf(values));
        }
        run.fact("count", count);
        run.fact("ordered", ordered);
        Set<String> all = new HashSet<>();
        int separate = 0;
        for (Set<String> each : keys) {
            all.addAll(each);
            separate += each.size();
        }
        run.fact("each_key_once", all.size() == separate && all.size() == 20);
        // What one has received and not acknowledged goes to the others when it leaves.
        sendKeys(run, client);
        consumers.get(0).receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        consumers.get(0).close();
        List<String> rest = drain(consumers.get(1));
        List<String> more = drain(consumers.get(2));
        rest.addAll(drain(consumers.get(1)));
        run.fact("count_after_leaving", rest.size() + more.size());
        run.fact("ordered_after_leaving", inOrder(rest) && inOrder(more));
    }

    /** A subscription by pattern finds topics that are made and deleted later. */
    private static void pattern(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        PulsarAdmin admin = admin(run);
        String base = topic(run);
        admin.topics().createNonPartitionedTopic(base + "-a");
        admin.topics().createPartitionedTopic(base + "-b", 2);
        admin.topics().createNonPartitionedTopic(base + "x");
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING)
                .topicsPattern(Pattern.compile(base + "-.*"))
                .subscriptionTopicsMode(RegexSubscriptionMode.PersistentOnly)
                .subscriptionName("s")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .patternAutoDiscoveryPeriod(1, TimeUnit.SECONDS)
                .subscribe());
        Set<String> wanted = new TreeSet<>();
        for (String name : new String[] {"-a", "-b", "x", "-c"}) {
            try (Producer<String> producer = client.newProducer(Schema.STRING).topic(base + name).create()) {
                for (int i = 0; i < 4; i++) {
                    producer.newMessage().key("k" + i).value(name + i).send();
                    if (!name.equals("x")) {
                        wanted.add(name + i);
                    }
                }
            }
        }
        Set<String> found = new TreeSet<>();
        while (found.size() < wanted.size()) {
            Message<String> message = next(consumer);
            consumer.acknowledgeAsync(message).get();
            found.add(message.getValue());
        }
        run.fact("same", found.equals(wanted));
        run.fact("nothing_more", consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS) == null);
        admin.topics().delete(base + "-a", true);
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(base + "-a").create()) {
            producer.send("again");
        }
        run.fact("again", next(consumer).getValue());
    }

    /** Readers from ends, ids and times, over several partitions too. */
    private static void reader(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        if (run.intArg("partitions", 0) > 0) {
            admin(run).topics().createPartitionedTopic(topic(run), run.intArg("partitions", 0));
        }
        List<String> sent = new ArrayList<>();
        List<MessageId> ids = new ArrayList<>();
        long middleMs = 0;
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic(run))
                .enableBatching(false).create()) {
            for (int i = 0; i < COUNT; i++) {
                if (i == COUNT / 2) {
                    Thread.sleep(20);
                    middleMs = System.currentTimeMillis();
                    Thread.sleep(20);
                }
                sent.add("m" + i);
                ids.add(producer.send(sent.get(i)));
            }
        }
        run.fact("earliest", readAll(client.newReader(Schema.STRING).topic(topic(run))
                .startMessageId(MessageId.earliest).create()).equals(new TreeSet<>(sent)));
        run.fact("latest", readAll(client.newReader(Schema.STRING).topic(topic(run))
                .startMessageId(MessageId.latest).create()).isEmpty());
        Set<String> second = new TreeSet<>(sent.subList(COUNT / 2, COUNT));
        // A reader of several partitions may still give what it had received before it sought.
        try (Reader<String> reader = client.newReader(Schema.STRING).topic(topic(run))
                .startMessageId(MessageId.latest).create()) {
            reader.seek(middleMs);
            run.fact("by_time", readAll(reader).equals(second));
        }
        if (run.intArg("partitions", 0) == 0) {
            run.fact("after_id", readAll(client.newReader(Schema.STRING).topic(topic(run))
                    .startMessageId(ids.get(COUNT / 2 - 1)).create()).equals(second));
            run.fact("at_id", readAll(client.newReader(Schema.STRING).topic(topic(run)).startMessageIdInclusive()
                    .startMessageId(ids.get(COUNT / 2)).create()).equals(second));
        }
    }

    private static Set<String> readAll(Reader<String> reader) throws Exception {
        Set<String> values = new TreeSet<>();
        try (reader) {
            while (reader.hasMessageAvailable()) {
                Message<String> message = reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS);
                if (message == null) {
                    throw new IllegalStateException("a message that is available did not come");
                }
                values.add(message.getValue());
            }
        }
        return values;
    }

    /** A table has the last value of each key, and follows the topic. */
    private static void tableView(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        if (run.intArg("partitions", 0) > 0) {
            admin(run).topics().createPartitionedTopic(topic(run), run.intArg("partitions", 0));
        }
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(topic(run)).create());
        Map<String, String> wanted = new TreeMap<>();
        for (int i = 0; i < COUNT; i++) {
            producer.newMessage().key("k" + i % 10).value("v" + i).send();
            wanted.put("k" + i % 10, "v" + i);
        }
        TableView<String> table = run.closing(client.newTableView(Schema.STRING).topic(topic(run)).create());
        run.fact("same", new TreeMap<>(contents(table)).equals(wanted));
        producer.newMessage().key("k3").value(null).send();
        producer.newMessage().key("new").value("value").send();
        wanted.remove("k3");
        wanted.put("new", "value");
        run.fact("followed", until(() -> new TreeMap<>(contents(table)).equals(wanted)));
    }

    private static Map<String, String> contents(TableView<String> table) {
        Map<String, String> found = new HashMap<>();
        table.forEach(found::put);
        return found;
    }

    /** Clients that are attached use new partitions. */
    private static void growth(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        PulsarAdmin admin = admin(run);
        admin.topics().createPartitionedTopic(topic(run), 1);
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING).topic(topic(run))
                .subscriptionName("s").autoUpdatePartitions(true)
                .autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).subscribe());
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(topic(run))
                .enableBatching(false).autoUpdatePartitions(true)
                .autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).create());
        producer.send("before");
        admin.topics().updatePartitionedTopic(topic(run), 3);
        run.fact("partitions", client.getPartitionsForTopic(topic(run)).get().size());
        Set<Integer> used = new TreeSet<>();
        Set<String> sent = new TreeSet<>(List.of("before"));
        for (int i = 0; used.size() < 3 && i < 600; i++) {
            MessageId id = producer.send("m" + i);
            sent.add("m" + i);
            used.add(Integer.parseInt(id.toString().split(":")[2]));
            if (used.size() < 3) {
                Thread.sleep(20);
            }
        }
        run.fact("used", used);
        Set<String> received = new TreeSet<>();
        while (received.size() < sent.size()) {
            Message<String> message = next(consumer);
            consumer.acknowledgeAsync(message).get();
            received.add(message.getValue());
        }
        run.fact("same", received.equals(sent));
        Set<String> made = new TreeSet<>();
        for (int i = 0; i < 3; i++) {
            made.addAll(admin.topics().getSubscriptions(topic(run) + "-partition-" + i));
        }
        run.fact("subscriptions", made);
    }
}
