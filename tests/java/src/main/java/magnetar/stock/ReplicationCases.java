package magnetar.stock;

import static magnetar.stock.V4Clients.admin;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.BatcherBuilder;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.ReaderBuilder;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.TypedMessageBuilder;
import org.apache.pulsar.client.api.schema.GenericObject;
import org.apache.pulsar.common.policies.data.ReplicatorStats;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/** Messages of a topic that is replicated, as applications send them in one cluster and read them in both. */
final class ReplicationCases {
    private static final int LIMIT_MS = 30_000;
    private static final int COUNT = 40;
    private static final int LARGE = 1_000_000;
    private static final Duration DELAY = Duration.ofSeconds(3);
    private static final long EVENT_TIME_MS = 1_700_000_000_000L;
    private static final String POSITION = "__MSG_PROP_REPL_SOURCE_POSITION";

    private ReplicationCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("replicated_plain", run -> compareBytes(run, ReplicationCases::plain));
        cases.put("replicated_batches", run -> compareBytes(run, (client, topic) -> batches(client, topic, null)));
        cases.put("replicated_batches_of_keys",
                run -> compareBytes(run, (client, topic) -> batches(client, topic, BatcherBuilder.KEY_BASED)));
        cases.put("replicated_compressed", run -> compareBytes(run, ReplicationCases::compressed));
        cases.put("replicated_chunks", run -> compareBytes(run, ReplicationCases::chunks));
        cases.put("replicated_largest_chunks", run -> compareBytes(run, ReplicationCases::largestChunks));
        cases.put("replicated_schemas", run -> compareRecords(run, ReplicationCases::schemas));
        cases.put("replicated_key_values", run -> compareRecords(run, ReplicationCases::keyValues));
        cases.put("replicated_selection", ReplicationCases::selection);
        cases.put("replicated_delays", ReplicationCases::delays);
        cases.put("replicated_transactions", ReplicationCases::transactions);
        cases.put("replicated_non_persistent", ReplicationCases::nonPersistent);
        cases.put("replicator_stats", ReplicationCases::stats);
    }

    /** Those that need the encryption that comes with the v4 client. */
    static void addEncryptedTo(Map<String, Case> cases) {
        cases.put("replicated_encrypted", run -> {
            RsaKeyReader keys = new RsaKeyReader();
            compare(run, (client, topic) -> encrypted(client, topic, keys),
                    client -> client.newReader(Schema.BYTES).cryptoKeyReader(keys));
        });
    }

    /** Sends messages, and tells how many. */
    private interface Writer {
        int write(PulsarClient client, String topic) throws Exception;
    }

    /** Begins to make a reader. */
    private interface Readable<T> {
        ReaderBuilder<T> reader(PulsarClient client);
    }

    /** An Avro or JSON record. */
    public static final class Reading {
        public String name;
        public int value;

        public Reading() {
        }

        Reading(String name, int value) {
            this.name = name;
            this.value = value;
        }
    }

    private static PulsarClient source(CaseRun run) throws Exception {
        return V4Clients.client(run);
    }

    private static PulsarClient remote(CaseRun run) throws Exception {
        return run.closing(PulsarClient.builder().serviceUrl(run.arg("remote", "")).build());
    }

    private static String topic(CaseRun run) {
        return "persistent://" + run.arg("namespace", "") + "/" + run.localName();
    }

    private static <T> void compare(CaseRun run, Writer writer, Readable<T> readable) throws Exception {
        PulsarClient source = source(run);
        int count = writer.write(source, topic(run));
        run.fact("sent", read(readable.reader(source), topic(run), count));
        run.fact("received", read(readable.reader(remote(run)), topic(run), count));
    }

    private static void compareBytes(CaseRun run, Writer writer) throws Exception {
        compare(run, writer, client -> client.newReader(Schema.BYTES));
    }

    private static void compareRecords(CaseRun run, Writer writer) throws Exception {
        compare(run, writer, client -> client.newReader(Schema.AUTO_CONSUME()));
    }

    /** The first messages of a topic as an application sees them. */
    private static <T> List<Map<String, Object>> read(ReaderBuilder<T> builder, String topic, int count) throws Exception {
        List<Map<String, Object>> found = new ArrayList<>();
        try (Reader<T> reader = builder.topic(topic).startMessageId(MessageId.earliest).create()) {
            while (found.size() < count) {
                Message<T> message = reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS);
                if (message == null) {
                    throw new IllegalStateException(found.size() + " of " + count + " came: " + found);
                }
                found.add(facts(message));
            }
        }
        return found;
    }

    private static Map<String, Object> facts(Message<?> message) {
        Map<String, Object> facts = new TreeMap<>();
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        properties.remove(POSITION);
        facts.put("properties", properties);
        facts.put("data", text(message.getData()));
        facts.put("value", shown(message.getValue()));
        facts.put("key", message.getKey());
        facts.put("ordering_key", text(message.getOrderingKey()));
        facts.put("event_ms", message.getEventTime());
        facts.put("publish_ms", message.getPublishTime());
        facts.put("producer", message.getProducerName());
        facts.put("sequence_id", message.getSequenceId());
        facts.put("encrypted", message.getEncryptionCtx().isPresent());
        facts.put("origin", message.getReplicatedFrom());
        return facts;
    }

    private static String text(byte[] bytes) {
        return bytes == null ? null : Base64.getEncoder().encodeToString(bytes.length < LARGE ? bytes : digest(bytes));
    }

    private static byte[] digest(byte[] bytes) {
        return (bytes.length + " bytes, " + java.util.Arrays.hashCode(bytes)).getBytes();
    }

    private static String shown(Object value) {
        if (value instanceof GenericObject object) {
            return shown(object.getNativeObject());
        }
        if (value instanceof KeyValue<?, ?> pair) {
            return shown(pair.getKey()) + " -> " + shown(pair.getValue());
        }
        return value instanceof byte[] bytes ? text(bytes) : String.valueOf(value);
    }

    private static TypedMessageBuilder<byte[]> numbered(Producer<byte[]> producer, int number) {
        return producer.newMessage().key("k" + number % 7).orderingKey(("o" + number % 3).getBytes())
                .property("number", String.valueOf(number)).eventTime(EVENT_TIME_MS + number)
                .value(("message " + number).getBytes());
    }

    private static int plain(PulsarClient client, String topic) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false)
                .initialSequenceId(1000).create()) {
            for (int i = 0; i < COUNT; i++) {
                numbered(producer, i).send();
            }
            producer.newMessage().keyBytes(new byte[] {0, (byte) 0xff}).value(new byte[0]).send();
            producer.newMessage().key("deleted").value(null).send();
            producer.newMessage().value("of another number".getBytes()).sequenceId(5000).send();
        }
        return COUNT + 3;
    }

    private static int batches(PulsarClient client, String topic, BatcherBuilder batcher) throws Exception {
        ProducerBuilder<byte[]> builder = client.newProducer().topic(topic).enableBatching(true)
                .batchingMaxMessages(9).batchingMaxPublishDelay(1, TimeUnit.SECONDS);
        if (batcher != null) {
            builder = builder.batcherBuilder(batcher);
        }
        try (Producer<byte[]> producer = builder.create()) {
            List<CompletableFuture<MessageId>> sends = new ArrayList<>();
            for (int i = 0; i < COUNT; i++) {
                sends.add(numbered(producer, i).sendAsync());
            }
            sends.add(producer.newMessage().key("deleted").value(null).sendAsync());
            producer.flush();
            for (CompletableFuture<MessageId> each : sends) {
                each.get();
            }
        }
        return COUNT + 1;
    }

    private static int compressed(PulsarClient client, String topic) throws Exception {
        int sent = 0;
        for (CompressionType type : CompressionType.values()) {
            for (boolean batching : new boolean[] {false, true}) {
                try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(batching)
                        .compressionType(type).create()) {
                    producer.newMessage().property("type", type.name()).value("text ".repeat(500).getBytes()).send();
                    sent++;
                }
            }
        }
        return sent;
    }

    private static byte[] large(int size) {
        byte[] large = new byte[size];
        for (int i = 0; i < size; i++) {
            large[i] = (byte) (i % 251);
        }
        return large;
    }

    private static int chunks(PulsarClient client, String topic) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false)
                .enableChunking(true).chunkMaxMessageSize(10_000).create()) {
            producer.newMessage().value("before".getBytes()).send();
            producer.newMessage().key("large").property("a", "b").value(large(123_456)).send();
            producer.newMessage().value("behind".getBytes()).send();
        }
        return 3;
    }

    /** Chunks that are as large as a message may be: with their origin they are larger. */
    private static int largestChunks(PulsarClient client, String topic) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false)
                .enableChunking(true).create()) {
            producer.newMessage().key("large").value(large(11_000_000)).send();
            producer.newMessage().value("behind".getBytes()).send();
        }
        return 2;
    }

    private static int encrypted(PulsarClient client, String topic, RsaKeyReader keys) throws Exception {
        for (boolean batching : new boolean[] {false, true}) {
            try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(batching)
                    .compressionType(CompressionType.LZ4).cryptoKeyReader(keys).addEncryptionKey("application").create()) {
                List<CompletableFuture<MessageId>> sends = new ArrayList<>();
                for (int i = 0; i < 5; i++) {
                    sends.add(numbered(producer, i).sendAsync());
                }
                for (CompletableFuture<MessageId> each : sends) {
                    each.get();
                }
            }
        }
        return 10;
    }

    /** Records of a schema that evolves, Avro or JSON. */
    private static int schemas(PulsarClient client, String topic) throws Exception {
        boolean json = topic.contains("json");
        Schema<Reading> first = json ? Schema.JSON(Reading.class) : Schema.AVRO(Reading.class);
        Schema<Later.Reading> later = json ? Schema.JSON(Later.Reading.class) : Schema.AVRO(Later.Reading.class);
        for (int i = 0; i < 2; i++) {
            try (Producer<Reading> producer = client.newProducer(first).topic(topic).create()) {
                producer.newMessage().key("a").value(new Reading("first", i)).send();
            }
            try (Producer<Later.Reading> producer = client.newProducer(later).topic(topic).create()) {
                producer.newMessage().key("b").value(new Later.Reading("later", i, "C")).send();
            }
        }
        return 4;
    }

    /** A later form of the record. */
    static final class Later {
        private Later() {
        }

        public static final class Reading {
            public String name;
            public int value;
            public String unit;

            public Reading() {
            }

            Reading(String name, int value, String unit) {
                this.name = name;
                this.value = value;
                this.unit = unit;
            }
        }
    }

    private static int keyValues(PulsarClient client, String topic) throws Exception {
        KeyValueEncodingType encoding = topic.contains("separated")
                ? KeyValueEncodingType.SEPARATED : KeyValueEncodingType.INLINE;
        Schema<KeyValue<String, Reading>> schema =
                Schema.KeyValue(Schema.STRING, Schema.JSON(Reading.class), encoding);
        try (Producer<KeyValue<String, Reading>> producer = client.newProducer(schema).topic(topic).create()) {
            producer.newMessage().value(new KeyValue<>("a", new Reading("of a", 1))).send();
            producer.newMessage().value(new KeyValue<>("b", null)).send();
        }
        return 2;
    }

    /**
     * Messages of a topic that stores nothing: consumers of both clusters get those of both. They have no schema:
     * Apache Pulsar adds none to such a topic once a replicator is attached.
     */
    private static void nonPersistent(CaseRun run) throws Exception {
        String topic = "non-persistent://" + run.arg("namespace", "") + "/" + run.localName();
        PulsarClient source = source(run);
        PulsarClient remote = remote(run);
        Consumer<byte[]> here = attached(run, source, topic);
        Consumer<byte[]> there = attached(run, remote, topic);
        Producer<byte[]> producer = run.closing(source.newProducer().topic(topic).create());
        Producer<byte[]> other = run.closing(remote.newProducer().topic(topic).create());
        reach(producer, there);
        reach(other, here);
        for (int i = 0; i < COUNT; i++) {
            producer.newMessage().key("k" + i).property("number", String.valueOf(i))
                    .value(("from here " + i).getBytes()).send();
        }
        producer.newMessage().value("for none".getBytes()).disableReplication().send();
        producer.newMessage().value("last".getBytes()).send();
        run.fact("sent", untilLast(here));
        run.fact("received", untilLast(there));
        for (int i = 0; i < COUNT; i++) {
            other.newMessage().value(("from there " + i).getBytes()).send();
        }
        other.newMessage().value("last".getBytes()).send();
        run.fact("back", untilLast(here));
    }

    private static Consumer<byte[]> attached(CaseRun run, PulsarClient client, String topic) throws Exception {
        return run.closing(client.newConsumer().topic(topic).subscriptionName("s").subscribe());
    }

    /** Sends until a message comes to another cluster: before that its replicator is not attached. */
    private static void reach(Producer<byte[]> producer, Consumer<byte[]> consumer) throws Exception {
        long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS);
        while (System.nanoTime() < end) {
            producer.send("attaching".getBytes());
            Message<byte[]> message = consumer.receive(100, TimeUnit.MILLISECONDS);
            if (message != null && message.getReplicatedFrom() != null) {
                return;
            }
        }
        throw new IllegalStateException("Nothing came to the other cluster.");
    }

    /** What comes before the message "last", with its cluster. */
    private static List<Map<String, Object>> untilLast(Consumer<byte[]> consumer) throws Exception {
        List<Map<String, Object>> found = new ArrayList<>();
        while (true) {
            Message<byte[]> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            if (message == null) {
                throw new IllegalStateException(found.size() + " came: " + found);
            }
            String value = new String(message.getData());
            if (value.equals("last")) {
                return found;
            }
            if (!value.equals("attaching")) {
                Map<String, Object> facts = new TreeMap<>(message.getProperties());
                facts.put("value", value);
                facts.put("key", message.getKey());
                facts.put("origin", message.getReplicatedFrom());
                found.add(facts);
            }
        }
    }

    /** Messages for all clusters, for none, for the other one and for a third one. */
    private static void selection(CaseRun run) throws Exception {
        PulsarClient source = source(run);
        try (Producer<byte[]> producer = source.newProducer().topic(topic(run)).create()) {
            producer.newMessage().value("for all".getBytes()).send();
            producer.newMessage().value("for none".getBytes()).disableReplication().send();
            producer.newMessage().value("for a third".getBytes()).replicationClusters(List.of("third")).send();
            producer.newMessage().value("for the other".getBytes())
                    .replicationClusters(List.of(run.arg("remoteCluster", ""))).send();
            producer.newMessage().value("last".getBytes()).send();
        }
        run.fact("sent", texts(source, topic(run), 5));
        run.fact("received", texts(remote(run), topic(run), 3));
    }

    private static List<String> texts(PulsarClient client, String topic, int count) throws Exception {
        List<String> found = new ArrayList<>();
        try (Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
            while (found.size() < count) {
                found.add(new String(reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS).getData()));
            }
        }
        return found;
    }

    /** A delayed message comes to a shared consumer of the other cluster in its time, behind one without delay. */
    private static void delays(CaseRun run) throws Exception {
        Consumer<byte[]> consumer = run.closing(remote(run).newConsumer().topic(topic(run)).subscriptionName("s")
                .subscriptionType(SubscriptionType.Shared)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe());
        long dueMs;
        try (Producer<byte[]> producer = source(run).newProducer().topic(topic(run)).create()) {
            dueMs = System.currentTimeMillis() + DELAY.toMillis();
            producer.newMessage().value("later".getBytes()).deliverAt(dueMs).send();
            producer.newMessage().value("at once".getBytes()).send();
        }
        List<String> received = new ArrayList<>();
        for (int i = 0; i < 2; i++) {
            received.add(new String(consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS).getData()));
        }
        run.fact("received", received);
        run.fact("in_time", System.currentTimeMillis() >= dueMs - 1000);
    }

    /** The messages of committed transactions come, those of aborted ones do not. */
    private static void transactions(CaseRun run) throws Exception {
        PulsarClient source = run.closing(PulsarClient.builder().serviceUrl(run.url()).enableTransaction(true).build());
        try (Producer<byte[]> producer = source.newProducer().topic(topic(run)).sendTimeout(0, TimeUnit.SECONDS).create()) {
            for (int i = 0; i < 4; i++) {
                var transaction = source.newTransaction().withTransactionTimeout(1, TimeUnit.MINUTES).build().get();
                producer.newMessage(transaction).value(("in " + i).getBytes()).send();
                if (i % 2 == 0) {
                    transaction.commit().get();
                } else {
                    transaction.abort().get();
                }
                producer.newMessage().value(("behind " + i).getBytes()).send();
            }
        }
        run.fact("sent", texts(source, topic(run), 6));
        run.fact("received", texts(remote(run), topic(run), 6));
    }

    /** What the admin library shows of replication to and from the other cluster. */
    private static void stats(CaseRun run) throws Exception {
        ReplicatorStats stats = admin(run).topics().getStats(topic(run)).getReplication().get(run.arg("remoteCluster", ""));
        run.fact("connected", stats.isConnected());
        run.fact("backlog", stats.getReplicationBacklog());
        run.fact("delay_s", stats.getReplicationDelayInSeconds());
        run.fact("outbound", stats.getOutboundConnection());
        run.fact("outbound_since", stats.getOutboundConnectedSince());
        run.fact("expired", stats.getMsgExpiredCount());
        run.fact("inbound", stats.getInboundConnection());
        run.fact("inbound_since", stats.getInboundConnectedSince());
    }
}
