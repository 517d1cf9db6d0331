package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.ProducerBuilder;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Sequence ids over layout changes, in a namespace that deduplicates. */
final class SequenceCases {
    private static final String NAMESPACE = "public/deduplicated";
    private static final int KEYS = 8;

    private SequenceCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("own_ids_over_changes", SequenceCases::ownIds);
        cases.put("initial_ids_over_changes", SequenceCases::initialIds);
        cases.put("generated_ids_over_changes", SequenceCases::generatedIds);
        cases.put("own_ids_in_flight", SequenceCases::ownIdsInFlight);
    }

    private static ScalableTopic topic(CaseRun run, int segments) throws Exception {
        run.admin().createDeduplicatingNamespace(NAMESPACE);
        return run.admin().create(NAMESPACE, run.localName(), segments);
    }

    private static ProducerBuilder<String> named(PulsarClient client, ScalableTopic topic) {
        return client.newProducer(Schema.string())
                .topic(topic.name())
                .producerName("numbered")
                .batchingPolicy(BatchingPolicy.ofDisabled());
    }

    private static void sendOwn(Producer<String> producer, int from, int to) throws Exception {
        for (int i = from; i < to; i++) {
            producer.newMessage().key("k" + i % KEYS).sequenceId(i).value("n" + i).send();
        }
    }

    /** Splits the first segment, or merges the first two. */
    private static void change(CaseRun run, ScalableTopic topic) throws Exception {
        List<Long> active = new ArrayList<>(run.admin().activeSegments(topic).values());
        if (run.flag("merge")) {
            run.admin().merge(topic, active.get(0), active.get(1));
        } else {
            run.admin().split(topic, active.get(0));
        }
    }

    private static void reportValues(CaseRun run, ScalableTopic topic) throws Exception {
        QueueConsumer<String> consumer = run.closing(Readers.queue(run.client(), topic.name(), "all").subscribe());
        List<String> values = new ArrayList<>();
        Readers.readUntilQuiet(consumer::receive, message -> {
            values.add(message.value());
            consumer.acknowledge(message.id());
        });
        run.fact("values", values.stream().sorted().toList());
    }

    /** A program sends under ids of its own, and after the change it sends all again, and more. */
    private static void ownIds(CaseRun run) throws Exception {
        ScalableTopic topic = topic(run, run.flag("merge") ? 2 : 1);
        PulsarClient client = run.client();
        Producer<String> first = run.closing(named(client, topic).create());
        sendOwn(first, 0, 40);
        if (run.flag("live")) {
            change(run, topic);
            sendOwn(first, 40, 60);
            first.close();
        } else {
            first.close();
            change(run, topic);
        }
        PulsarClient next = run.flag("sameClient") ? client : run.client();
        Producer<String> second = run.closing(named(next, topic).create());
        sendOwn(second, 0, 80);
        reportValues(run, topic);
    }

    /** Sends under ids of the application, many in flight, while the layout changes. */
    private static void ownIdsInFlight(CaseRun run) throws Exception {
        ScalableTopic topic = topic(run, 2);
        Producer<String> producer = run.closing(named(run.client(), topic).create());
        List<CompletableFuture<?>> sends = new ArrayList<>();
        int failed = 0;
        for (int i = 0; i < 3000; i++) {
            if (i == 1000 || i == 2000) {
                change(run, topic);
            }
            sends.add(producer.async().newMessage().key("k" + i % KEYS).sequenceId(i).value("n" + i).send());
            if (i % 10 == 0) {
                Thread.sleep(2);
            }
        }
        for (CompletableFuture<?> send : sends) {
            try {
                send.get(30, TimeUnit.SECONDS);
            } catch (ExecutionException refused) {
                failed++;
            }
        }
        run.fact("failed", failed);
        reportValues(run, topic);
    }

    /** A program begins at the same id on each segment, and goes on over two changes. */
    private static void initialIds(CaseRun run) throws Exception {
        ScalableTopic topic = topic(run, 1);
        Producer<String> producer = run.closing(named(run.client(), topic).initialSequenceId(99).create());
        for (int i = 0; i < 60; i++) {
            if (i == 20 || i == 40) {
                run.admin().split(topic, new ArrayList<>(run.admin().activeSegments(topic).values()).get(0));
            }
            producer.newMessage().key("k" + i % KEYS).value("n" + i).send();
        }
        run.fact("last_sequence_id", producer.lastSequenceId());
        reportValues(run, topic);
    }

    /** Named producers without ids of the application: one that goes on over a change, and one that comes later. */
    private static void generatedIds(CaseRun run) throws Exception {
        ScalableTopic topic = topic(run, 1);
        PulsarClient client = run.client();
        try (Producer<String> producer = client.newProducer(Schema.string())
                .topic(topic.name()).producerName("numbered").create()) {
            List<CompletableFuture<?>> sends = new ArrayList<>();
            for (int i = 0; i < 2000; i++) {
                if (i == 1000) {
                    CompletableFuture.allOf(sends.toArray(CompletableFuture[]::new)).get(20, TimeUnit.SECONDS);
                    change(run, topic);
                }
                sends.add(producer.async().newMessage().key("k" + i % KEYS).value("n" + i).send());
            }
            CompletableFuture.allOf(sends.toArray(CompletableFuture[]::new)).get(30, TimeUnit.SECONDS);
        }
        try (Producer<String> producer = client.newProducer(Schema.string())
                .topic(topic.name()).producerName("numbered").create()) {
            for (int i = 2000; i < 2020; i++) {
                producer.newMessage().key("k" + i % KEYS).value("n" + i).send();
            }
        }
        reportValues(run, topic);
    }
}
