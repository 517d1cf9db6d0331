package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.GenericRecord;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Schemas: registered by the producer, checked, versioned, found again by consumers. */
final class SchemaCases {
    private SchemaCases() {
    }

    /** First version of a record. */
    public static class Reading {
        public String sensor;
        public int value;
    }

    /** The same with one more optional field. */
    public static class ReadingWithUnit {
        public String sensor;
        public int value;
        public String unit;
    }

    /** One that cannot be read as a {@link Reading}. */
    public static class OtherReading {
        public String sensor;
        public List<String> value;
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("schema_string", SchemaCases::string);
        cases.put("schema_json", SchemaCases::json);
        cases.put("schema_evolution", SchemaCases::evolution);
        cases.put("schema_incompatible", SchemaCases::incompatible);
        cases.put("schema_auto", SchemaCases::auto);
    }

    private static <T> QueueConsumer<T> consumer(CaseRun run, PulsarClient client, ScalableTopic topic, Schema<T> schema)
            throws Exception {
        return run.closing(client.newQueueConsumer(schema)
                .topic(topic.name())
                .subscriptionName("schema")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                .subscribe());
    }

    private static void string(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        PulsarClient client = run.client();
        Producer<String> producer = run.closing(client.newProducer(Schema.string()).topic(topic.name()).create());
        List<String> sent = List.of("plain", "größer", "日本語", "😀", "");
        for (String value : sent) {
            producer.newMessage().key(value).value(value).send();
        }
        QueueConsumer<String> consumer = consumer(run, client, topic, Schema.string());
        List<String> received = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> received.add(message.value()));
        run.fact("received", received.stream().sorted().toList());
        run.fact("sent", sent.stream().sorted().toList());
    }

    private static void json(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        PulsarClient client = run.client();
        Producer<Reading> producer = run.closing(client.newProducer(Schema.json(Reading.class)).topic(topic.name()).create());
        for (int i = 0; i < 20; i++) {
            producer.newMessage().key("k" + i).value(reading(i)).send();
        }
        QueueConsumer<Reading> consumer = consumer(run, client, topic, Schema.json(Reading.class));
        List<String> received = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message ->
                received.add(message.value().sensor + "=" + message.value().value));
        run.fact("received", received.stream().sorted().toList());
    }

    private static Reading reading(int value) {
        Reading reading = new Reading();
        reading.sensor = "s";
        reading.value = value;
        return reading;
    }

    /** A newer producer adds a field; one consumer of each version reads both. */
    private static void evolution(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<Reading> old = run.closing(client.newProducer(Schema.json(Reading.class)).topic(topic.name()).create());
        old.newMessage().key("a").value(reading(1)).send();
        Producer<ReadingWithUnit> fresh = run.closing(
                client.newProducer(Schema.json(ReadingWithUnit.class)).topic(topic.name()).create());
        ReadingWithUnit with = new ReadingWithUnit();
        with.sensor = "s";
        with.value = 2;
        with.unit = "K";
        fresh.newMessage().key("b").value(with).send();
        QueueConsumer<ReadingWithUnit> consumer = consumer(run, client, topic, Schema.json(ReadingWithUnit.class));
        List<String> received = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message ->
                received.add(message.value().value + "/" + message.value().unit));
        run.fact("received", received.stream().sorted().toList());
    }

    private static void incompatible(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<Reading> producer = run.closing(client.newProducer(Schema.json(Reading.class)).topic(topic.name()).create());
        producer.newMessage().key("a").value(reading(1)).send();
        try {
            Producer<OtherReading> other = run.closing(
                    client.newProducer(Schema.json(OtherReading.class)).topic(topic.name()).create());
            OtherReading wrong = new OtherReading();
            wrong.sensor = "s";
            wrong.value = List.of("x");
            other.newMessage().key("a").value(wrong).send();
            run.fact("refusal", "");
        } catch (Exception refusal) {
            run.fact("refusal", refusal.toString());
        }
        producer.newMessage().key("a").value(reading(2)).send();
        run.fact("works_after_refusal", true);
    }

    /** A consumer that knows no class asks the broker for the schema. */
    private static void auto(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        PulsarClient client = run.client();
        Producer<Reading> producer = run.closing(client.newProducer(Schema.json(Reading.class)).topic(topic.name()).create());
        for (int i = 0; i < 8; i++) {
            producer.newMessage().key("k" + i).value(reading(i)).send();
        }
        QueueConsumer<GenericRecord> consumer = consumer(run, client, topic, Schema.autoConsume());
        List<String> received = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message ->
                received.add(message.value().field("sensor") + "=" + message.value().field("value")));
        run.fact("received", received.stream().sorted().toList());
    }
}
