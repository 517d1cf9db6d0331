package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.CheckpointConsumerBuilder;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.ProducerBuilder;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.QueueConsumerBuilder;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumerBuilder;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.async.AsyncMessageBuilder;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.ChunkingPolicy;
import org.apache.pulsar.client.api.v5.config.CompressionPolicy;
import org.apache.pulsar.client.api.v5.config.CompressionType;
import org.apache.pulsar.client.api.v5.config.DeadLetterPolicy;
import org.apache.pulsar.client.api.v5.config.ProducerAccessMode;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;

/**
 * A client that does what it is told, order by order: another client is tried against it.
 *
 * <p>An order names an operation in {@code do}; what it opens it calls {@code name}. Bytes, message ids and checkpoints
 * are base64. The answer is {@code {"ok":true,...}} or {@code {"ok":false,"error":"...","class":"..."}}; the session
 * goes on after an error, and ends with {@code {"do":"end"}}.
 */
final class InteropSession {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration BATCH_DELAY = Duration.ofMillis(20);
    private static final Duration AT_ONCE = Duration.ofMillis(10);

    private final CaseRun run;
    private final PulsarClient client;
    private final Map<String, Sender<?>> producers = new HashMap<>();
    private final Map<String, Reader<?>> consumers = new HashMap<>();
    private final Map<String, Transaction> transactions = new HashMap<>();

    /** A producer and how its values are told. */
    private record Sender<T>(Producer<T> producer, InteropSchemas.Kind<T> kind) {
    }

    /** A consumer of any kind; {@code consumer} is of the client's own type. */
    private record Reader<T>(AutoCloseable consumer, Readers.Receive<T> receive, InteropSchemas.Kind<T> kind) {
    }

    /** One operation: what the order says, and the answer to fill. */
    @FunctionalInterface
    private interface Operation {
        void run(JsonNode order, ObjectNode answer) throws Exception;
    }

    private InteropSession(CaseRun run) throws Exception {
        this.run = run;
        this.client = run.flag("transactions")
                ? run.transactionalClient(Duration.ofSeconds(run.intArg("transactionTimeoutS", 60)))
                : run.client();
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("interop", run -> new InteropSession(run).serve());
    }

    private void serve() throws Exception {
        Map<String, Operation> operations = operations();
        run.event("ready");
        for (JsonNode order = run.nextOrder(); !order.path("do").asText().equals("end"); order = run.nextOrder()) {
            ObjectNode answer = JSON.createObjectNode();
            try {
                Operation operation = operations.get(order.path("do").asText());
                if (operation == null) {
                    throw new IllegalArgumentException("no operation " + order.path("do") + "; there are " + operations.keySet());
                }
                operation.run(order, answer);
                answer.put("ok", true);
            } catch (Exception failure) { // told to who gave the order; the next one may be given
                answer.put("ok", false).put("class", failure.getClass().getSimpleName()).put("error", CaseRun.describe(failure));
            }
            run.answer(answer);
        }
    }

    private Map<String, Operation> operations() {
        Map<String, Operation> operations = new HashMap<>();
        operations.put("schema", this::schema);
        operations.put("producer", this::openProducer);
        operations.put("queue", this::openQueue);
        operations.put("stream", this::openStream);
        operations.put("checkpoint_consumer", this::openCheckpointConsumer);
        operations.put("send", this::send);
        operations.put("receive", this::receive);
        operations.put("ack", this::acknowledge);
        operations.put("nack", this::negativelyAcknowledge);
        operations.put("checkpoint", this::checkpoint);
        operations.put("begin", this::begin);
        operations.put("commit", (order, answer) -> transactions.remove(order.get("name").asText()).commit());
        operations.put("abort", (order, answer) -> transactions.remove(order.get("name").asText()).abort());
        operations.put("explain", this::explain);
        operations.put("close", this::close);
        return operations;
    }

