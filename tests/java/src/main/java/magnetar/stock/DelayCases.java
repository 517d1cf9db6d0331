package magnetar.stock;

import java.time.Duration;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Messages that are sent now and delivered later. */
final class DelayCases {
    private DelayCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("delayed", DelayCases::laterForQueuesAtOnceForStreams);
    }

    /** Three of six are delayed, the second one longest; a queue and a stream consumer say when each came. */
    private static void laterForQueuesAtOnceForStreams(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 1));
        Duration delay = Duration.ofMillis(run.intArg("delayMs", 4000));
        PulsarClient client = run.client();
        QueueConsumer<String> queue = run.closing(Readers.queue(client, topic.name(), "queue").subscribe());
        StreamConsumer<String> stream = run.closing(Readers.stream(client, topic.name(), "stream").subscribe());
        Producer<String> producer = run.closing(client.newProducer(Schema.string()).topic(topic.name()).create());
        Instant due = Instant.now().plus(delay);
        producer.newMessage().key("k").value("at").deliverAt(due).send();
        producer.newMessage().key("k").value("twice").deliverAfter(delay.multipliedBy(2)).send();
        producer.newMessage().key("k").value("after").deliverAfter(delay).send();
        for (String value : List.of("a", "b", "c")) {
            producer.newMessage().key("k").value(value).send();
        }
        List<String> streamOrder = new ArrayList<>();
        Readers.readUntil(stream::receive, () -> streamOrder.size() == 6, message -> {
            streamOrder.add(message.value());
            stream.acknowledgeCumulative(message.id());
        });
        run.fact("stream_order", streamOrder);
        run.fact("stream_done_before_due", Instant.now().isBefore(due));
        List<String> order = new ArrayList<>();
        List<Long> afterDue = new ArrayList<>();
        int[] redeliveries = new int[1];
        Readers.readUntil(queue::receive, () -> order.size() == 6, message -> {
            order.add(message.value());
            afterDue.add(Duration.between(due, Instant.now()).toMillis());
            redeliveries[0] += message.redeliveryCount();
            queue.acknowledge(message.id());
        });
        run.fact("queue_order", order);
        run.fact("queue_after_due_ms", afterDue);
        run.fact("redeliveries", redeliveries[0]);
        run.fact("left", Readers.readUntilQuiet(queue::receive, message -> { }));
    }
}
