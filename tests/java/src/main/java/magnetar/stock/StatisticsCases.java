package magnetar.stock;

import java.time.Duration;
import java.time.Instant;
import java.util.Map;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.schema.Schema;
import org.apache.pulsar.common.policies.data.ConsumerStats;
import org.apache.pulsar.common.policies.data.PublisherStats;
import org.apache.pulsar.common.policies.data.SubscriptionStats;
import org.apache.pulsar.common.policies.data.TopicStats;

/** Statistics by the library of {@code pulsar-admin}, of a topic with traffic. */
final class StatisticsCases {
    /** Apache Pulsar computes rates once a minute. */
    private static final Duration PATIENCE = Duration.ofSeconds(90);
    private static final int MESSAGES = 50;

    private StatisticsCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("statistics", StatisticsCases::rates);
    }

    /** Sends and receives until the statistics of all parts have rates. */
    private static void rates(CaseRun run) throws Exception {
        PulsarAdmin admin = AdminCases.admin(run);
        String topic = "persistent://public/default/" + run.localName();
        QueueConsumer<String> consumer = run.closing(Readers.queue(run.client(), topic, "sub").subscribe());
        Producer<String> producer = run.closing(run.client().newProducer(Schema.string()).topic(topic).create());
        Instant end = Instant.now().plus(PATIENCE);
        TopicStats stats = null;
        boolean all = false;
        while (!all && Instant.now().isBefore(end)) {
            for (int i = 0; i < MESSAGES; i++) {
                producer.newMessage().value("x".repeat(100)).send();
                Message<String> message = consumer.receive(Duration.ofSeconds(10));
                consumer.acknowledge(message.id());
            }
            stats = admin.topics().getStats(topic);
            all = haveRates(stats);
        }
        run.fact("rates_of_all_parts", all);
        run.fact("average_size", stats == null ? 0 : stats.getAverageMsgSize());
    }

    private static boolean haveRates(TopicStats stats) {
        if (stats.getPublishers().isEmpty() || !stats.getSubscriptions().containsKey("sub")) {
            return false;
        }
        PublisherStats publisher = stats.getPublishers().get(0);
        SubscriptionStats subscription = stats.getSubscriptions().get("sub");
        ConsumerStats consumer = subscription.getConsumers().get(0);
        return stats.getMsgRateIn() > 0 && stats.getMsgThroughputIn() > 0
                && stats.getMsgRateOut() > 0 && stats.getMsgThroughputOut() > 0
                && publisher.getMsgRateIn() > 0 && publisher.getAverageMsgSize() > 0
                && subscription.getMsgRateOut() > 0 && subscription.getMessageAckRate() > 0
                && consumer.getMsgRateOut() > 0 && consumer.getMessageAckRate() > 0;
    }
}