    /** What a schema registers, and its values' bytes both ways. */
    private void schema(JsonNode order, ObjectNode answer) throws IOException {
        InteropSchemas.Kind<?> kind = InteropSchemas.named(order.get("schema").asText());
        answer.set("info", InteropSchemas.told(kind.schema().schemaInfo()));
        ArrayNode encoded = answer.putArray("encoded");
        for (JsonNode value : order.path("values")) {
            encoded.add(kind.encode(value));
        }
        ArrayNode decoded = answer.putArray("decoded");
        for (JsonNode bytes : order.path("bytes")) {
            decoded.add(kind.decode(bytes.binaryValue()));
        }
    }

    private void openProducer(JsonNode order, ObjectNode answer) throws Exception {
        String name = order.get("name").asText();
        Sender<?> sender = producer(InteropSchemas.named(order.path("schema").asText("bytes")), order);
        producers.put(name, sender);
        answer.put("topic", sender.producer().topic());
    }

    private <T> Sender<T> producer(InteropSchemas.Kind<T> kind, JsonNode order) throws Exception {
        ProducerBuilder<T> builder = client.newProducer(kind.schema())
                .topic(order.get("topic").asText())
                .compressionPolicy(CompressionPolicy.of(CompressionType.valueOf(order.path("compression").asText("NONE"))))
                .batchingPolicy(order.path("batching").asBoolean(false)
                        ? BatchingPolicy.builder().maxPublishDelay(BATCH_DELAY).build()
                        : BatchingPolicy.ofDisabled());
        if (order.has("producer_name")) {
            builder.producerName(order.get("producer_name").asText());
        }
        if (order.has("access_mode")) {
            builder.accessMode(ProducerAccessMode.valueOf(order.get("access_mode").asText()));
        }
        if (order.has("chunk_size")) {
            builder.chunkingPolicy(ChunkingPolicy.builder().enabled(true).chunkSize(order.get("chunk_size").asInt()).build());
        }
        return new Sender<>(run.closing(builder.create()), kind);
    }

    private void openQueue(JsonNode order, ObjectNode answer) throws Exception {
        consumers.put(order.get("name").asText(), queue(InteropSchemas.named(order.path("schema").asText("bytes")), order));
    }

    private <T> Reader<T> queue(InteropSchemas.Kind<T> kind, JsonNode order) throws Exception {
        QueueConsumerBuilder<T> builder = client.newQueueConsumer(kind.schema());
        builder = order.has("namespace")
                ? builder.namespace(order.get("namespace").asText(), propertiesIn(order))
                : builder.topic(order.get("topic").asText());
        builder.consumerName(order.get("name").asText())
                .subscriptionName(order.get("subscription").asText())
                .receiverQueueSize(order.path("receiver_queue_size").asInt(1000))
                .acknowledgmentGroupTime(Duration.ZERO)
                .negativeAckRedeliveryBackoff(BackoffPolicy.exponential(AT_ONCE, AT_ONCE))
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
        if (order.has("max_redelivery_count")) {
            builder.deadLetterPolicy(DeadLetterPolicy.builder()
                    .maxRedeliverCount(order.get("max_redelivery_count").asInt())
                    .build());
        }
        QueueConsumer<T> consumer = run.closing(builder.subscribe());
        return new Reader<>(consumer, consumer::receive, kind);
    }

    private static Map<String, String> propertiesIn(JsonNode order) {
        Map<String, String> properties = new HashMap<>();
        order.path("properties").properties().forEach(each -> properties.put(each.getKey(), each.getValue().asText()));
        return properties;
    }

    private void openStream(JsonNode order, ObjectNode answer) throws Exception {
        consumers.put(order.get("name").asText(), stream(InteropSchemas.named(order.path("schema").asText("bytes")), order));
    }

