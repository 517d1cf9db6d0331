package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.ProducerAccessMode;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Producers: who may be one, under which name, and what a sequence id is good for. */
final class ProducerCases {
    private ProducerCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("access_exclusive", ProducerCases::exclusive);
        cases.put("access_wait", ProducerCases::waitForExclusive);
        cases.put("access_fencing", ProducerCases::fencing);
        cases.put("producer_names", ProducerCases::names);
        cases.put("sequence_ids", ProducerCases::sequenceIds);
        cases.put("missing_topic", ProducerCases::missingTopic);
        cases.put("backlog_quota", ProducerCases::backlogQuota);
        cases.put("producers_in_turn", ProducerCases::closeAndReopen);
    }

    private static Producer<String> producer(CaseRun run, PulsarClient client, ScalableTopic topic, ProducerAccessMode mode)
            throws Exception {
        return run.closing(client.newProducer(Schema.string()).topic(topic.name()).accessMode(mode).create());
    }

    private static String refusalOf(Readers.Loop attempt) {
        try {
            attempt.run();
            return "";
        } catch (Exception refusal) {
            // The wrappers' texts repeat their causes'; the classes tell what kind of refusal it was.
            StringBuilder text = new StringBuilder(refusal.toString());
            for (Throwable cause = refusal.getCause(); cause != null; cause = cause.getCause()) {
                text.append(" <- ").append(cause.getClass().getSimpleName());
            }
            return text.toString();
        }
    }

    private static void exclusive(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<String> only = producer(run, client, topic, ProducerAccessMode.EXCLUSIVE);
        only.newMessage().key("a").value("first").send();
        run.fact("second_exclusive", refusalOf(() -> producer(run, client, topic, ProducerAccessMode.EXCLUSIVE)));
        // Shared segment producers are opened by the first send.
        Producer<String> shared = producer(run, client, topic, ProducerAccessMode.SHARED);
        run.fact("shared_beside", refusalOf(() ->
                shared.async().newMessage().key("a").value("x").send().get(10, TimeUnit.SECONDS)));
        only.newMessage().key("b").value("still").send();
        only.close();
        Producer<String> next = producer(run, client, topic, ProducerAccessMode.EXCLUSIVE);
        run.fact("after_close", refusalOf(() -> next.newMessage().key("a").value("second").send()));
    }

    private static void waitForExclusive(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<String> holder = producer(run, client, topic, ProducerAccessMode.EXCLUSIVE);
        holder.newMessage().key("a").value("first").send();
        CompletableFuture<Producer<String>> waiting = run.client().newProducer(Schema.string())
                .topic(topic.name())
                .accessMode(ProducerAccessMode.WAIT_FOR_EXCLUSIVE)
                .createAsync();
        boolean early = true;
        try {
            waiting.get(1, TimeUnit.SECONDS);
        } catch (TimeoutException expected) {
            early = false;
        }
        run.fact("ready_while_held", early);
        holder.close();
        Producer<String> next = run.closing(waiting.get(20, TimeUnit.SECONDS));
        next.newMessage().key("a").value("second").send();
        run.fact("ready_after_close", true);
    }

    private static void fencing(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<String> old = producer(run, client, topic, ProducerAccessMode.EXCLUSIVE);
        old.newMessage().key("a").value("first").send();
        Producer<String> fresh = producer(run, run.client(), topic, ProducerAccessMode.EXCLUSIVE_WITH_FENCING);
        fresh.newMessage().key("a").value("second").send();
        run.fact("fenced_send", refusalOf(() ->
                old.async().newMessage().key("a").value("stale").send().get(15, TimeUnit.SECONDS)));
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "all").subscribe());
        List<String> values = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> values.add(message.value()));
        run.fact("values", values.stream().sorted().toList());
    }

    private static void names(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Producer<String> named = run.closing(
                client.newProducer(Schema.string()).topic(topic.name()).producerName("mine").create());
        named.newMessage().key("a").value("x").send();
        Producer<String> same = run.closing(
                run.client().newProducer(Schema.string()).topic(topic.name()).producerName("mine").create());
        run.fact("same_name", refusalOf(() ->
                same.async().newMessage().key("a").value("x").send().get(10, TimeUnit.SECONDS)));
        Producer<String> unnamed = run.closing(client.newProducer(Schema.string()).topic(topic.name()).create());
        Producer<String> another = run.closing(client.newProducer(Schema.string()).topic(topic.name()).create());
        unnamed.newMessage().key("a").value("x").send();
        another.newMessage().key("a").value("x").send();
        run.fact("name", named.producerName());
        run.fact("last_sequence_id", named.lastSequenceId());
    }

    /** With deduplication on, a sequence id that was used before is acknowledged but not stored again. */
    private static void sequenceIds(CaseRun run) throws Exception {
        String namespace = "public/deduplicated";
        run.admin().createDeduplicatingNamespace(namespace);
        ScalableTopic topic = run.admin().create(namespace, run.localName(), 1);
        PulsarClient client = run.client();
        for (int round = 0; round < 2; round++) {
            try (Producer<String> producer = client.newProducer(Schema.string())
                    .topic(topic.name())
                    .producerName("numbered")
                    .batchingPolicy(BatchingPolicy.ofDisabled())
                    .create()) {
                for (int i = 0; i < 10; i++) {
                    producer.newMessage().key("a").sequenceId(i + 5L * round).value("n" + (i + 5 * round)).send();
                }
                run.fact("last_sequence_id_" + round, producer.lastSequenceId());
            }
        }
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "all").subscribe());
        List<String> values = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> values.add(message.value()));
        run.fact("values", values);
    }

    private static void missingTopic(CaseRun run) throws Exception {
        PulsarClient client = run.client();
        String topic = "topic://public/default/" + run.localName();
        run.fact("create", refusalOf(() -> {
            Producer<String> producer = run.closing(client.newProducer(Schema.string()).topic(topic).createAsync()
                    .get(15, TimeUnit.SECONDS));
            producer.newMessage().key("a").value("x").send();
        }));
        run.fact("missing_tenant", refusalOf(() -> run.closing(client.newProducer(Schema.string())
                .topic("topic://nobody/nowhere/" + run.localName()).createAsync().get(15, TimeUnit.SECONDS))));
    }

    /** Opening and closing many producers in a row leaves room for the next. */
    private static void closeAndReopen(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        int rounds = 20;
        for (int i = 0; i < rounds; i++) {
            try (Producer<String> producer = client.newProducer(Schema.string())
                    .topic(topic.name())
                    .sendTimeout(Duration.ofSeconds(20))
                    .producerName("again")
                    .create()) {
                producer.newMessage().key("a").value("n" + i).send();
            }
        }
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "all").subscribe());
        run.fact("rounds", rounds);
        run.fact("received", Readers.readUntilQuiet(consumer::receive, message -> { }));
    }

    /** What a producer sees on a segment over its backlog quota, and once its messages are acknowledged. */
    private static void backlogQuota(CaseRun run) throws Exception {
        String namespace = "public/" + run.localName();
        run.admin().createNamespace(namespace);
        run.admin().limitBacklog(namespace, 5_000, run.arg("policy", ""));
        ScalableTopic topic = run.admin().create(namespace, "t", 1);
        PulsarClient client = run.client();
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "all").subscribe());
        Producer<String> producer = producer(run, client, topic, ProducerAccessMode.SHARED);
        for (int i = 0; i < 10; i++) {
            producer.newMessage().value(i + " " + "x".repeat(1000)).send();
        }
        run.admin().checkBacklogs();
        CompletableFuture<?> beyond = producer.async().newMessage().value("beyond").send();
        run.fact("beyond", refusalOf(() -> beyond.get(3, TimeUnit.SECONDS)));
        List<String> values = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> {
            values.add(message.value().split(" ")[0]);
            consumer.acknowledge(message.id());
        });
        run.fact("below", refusalOf(() ->
                producer.async().newMessage().value("below").send().get(20, TimeUnit.SECONDS)));
        Readers.readUntilQuiet(consumer::receive, message -> {
            values.add(message.value());
            consumer.acknowledge(message.id());
        });
        run.fact("values", values);
    }
}
