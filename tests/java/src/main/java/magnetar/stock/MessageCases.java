package magnetar.stock;

import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.ProducerBuilder;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.async.AsyncProducer;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.ChunkingPolicy;
import org.apache.pulsar.client.api.v5.config.CompressionPolicy;
import org.apache.pulsar.client.api.v5.config.CompressionType;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** What a message may be: compressed, batched, large, chunked, without a key, with properties, on an ordinary topic. */
final class MessageCases {
    /** The client's and the broker's limit on one message. */
    private static final int MAX_MESSAGE_BYTES = 5 * 1024 * 1024;
    private static final int HEADROOM_BYTES = 1024;

    private MessageCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("compression", MessageCases::compression);
        cases.put("sizes", MessageCases::sizes);
        cases.put("chunking", MessageCases::chunking);
        cases.put("attributes", MessageCases::attributes);
        cases.put("persistent_topic", MessageCases::persistentTopic);
        cases.put("scalable_as_persistent", MessageCases::scalableAskedForAsPersistent);
    }

    private static byte[] bytes(int length, int seed) {
        // Half random, half constant: compressors have something to do and something to fail on.
        byte[] bytes = new byte[length];
        new Random(seed).nextBytes(bytes);
        Arrays.fill(bytes, length / 2, length, (byte) seed);
        return bytes;
    }

    private static QueueConsumer<byte[]> consumer(CaseRun run, PulsarClient client, String topic) throws Exception {
        return run.closing(client.newQueueConsumer(Schema.bytes())
                .topic(topic)
                .subscriptionName("bytes")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                .subscribe());
    }

    private static void compression(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        ProducerBuilder<byte[]> builder = client.newProducer(Schema.bytes())
                .topic(topic.name())
                .compressionPolicy(CompressionPolicy.of(CompressionType.valueOf(run.arg("type", "NONE"))))
                .batchingPolicy(run.flag("batching") ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled());
        Producer<byte[]> producer = run.closing(builder.create());
        QueueConsumer<byte[]> consumer = consumer(run, client, topic.name());
        int messages = 40;
        List<CompletableFuture<?>> sends = new ArrayList<>();
        for (int i = 0; i < messages; i++) {
            sends.add(producer.async().newMessage().key("k" + i).property("seed", "" + i)
                    .value(bytes(100 + 500 * i, i)).send());
        }
        producer.async().flush().get();
        CompletableFuture.allOf(sends.toArray(CompletableFuture[]::new)).get();
        int[] intact = new int[1];
        int received = Readers.readUntilQuiet(consumer::receive, message -> {
            int seed = Integer.parseInt(message.properties().get("seed"));
            intact[0] += Arrays.equals(message.value(), bytes(100 + 500 * seed, seed)) ? 1 : 0;
            consumer.acknowledge(message.id());
        });
        run.fact("sent", messages);
        run.fact("received", received);
        run.fact("intact", intact[0]);
    }

    /** Sizes up to just below the limit pass whole; above it the send fails and the producer goes on. */
    private static void sizes(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        PulsarClient client = run.client();
        Producer<byte[]> producer = run.closing(client.newProducer(Schema.bytes())
                .topic(topic.name())
                .batchingPolicy(run.flag("batching") ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled())
                .create());
        QueueConsumer<byte[]> consumer = consumer(run, client, topic.name());
        int[] sizes = {0, 1, 1024, 64 * 1024, 128 * 1024 + 1, 1024 * 1024, MAX_MESSAGE_BYTES - HEADROOM_BYTES};
        List<Integer> intact = new ArrayList<>();
        for (int size : sizes) {
            producer.newMessage().value(bytes(size, size)).send();
            Message<byte[]> message = consumer.receive(Duration.ofSeconds(20));
            if (message != null && Arrays.equals(message.value(), bytes(size, size))) {
                intact.add(size);
                consumer.acknowledge(message.id());
            }
        }
        try {
            producer.newMessage().value(bytes(MAX_MESSAGE_BYTES + HEADROOM_BYTES, 1)).send();
            run.fact("refusal", "");
        } catch (Exception refusal) {
            run.fact("refusal", refusal.toString());
        }
        producer.newMessage().value(bytes(10, 10)).send();
        Message<byte[]> after = consumer.receive(Duration.ofSeconds(10));
        run.fact("sizes", sizes);
        run.fact("intact", intact);
        run.fact("works_after_refusal", after != null && after.value().length == 10);
    }

    private static void chunking(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        PulsarClient client = run.client();
        Producer<byte[]> producer = run.closing(client.newProducer(Schema.bytes())
                .topic(topic.name())
                .batchingPolicy(BatchingPolicy.ofDisabled())
                .chunkingPolicy(ChunkingPolicy.builder().enabled(true).chunkSize(MAX_MESSAGE_BYTES / 2).build())
                .create());
        StreamConsumer<byte[]> consumer = run.closing(client.newStreamConsumer(Schema.bytes())
                .topic(topic.name())
                .subscriptionName("chunks")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                .subscribe());
        int size = 2 * MAX_MESSAGE_BYTES + 12345;
        producer.newMessage().value(bytes(size, 3)).send();
        Message<byte[]> message = consumer.receive(Duration.ofSeconds(20));
        run.fact("intact", message != null && Arrays.equals(message.value(), bytes(size, 3)));
    }

    private static void attributes(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        PulsarClient client = run.client();
        AsyncProducer<byte[]> producer = run.closing(
                client.newProducer(Schema.bytes()).topic(topic.name()).producerName("named").create()).async();
        QueueConsumer<byte[]> consumer = consumer(run, client, topic.name());
        Instant eventTime = Instant.ofEpochMilli(1_700_000_000_123L);
        List<CompletableFuture<?>> sends = new ArrayList<>();
        for (int i = 0; i < 8; i++) {
            // Without a key messages go to the segments in turn.
            sends.add(producer.newMessage().property("p", "v" + i).eventTime(eventTime).value(bytes(10, i)).send());
        }
        CompletableFuture.allOf(sends.toArray(CompletableFuture[]::new)).get();
        List<String> properties = new ArrayList<>();
        List<String> names = new ArrayList<>();
        List<Boolean> eventTimes = new ArrayList<>();
        List<Boolean> publishTimes = new ArrayList<>();
        List<Boolean> keys = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> {
            properties.add(message.properties().get("p"));
            names.add(message.producerName().orElse(""));
            eventTimes.add(message.eventTime().filter(eventTime::equals).isPresent());
            publishTimes.add(message.publishTime().isAfter(eventTime));
            keys.add(message.key().isPresent());
        });
        run.fact("properties", properties.stream().sorted().toList());
        run.fact("producer_names", names.stream().distinct().sorted().toList());
        run.fact("event_times_kept", eventTimes.stream().filter(kept -> kept).count());
        run.fact("publish_times_set", publishTimes.stream().filter(set -> set).count());
        run.fact("with_key", keys.stream().filter(key -> key).count());
    }

    /** An ordinary topic, made by using it, through the same client. */
    private static void persistentTopic(CaseRun run) throws Exception {
        String topic = "persistent://public/default/" + run.localName();
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received received = tally.new Received();
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic, "plain").subscribe());
        new Load(run, client, topic, tally).send(200);
        Readers.drainQueue(consumer, received, received::complete);
        consumer.close();
        QueueConsumer<String> second = run.closing(Readers.queue(client, topic, "plain").subscribe());
        run.fact("left_after_acks", Readers.readUntilQuiet(second::receive, message -> { }));
        run.fact("topic", consumer.topic());
        tally.report(run);
        received.report(run, "");
    }

    private static void scalableAskedForAsPersistent(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received received = tally.new Received();
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.persistentName(), "plain").subscribe());
        new Load(run, client, topic.persistentName(), tally).send(100);
        Readers.drainQueue(consumer, received, received::complete);
        run.fact("resolved_topic", consumer.topic());
        tally.report(run);
        received.report(run, "");
        try (StreamConsumer<String> stream = Readers.stream(client, topic.persistentName(), "stream").subscribe()) {
            run.fact("stream_subscribe", stream.topic());
        } catch (Exception refusal) {
            run.fact("stream_subscribe_error", refusal.toString());
        }
    }
}