    private <T> Reader<T> stream(InteropSchemas.Kind<T> kind, JsonNode order) throws Exception {
        StreamConsumerBuilder<T> builder = client.newStreamConsumer(kind.schema());
        builder = order.has("namespace")
                ? builder.namespace(order.get("namespace").asText(), propertiesIn(order))
                : builder.topic(order.get("topic").asText());
        StreamConsumer<T> consumer = run.closing(builder
                .subscriptionName(order.get("subscription").asText())
                .consumerName(order.path("consumer_name").asText(order.get("name").asText()))
                .acknowledgmentGroupTime(Duration.ZERO)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                .subscribe());
        return new Reader<>(consumer, consumer::receive, kind);
    }

    private void openCheckpointConsumer(JsonNode order, ObjectNode answer) throws Exception {
        String name = order.get("name").asText();
        consumers.put(name, checkpointConsumer(InteropSchemas.named(order.path("schema").asText("bytes")), order));
    }

    private <T> Reader<T> checkpointConsumer(InteropSchemas.Kind<T> kind, JsonNode order) throws Exception {
        Checkpoint start = order.has("start")
                ? Checkpoint.fromByteArray(order.get("start").binaryValue())
                : Checkpoint.earliest();
        CheckpointConsumerBuilder<T> builder = client.newCheckpointConsumer(kind.schema())
                .topic(order.get("topic").asText())
                .startPosition(start);
        if (order.has("group")) {
            builder.consumerGroup(order.get("group").asText()).consumerName(order.get("name").asText());
        }
        CheckpointConsumer<T> consumer = run.closing(builder.create());
        return new Reader<>(consumer, consumer::receive, kind);
    }

    private void send(JsonNode order, ObjectNode answer) throws Exception {
        ArrayNode ids = answer.putArray("ids");
        for (MessageId id : send(producers.get(order.get("producer").asText()), order)) {
            ids.add(id.toByteArray());
        }
    }

    /** All at once, so that they become batches where batches are made. */
    private <T> List<MessageId> send(Sender<T> sender, JsonNode order) throws Exception {
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (JsonNode message : order.get("messages")) {
            AsyncMessageBuilder<T> builder = sender.producer().async().newMessage();
            if (order.has("transaction")) {
                builder.transaction(transactions.get(order.get("transaction").asText()));
            }
            if (message.has("key")) {
                builder.key(message.get("key").asText());
            }
            if (message.has("event_time_ms")) {
                builder.eventTime(Instant.ofEpochMilli(message.get("event_time_ms").asLong()));
            }
            if (message.has("sequence_id")) {
                builder.sequenceId(message.get("sequence_id").asLong());
            }
            builder.properties(propertiesIn(message));
            JsonNode value = message.get("value");
            sends.add(builder.value(value.isNull() ? null : sender.kind().fromJson().apply(value)).send());
        }
        sender.producer().async().flush().get();
        List<MessageId> ids = new ArrayList<>();
        for (CompletableFuture<MessageId> send : sends) {
            ids.add(send.get());
        }
        return ids;
    }

    private void receive(JsonNode order, ObjectNode answer) throws Exception {
        receive(consumers.get(order.get("consumer").asText()), order, answer.putArray("messages"));
    }

    /** As many as were asked for, or those that came before nothing came for so long. */
    private static <T> void receive(Reader<T> reader, JsonNode order, ArrayNode messages) throws Exception {
        Duration quiet = Duration.ofMillis(order.path("quiet_ms").asLong(10_000));
        for (int left = order.get("count").asInt(); left > 0; left--) {
            Message<T> message = reader.receive().next(quiet);
            if (message == null) {
                return;
            }
            messages.add(told(message, reader.kind()));
        }
    }

