package magnetar.stock;

import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.topic;

import com.google.protobuf.EnumValue;
import com.google.protobuf.Option;
import java.nio.ByteBuffer;
import java.sql.Time;
import java.sql.Timestamp;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.LocalTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Date;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SchemaSerializationException;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.client.api.schema.GenericSchema;
import org.apache.pulsar.client.api.schema.RecordSchemaBuilder;
import org.apache.pulsar.client.api.schema.SchemaBuilder;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;
import org.apache.pulsar.common.schema.SchemaInfo;
import org.apache.pulsar.common.schema.SchemaType;

/** Schemas of every kind, their evolution, and consumers and producers that learn the schema from the topic. */
final class V4Schemas {
    private static final int OPERATION_TIMEOUT_S = 10;
    private static final int LIMIT_MS = 15_000;

    private V4Schemas() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_simple_schemas", V4Schemas::simple);
        cases.put("v4_schema_evolution", V4Schemas::evolution);
        cases.put("v4_key_value_schemas", V4Schemas::keyValues);
        cases.put("v4_pair_evolution", V4Schemas::pairEvolution);
        cases.put("v4_protobuf_schemas", V4Schemas::protobuf);
        cases.put("v4_auto_produce", V4Schemas::autoProduce);
    }

    private static <T> Consumer<T> consumer(CaseRun run, PulsarClient client, Schema<T> schema, String topic, String name)
            throws Exception {
        return run.closing(client.newConsumer(schema).topic(topic).subscriptionName(name)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe());
    }

    private static <T> Message<T> next(Consumer<T> consumer) throws Exception {
        Message<T> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        if (message == null) {
            throw new IllegalStateException("no message came to " + consumer.getTopic());
        }
        return message;
    }

    /** Sends one value; "" if it comes back equal, typed and through AUTO_CONSUME, else what came. */
    private static <T> String roundTrip(CaseRun run, PulsarClient client, Schema<T> schema, String name, T value)
            throws Exception {
        String topic = topic(run) + "-" + name;
        try (Producer<T> producer = client.newProducer(schema).topic(topic).create()) {
            producer.send(value);
        }
        T typed = next(consumer(run, client, schema, topic, "typed")).getValue();
        GenericRecord record = next(consumer(run, client, Schema.AUTO_CONSUME(), topic, "auto")).getValue();
        if (!value.equals(typed)) {
            return "typed " + typed;
        }
        return value.equals(record.getNativeObject()) && record.getSchemaType() == schema.getSchemaInfo().getType()
                ? "" : "auto " + record.getSchemaType() + " " + record.getNativeObject();
    }

    private static void simple(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        Map<String, String> failures = new TreeMap<>();
        failures.put("string", roundTrip(run, client, Schema.STRING, "string", "text \u00e9"));
        failures.put("int8", roundTrip(run, client, Schema.INT8, "int8", (byte) -1));
        failures.put("int16", roundTrip(run, client, Schema.INT16, "int16", (short) -300));
        failures.put("int32", roundTrip(run, client, Schema.INT32, "int32", 70_000));
        failures.put("int64", roundTrip(run, client, Schema.INT64, "int64", 1L << 40));
        failures.put("float", roundTrip(run, client, Schema.FLOAT, "float", 1.5f));
        failures.put("double", roundTrip(run, client, Schema.DOUBLE, "double", -2.25));
        failures.put("bool", roundTrip(run, client, Schema.BOOL, "bool", true));
        failures.put("date", roundTrip(run, client, Schema.DATE, "date", new Date(1_700_000_000_000L)));
        failures.put("time", roundTrip(run, client, Schema.TIME, "time", new Time(3_600_000L)));
        failures.put("timestamp",
                roundTrip(run, client, Schema.TIMESTAMP, "timestamp", new Timestamp(1_700_000_000_123L)));
        failures.put("instant",
                roundTrip(run, client, Schema.INSTANT, "instant", Instant.ofEpochSecond(1_700_000_000, 5)));
        failures.put("localDate",
                roundTrip(run, client, Schema.LOCAL_DATE, "local-date", LocalDate.of(2024, 2, 29)));
        failures.put("localTime", roundTrip(run, client, Schema.LOCAL_TIME, "local-time", LocalTime.of(1, 2, 3)));
        failures.put("localDateTime", roundTrip(run, client, Schema.LOCAL_DATE_TIME, "local-date-time",
                LocalDateTime.of(2024, 2, 29, 1, 2, 3)));
        failures.values().removeIf(String::isEmpty);
        run.fact("failures", failures);
        String bytes = topic(run) + "-bytebuffer";
        try (Producer<ByteBuffer> producer = client.newProducer(Schema.BYTEBUFFER).topic(bytes).create()) {
            producer.send(ByteBuffer.wrap("raw".getBytes()));
        }
        run.fact("bytes", new String(next(consumer(run, client, Schema.BYTES, bytes, "s")).getValue()));
        // A topic with a schema takes no producer and no consumer of another kind.
        run.fact("other_producer", outcome(() -> client.newProducer(Schema.INT32).topic(topic(run) + "-string").create()));
        run.fact("other_consumer", outcome(() -> client.newConsumer(Schema.INT32).topic(topic(run) + "-string")
                .subscriptionName("other").subscribe()));
    }

    /** "ok", or the simple name of the exception. */
    private static String outcome(Opening opening) throws Exception {
        try {
            opening.open().close();
            return "ok";
        } catch (PulsarClientException failure) {
            return failure.getClass().getSimpleName();
        }
    }

    /** Opens something that is to be closed. */
    private interface Opening {
        AutoCloseable open() throws Exception;
    }

    private static GenericSchema<GenericRecord> rows(SchemaType type, boolean second, boolean third) {
        RecordSchemaBuilder builder = SchemaBuilder.record("Row");
        builder.field("a").type(SchemaType.INT32);
        if (second) {
            builder.field("b").type(SchemaType.STRING).optional().defaultValue(null);
        }
        if (third) {
            builder.field("c").type(SchemaType.INT64);
        }
        return Schema.generic(builder.build(type));
    }

    /** Fields that are added with a default are taken, others are refused; readers of all versions read all. */
    private static void evolution(CaseRun run) throws Exception {
        SchemaType type = SchemaType.valueOf(run.arg("type", "AVRO"));
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        PulsarAdmin admin = run.closing(PulsarAdmin.builder().serviceHttpUrl(run.arg("web", "")).build());
        String topic = topic(run);
        GenericSchema<GenericRecord> first = rows(type, false, false);
        GenericSchema<GenericRecord> second = rows(type, true, false);
        Producer<GenericRecord> before = run.closing(client.newProducer(first).topic(topic).create());
        before.send(first.newRecordBuilder().set("a", 1).build());
        Producer<GenericRecord> after = run.closing(client.newProducer(second).topic(topic).create());
        after.send(second.newRecordBuilder().set("a", 2).set("b", "two").build());
        before.send(first.newRecordBuilder().set("a", 3).build());
        run.fact("incompatible",
                outcome(() -> client.newProducer(rows(type, true, true)).topic(topic).create()));
        run.fact("incompatible_consumer", outcome(() -> client.newConsumer(rows(type, true, true)).topic(topic)
                .subscriptionName("third").subscribe()));
        run.fact("versions", admin.schemas().getAllSchemas(topic).size());
        Map<String, List<String>> read = new LinkedHashMap<>();
        Map<String, Schema<GenericRecord>> readers = new LinkedHashMap<>();
        readers.put("first", first);
        readers.put("second", second);
        readers.put("auto", Schema.AUTO_CONSUME());
        for (Map.Entry<String, Schema<GenericRecord>> reader : readers.entrySet()) {
            Consumer<GenericRecord> consumer = consumer(run, client, reader.getValue(), topic, reader.getKey());
            List<String> values = new ArrayList<>();
            for (int i = 0; i < 3; i++) {
                Message<GenericRecord> message = next(consumer);
                GenericRecord row = message.getValue();
                boolean has = row.getFields().stream().anyMatch(field -> field.getName().equals("b"));
                values.add(row.getField("a") + ":" + (has ? row.getField("b") : "-")
                        + ":" + ByteBuffer.wrap(message.getSchemaVersion()).getLong());
            }
            read.put(reader.getKey(), values);
        }
        run.fact("read", read);
        SchemaInfo newest = admin.schemas().getSchemaInfo(topic);
        run.fact("type", newest.getType().name());
        run.fact("newest_is_second", newest.getSchemaDefinition().contains("\"b\""));
    }

    private static void keyValues(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        for (KeyValueEncodingType encoding : KeyValueEncodingType.values()) {
            String topic = topic(run) + "-" + encoding.name().toLowerCase();
            Schema<KeyValue<String, Integer>> schema = Schema.KeyValue(Schema.STRING, Schema.INT32, encoding);
            try (Producer<KeyValue<String, Integer>> producer = client.newProducer(schema).topic(topic).create()) {
                producer.send(new KeyValue<>("one", 1));
                producer.send(new KeyValue<>("two", 2));
            }
            Consumer<KeyValue<String, Integer>> typed = consumer(run, client, schema, topic, "typed");
            Consumer<GenericRecord> auto = consumer(run, client, Schema.AUTO_CONSUME(), topic, "auto");
            List<String> values = new ArrayList<>();
            for (int i = 0; i < 2; i++) {
                Message<KeyValue<String, Integer>> message = next(typed);
                KeyValue<?, ?> found = (KeyValue<?, ?>) next(auto).getValue().getNativeObject();
                values.add(message.getValue().getKey() + "=" + message.getValue().getValue() + " "
                        + found.getKey() + "=" + found.getValue() + " " + message.hasKey());
            }
            run.fact(encoding.name(), values);
            // The admin library sends and reads schemas of pairs as text.
            try (PulsarAdmin admin = V4Clients.admin(run)) {
                SchemaInfo shown = admin.schemas().getSchemaInfo(topic);
                run.fact(encoding.name() + "_shown",
                        Arrays.equals(shown.getSchema(), schema.getSchemaInfo().getSchema()));
                admin.schemas().createSchema(topic, shown);
                run.fact(encoding.name() + "_versions", admin.schemas().getAllSchemas(topic).size());
            }
        }
    }

    private static Schema<KeyValue<GenericRecord, GenericRecord>> pairs(boolean second, boolean third) {
        return Schema.KeyValue(rows(SchemaType.JSON, false, false), rows(SchemaType.AVRO, second, third),
                KeyValueEncodingType.SEPARATED);
    }

    /** The schemas of values in pairs follow each other as those of values alone. */
    private static void pairEvolution(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run);
        run.fact("first", outcome(() -> client.newProducer(pairs(false, false)).topic(topic).create()));
        run.fact("optional", outcome(() -> client.newProducer(pairs(true, false)).topic(topic).create()));
        run.fact("required", outcome(() -> client.newProducer(pairs(true, true)).topic(topic).create()));
        run.fact("other_key", outcome(() -> client.newProducer(Schema.KeyValue(Schema.STRING,
                rows(SchemaType.AVRO, true, false))).topic(topic).create()));
        run.fact("old_consumer", outcome(() -> client.newConsumer(pairs(false, false)).topic(topic)
                .subscriptionName("s").subscribe()));
    }

    private static void protobuf(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        EnumValue value = EnumValue.newBuilder().setName("n").setNumber(7).build();
        String avro = topic(run) + "-avro";
        try (Producer<EnumValue> producer = client.newProducer(Schema.PROTOBUF(EnumValue.class)).topic(avro).create()) {
            producer.send(value);
        }
        run.fact("protobuf",
                next(consumer(run, client, Schema.PROTOBUF(EnumValue.class), avro, "typed")).getValue().equals(value));
        String topic = topic(run) + "-native";
        Schema<EnumValue> schema = Schema.PROTOBUF_NATIVE(EnumValue.class);
        try (Producer<EnumValue> producer = client.newProducer(schema).topic(topic).create()) {
            producer.send(value);
        }
        run.fact("native", next(consumer(run, client, schema, topic, "typed")).getValue().equals(value));
        GenericRecord record = next(consumer(run, client, Schema.AUTO_CONSUME(), topic, "auto")).getValue();
        run.fact("auto", record.getSchemaType() + " " + record.getField("name") + " " + record.getField("number"));
        run.fact("other_message", outcome(() -> client.newProducer(Schema.PROTOBUF_NATIVE(Option.class)).topic(topic)
                .create()));
    }

    /** A producer of bytes that have to fit the topic's schema. */
    private static void autoProduce(CaseRun run) throws Exception {
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run);
        GenericSchema<GenericRecord> schema = rows(SchemaType.AVRO, true, false);
        run.closing(client.newProducer(schema).topic(topic).create());
        Consumer<GenericRecord> consumer = consumer(run, client, schema, topic, "s");
        Producer<byte[]> producer = run.closing(client.newProducer(Schema.AUTO_PRODUCE_BYTES()).topic(topic).create());
        producer.send(schema.encode(schema.newRecordBuilder().set("a", 7).set("b", "seven").build()));
        GenericRecord row = next(consumer).getValue();
        run.fact("row", row.getField("a") + ":" + row.getField("b"));
        try {
            producer.send(new byte[] {1});
            run.fact("other_bytes", "ok");
        } catch (SchemaSerializationException refused) {
            run.fact("other_bytes", "SchemaSerializationException");
        }
    }
}
