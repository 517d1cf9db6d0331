package magnetar.stock;

import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.common.policies.data.DispatchRate;
import org.apache.pulsar.common.policies.data.PublishRate;

/** Rates of publishing and delivery on a scalable topic. */
final class RateCases {
    private static final int PER_SECOND = 50;

    private RateCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("rates", RateCases::publishedAndDelivered);
    }

    /** The time of both, on a topic of one segment: each segment has the rates of the topic. */
    private static void publishedAndDelivered(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received received = tally.new Received();
        int messages = run.intArg("messages", 0);
        String name = "persistent://public/default/" + run.localName();
        try (PulsarAdmin admin = AdminCases.admin(run)) {
            admin.topicPolicies().setPublishRate(name, new PublishRate(PER_SECOND, -1));
            admin.topicPolicies().setSubscriptionDispatchRate(name, DispatchRate.builder()
                    .dispatchThrottlingRateInMsg(PER_SECOND)
                    .dispatchThrottlingRateInByte(-1)
                    .ratePeriodInSecond(1)
                    .build());
        }
        long begin = System.nanoTime();
        new Load(run, client, topic.name(), tally).send(messages);
        run.fact("published_ms", TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - begin));
        begin = System.nanoTime();
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, topic.name(), "s").subscribe());
        Readers.readUntil(consumer::receive, () -> received.distinct() >= messages, message -> {
            received.add(message.value());
            consumer.acknowledge(message.id());
        });
        run.fact("delivered_ms", TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - begin));
        tally.report(run);
        received.report(run, "");
    }
}