    private static <T> ObjectNode told(Message<T> message, InteropSchemas.Kind<T> kind) throws IOException {
        ObjectNode told = JSON.createObjectNode()
                .put("id", message.id().toByteArray())
                .put("key", message.key().orElse(null))
                .put("event_time_ms", message.eventTime().map(Instant::toEpochMilli).orElse(null))
                .put("publish_time_ms", message.publishTime().toEpochMilli())
                .put("sequence_id", message.sequenceId())
                .put("producer_name", message.producerName().orElse(null))
                .put("topic", message.topic())
                .put("redelivery_count", message.redeliveryCount());
        told.set("properties", JSON.valueToTree(message.properties()));
        T value = message.value();
        told.set("value", value == null ? null : kind.toJson().apply(value));
        return told;
    }

    /**
     * Each of the ids; for a consumer that knows nothing else cumulatively, up to the last of them. Answers which of
     * them the client has dropped in a transaction: what {@link Transactions} says of them.
     */
    private void acknowledge(JsonNode order, ObjectNode answer) throws IOException {
        ArrayNode dropped = answer.putArray("dropped");
        AutoCloseable consumer = consumers.get(order.get("consumer").asText()).consumer();
        Transaction transaction = order.has("transaction") ? transactions.get(order.get("transaction").asText()) : null;
        List<MessageId> ids = new ArrayList<>();
        for (JsonNode bytes : order.get("ids")) {
            ids.add(MessageId.fromByteArray(bytes.binaryValue()));
        }
        if (consumer instanceof StreamConsumer<?> stream) {
            if (transaction == null) {
                stream.acknowledgeCumulative(ids.get(ids.size() - 1));
            } else {
                Transactions.acknowledge(stream, ids, transaction).forEach(dropped::add);
            }
        } else if (consumer instanceof QueueConsumer<?> queue) {
            for (int place = 0; place < ids.size(); place++) {
                if (transaction == null) {
                    queue.acknowledge(ids.get(place));
                } else if (!Transactions.acknowledge(queue, ids.get(place), transaction)) {
                    dropped.add(place);
                }
            }
        }
    }

    private void negativelyAcknowledge(JsonNode order, ObjectNode answer) throws IOException {
        QueueConsumer<?> consumer = (QueueConsumer<?>) consumers.get(order.get("consumer").asText()).consumer();
        for (JsonNode bytes : order.get("ids")) {
            consumer.negativeAcknowledge(MessageId.fromByteArray(bytes.binaryValue()));
        }
    }

    private void checkpoint(JsonNode order, ObjectNode answer) {
        CheckpointConsumer<?> consumer = (CheckpointConsumer<?>) consumers.get(order.get("consumer").asText()).consumer();
        answer.put("checkpoint", consumer.checkpoint().toByteArray());
    }

    private void begin(JsonNode order, ObjectNode answer) throws Exception {
        transactions.put(order.get("name").asText(), client.newTransaction());
    }

    /** The client's own reading of an id or a checkpoint, and its bytes as it would write them. */
    private void explain(JsonNode order, ObjectNode answer) throws IOException {
        if (order.has("id")) {
            MessageId id = switch (order.get("id").asText()) {
                case "earliest" -> MessageId.earliest();
                case "latest" -> MessageId.latest();
                default -> MessageId.fromByteArray(Base64.getDecoder().decode(order.get("id").asText()));
            };
            answer.put("bytes", id.toByteArray()).set("meaning", InteropIds.explained(id));
            return;
        }
        Checkpoint checkpoint = switch (order.get("checkpoint").asText()) {
            case "earliest" -> Checkpoint.earliest();
            case "latest" -> Checkpoint.latest();
            default -> Checkpoint.fromByteArray(Base64.getDecoder().decode(order.get("checkpoint").asText()));
        };
        answer.put("bytes", checkpoint.toByteArray()).set("meaning", InteropIds.explained(checkpoint));
    }

    private void close(JsonNode order, ObjectNode answer) throws Exception {
        for (JsonNode name : order.get("names")) {
            Sender<?> sender = producers.remove(name.asText());
            Reader<?> reader = consumers.remove(name.asText());
            if (sender != null) {
                sender.producer().close();
            }
            if (reader != null) {
                reader.consumer().close();
            }
        }
    }
}
