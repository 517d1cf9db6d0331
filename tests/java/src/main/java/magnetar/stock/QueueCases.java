package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;
import org.apache.pulsar.client.api.v5.config.DeadLetterPolicy;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Queue consumers: shared delivery, single acknowledgements, redelivery, dead letters. */
final class QueueCases {
    private QueueCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("queue", QueueCases::everythingOnceAndThenNothing);
        cases.put("queue_shared", QueueCases::twoConsumersShare);
        cases.put("queue_unacked", QueueCases::unacknowledgedComesAgain);
        cases.put("queue_latest", QueueCases::latestSkipsWhatWasBefore);
        cases.put("negative_ack", QueueCases::negativeAck);
        cases.put("dead_letter", QueueCases::deadLetter);
    }

    private static void everythingOnceAndThenNothing(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received received = tally.new Received();
        new Load(run, client, topic.name(), tally).send(run.intArg("messages", 500));
        Map<Object, Integer> topics = new HashMap<>();
        try (QueueConsumer<String> consumer = Readers.queue(client, topic.name(), "all").subscribe()) {
            Readers.readUntilQuiet(consumer::receive, message -> {
                received.add(message.value());
                topics.merge(message.topic(), 1, Integer::sum);
                consumer.acknowledge(message.id());
            });
        }
        QueueConsumer<String> second = run.closing(Readers.queue(client, topic.name(), "all").subscribe());
        int left = Readers.readUntilQuiet(second::receive, message -> { });
        tally.report(run);
        received.report(run, "");
        run.fact("left_after_acks", left);
        run.fact("message_topics", topics.keySet());
    }

    private static void twoConsumersShare(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 2));
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received together = tally.new Received();
        List<Integer> shares = new ArrayList<>();
        List<Readers.Background> readers = new ArrayList<>();
        int messages = run.intArg("messages", 400);
        for (int i = 0; i < 2; i++) {
            QueueConsumer<String> consumer = run.closing(
                    Readers.queue(client, topic.name(), "both").receiverQueueSize(10).subscribe());
            shares.add(0);
            int index = i;
            readers.add(Readers.background("reader-" + i, () -> Readers.readUntil(
                    consumer::receive, () -> together.distinct() >= messages, message -> {
                        together.add(message.value());
                        shares.set(index, shares.get(index) + 1);
                        consumer.acknowledge(message.id());
                    })));
        }
        new Load(run, client, topic.name(), tally).send(messages);
        for (Readers.Background reader : readers) {
            reader.join();
        }
        tally.report(run);
        together.report(run, "");
        run.fact("shares", shares);
    }

    private static void unacknowledgedComesAgain(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received first = tally.new Received();
        Tally.Received second = tally.new Received();
        int messages = 100;
        new Load(run, client, topic.name(), tally).send(messages);
        int[] seen = new int[1];
        int[] acked = new int[1];
        try (QueueConsumer<String> consumer = Readers.queue(client, topic.name(), "half").subscribe()) {
            Readers.readUntil(consumer::receive, () -> seen[0] == messages, message -> {
                first.add(message.value());
                if (seen[0]++ % 2 == 0) {
                    consumer.acknowledge(message.id());
                    acked[0]++;
                }
            });
        }
        QueueConsumer<String> other = run.closing(Readers.queue(client, topic.name(), "half").subscribe());
        int[] redelivered = new int[1];
        Readers.readUntilQuiet(other::receive, message -> {
            second.add(message.value());
            redelivered[0] += message.redeliveryCount() > 0 ? 1 : 0;
            other.acknowledge(message.id());
        });
        run.fact("first_received", first.distinct());
        run.fact("acknowledged_by_first", acked[0]);
        run.fact("second_received", second.distinct());
        run.fact("second_total", second.total());
        run.fact("marked_redelivered", redelivered[0]);
    }

    private static void latestSkipsWhatWasBefore(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally before = new Tally();
        Tally after = new Tally();
        Tally.Received received = after.new Received();
        new Load(run, client, topic.name(), before).send(50);
        QueueConsumer<String> consumer = run.closing(client.newQueueConsumer(Schema.string())
                .topic(topic.name())
                .subscriptionName("late")
                .subscriptionInitialPosition(SubscriptionInitialPosition.LATEST)
                .subscribe());
        new Load(run, client, topic.name(), after).send(50);
        int total = Readers.readUntilQuiet(consumer::receive, message -> received.add(message.value()));
        run.fact("received", total);
    }

    /** Each message is refused once; it must come again, marked as such, and then stay away. */
    private static void negativeAck(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        int messages = 60;
        new Load(run, client, topic.name(), tally).send(messages);
        Map<String, Integer> refused = new ConcurrentHashMap<>();
        Map<String, Integer> accepted = new ConcurrentHashMap<>();
        int[] marked = new int[1];
        try (QueueConsumer<String> consumer = Readers.queue(client, topic.name(), "refuse")
                .negativeAckRedeliveryBackoff(BackoffPolicy.exponential(Duration.ofMillis(100), Duration.ofMillis(200)))
                .subscribe()) {
            Readers.readUntil(consumer::receive, () -> accepted.size() == messages, message -> {
                if (refused.putIfAbsent(message.value(), 1) == null) {
                    consumer.negativeAcknowledge(message.id());
                    return;
                }
                marked[0] += message.redeliveryCount() > 0 ? 1 : 0;
                accepted.merge(message.value(), 1, Integer::sum);
                consumer.acknowledge(message.id());
            });
        }
        QueueConsumer<String> other = run.closing(Readers.queue(client, topic.name(), "refuse").subscribe());
        run.fact("messages", messages);
        run.fact("accepted", accepted.size());
        run.fact("accepted_twice", accepted.values().stream().filter(count -> count > 1).count());
        run.fact("marked_redelivered", marked[0]);
        run.fact("left_after_acks", Readers.readUntilQuiet(other::receive, message -> { }));
    }

    private static void deadLetter(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        ScalableTopic dead = new ScalableTopic(topic.path() + "-DLQ");
        if (!run.flag("autoCreateDeadLetterTopic")) {
            run.admin().create("public/default", dead.path().substring("public/default/".length()), 1);
        }
        PulsarClient client = run.client();
        Tally tally = new Tally();
        run.closing(Readers.queue(client, dead.name(), "undertaker").subscribe()).close();
        int messages = 10;
        new Load(run, client, topic.name(), tally).send(messages);
        QueueConsumer<String> refusing = run.closing(Readers.queue(client, topic.name(), "refuse")
                .negativeAckRedeliveryBackoff(BackoffPolicy.exponential(Duration.ofMillis(100), Duration.ofMillis(100)))
                .deadLetterPolicy(DeadLetterPolicy.builder().maxRedeliverCount(2).deadLetterTopic(dead.name()).build())
                .subscribe());
        int[] deliveries = new int[1];
        Readers.Background refuser = Readers.background("refuser", () -> {
            while (!Thread.currentThread().isInterrupted()) {
                Message<String> message = refusing.receive(Duration.ofMillis(200));
                if (message != null) {
                    deliveries[0]++;
                    refusing.negativeAcknowledge(message.id());
                }
            }
        });
        refuser.join(Duration.ofMillis(1));
        QueueConsumer<String> undertaker = run.closing(Readers.queue(client, dead.name(), "undertaker").subscribe());
        Tally.Received buried = tally.new Received();
        Map<String, String> properties = new ConcurrentHashMap<>();
        Readers.readUntil(undertaker::receive, () -> buried.distinct() == messages, message -> {
            buried.add(message.value());
            properties.putAll(message.properties());
            undertaker.acknowledge(message.id());
        });
        buried.report(run, "dead_");
        run.fact("deliveries", deliveries[0]);
        run.fact("properties", properties.keySet().stream().sorted().toList());
        run.fact("real_subscription", properties.get("REAL_SUBSCRIPTION"));
    }
}
