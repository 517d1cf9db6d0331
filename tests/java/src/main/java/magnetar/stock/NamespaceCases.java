package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Consumers of a whole namespace: topics that exist, topics that come, topics picked by a property. */
final class NamespaceCases {
    private NamespaceCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("namespace_queue", run -> follow(run, Map.of(), queue(run, Map.of())));
        cases.put("namespace_filtered", run -> follow(run, Map.of("team", "blue"), queue(run, Map.of("team", "blue"))));
        cases.put("namespace_stream", run -> follow(run, Map.of(), stream(run)));
    }

    /** Subscribes and starts to read; every value goes into the set. */
    @FunctionalInterface
    private interface Subscriber {
        void start(PulsarClient client, String namespace, Set<String> values) throws Exception;
    }

    private static Subscriber queue(CaseRun run, Map<String, String> filter) {
        return (client, namespace, values) -> {
            QueueConsumer<String> consumer = run.closing(client.newQueueConsumer(Schema.string())
                    .namespace(namespace, filter)
                    .subscriptionName("watcher")
                    .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                    .subscribe());
            Readers.background("namespace-queue", () -> Readers.readUntil(consumer::receive, () -> false, message -> {
                values.add(message.value());
                consumer.acknowledge(message.id());
            }));
        };
    }

    private static Subscriber stream(CaseRun run) {
        return (client, namespace, values) -> {
            StreamConsumer<String> consumer = run.closing(client.newStreamConsumer(Schema.string())
                    .namespace(namespace)
                    .subscriptionName("watcher")
                    .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                    .subscribe());
            Readers.background("namespace-stream", () -> Readers.readUntil(consumer::receive, () -> false, message -> {
                values.add(message.value());
                consumer.acknowledgeCumulative(message.id());
            }));
        };
    }

    private static void follow(CaseRun run, Map<String, String> properties, Subscriber subscriber) throws Exception {
        String namespace = "public/" + run.localName();
        run.admin().createNamespace(namespace);
        PulsarClient client = run.client();
        List<ScalableTopic> topics = new ArrayList<>();
        topics.add(run.admin().create(namespace, "one", 2, properties));
        topics.add(run.admin().create(namespace, "two", 1, properties));
        ScalableTopic outside = run.admin().create(namespace, "outside", 1, Map.of("team", "red"));
        Set<String> values = new ConcurrentSkipListSet<>();
        subscriber.start(client, namespace, values);
        topics.add(run.admin().create(namespace, "late", 2, properties));
        if (properties.isEmpty()) {
            topics.add(outside);
        } else {
            send(run, client, outside);
        }
        Set<String> expected = new TreeSet<>();
        for (ScalableTopic topic : topics) {
            expected.addAll(send(run, client, topic));
        }
        long deadline = System.nanoTime() + 20_000_000_000L;
        while (!values.containsAll(expected) && System.nanoTime() < deadline) {
            Thread.sleep(20);
        }
        run.fact("expected", expected.size());
        run.fact("received", values.size());
        run.fact("missing", expected.stream().filter(value -> !values.contains(value)).toList());
        run.fact("unexpected", values.stream().filter(value -> !expected.contains(value)).toList());
    }

    private static List<String> send(CaseRun run, PulsarClient client, ScalableTopic topic) throws Exception {
        List<String> values = new ArrayList<>();
        Producer<String> producer = run.closing(client.newProducer(Schema.string()).topic(topic.name()).create());
        for (int i = 0; i < 10; i++) {
            String value = topic.path() + "#" + i;
            producer.newMessage().key("k" + i).value(value).send();
            values.add(value);
        }
        return values;
    }
}
