package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** A visit to one of the clusters of a scalable topic: some messages are sent, and some are consumed. */
final class MovingConsumerCases {
    private static final int KEYS = 10;

    private MovingConsumerCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("visit_cluster", MovingConsumerCases::visit);
    }

    private static void visit(CaseRun run) throws Exception {
        PulsarClient client = run.client();
        String topic = "topic://" + run.arg("namespace", "public/default") + "/" + run.arg("topic", "");
        String prefix = run.arg("prefix", "");
        try (Producer<String> producer = client.newProducer(Schema.string()).topic(topic).create()) {
            for (int number = 0; number < run.intArg("send", 0); number++) {
                producer.newMessage().key("k" + number % KEYS).value(prefix + number).send();
            }
        }
        List<String> values = new ArrayList<>();
        int count = run.intArg("consume", 0);
        if (run.arg("type", "queue").equals("queue")) {
            try (QueueConsumer<String> consumer =
                    Readers.queue(client, topic, "moving").replicateSubscriptionState(true).subscribe()) {
                Readers.readUntil(consumer::receive, () -> values.size() >= count, message -> {
                    values.add(message.value());
                    consumer.acknowledge(message.id());
                });
            }
        } else {
            try (StreamConsumer<String> consumer =
                    Readers.stream(client, topic, "moving").replicateSubscriptionState(true).subscribe()) {
                Readers.readUntil(consumer::receive, () -> values.size() >= count, message -> {
                    values.add(message.value());
                    consumer.acknowledgeCumulative(message.id());
                });
            }
        }
        run.fact("values", values);
    }
}
