package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.RegexSubscriptionMode;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.NonPersistentTopicStats;

/** The v4 client and the admin library on {@code non-persistent://} topics. */
final class V4NonPersistent {
    private static final int LIMIT_MS = 15_000;
    private static final int QUIET_MS = 500;
    private static final int COUNT = 20;
    private static final String NAMESPACE = "public/default";

    private V4NonPersistent() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_non_persistent", V4NonPersistent::messages);
    }

    /** Messages reach connected consumers only; lists, statistics and refusals of the admin library. */
    private static void messages(CaseRun run) throws Exception {
        PulsarClient client = run.closing(PulsarClient.builder().serviceUrl(run.url()).build());
        PulsarAdmin admin = run.closing(PulsarAdmin.builder().serviceHttpUrl(run.arg("web", "")).build());
        String topic = "non-persistent://" + NAMESPACE + "/" + run.localName();
        int partitions = run.intArg("partitions", 0);
        if (partitions > 0) {
            admin.topics().createPartitionedTopic(topic, partitions);
        }
        SubscriptionType type = SubscriptionType.valueOf(run.arg("type", "Exclusive"));
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING)
                .topic(topic).enableBatching(run.flag("batching")).create());
        producer.send("before");
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING)
                .topic(topic).subscriptionName("s").subscriptionType(type).subscribe());
        for (int i = 0; i < COUNT; i++) {
            producer.newMessage().key("k" + i).value("m" + i).send();
        }
        TreeSet<String> seen = new TreeSet<>();
        for (int i = 0; i < COUNT; i++) {
            Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            if (message == null) {
                break;
            }
            consumer.acknowledge(message);
            seen.add(message.getValue());
        }
        run.fact("seen", seen.size());
        run.fact("saw_earlier", seen.contains("before"));
        run.fact("more", consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS) != null);
        String first = partitions > 0 ? topic + "-partition-0" : topic;
        run.fact("listed", admin.namespaces().getTopics(NAMESPACE).contains(first)
                || admin.topics().getList(NAMESPACE).contains(first));
        run.fact("has_statistics", admin.topics().getStats(first) instanceof NonPersistentTopicStats);
        List<String> refusals = new ArrayList<>();
        try {
            admin.topics().terminateTopic(first);
        } catch (PulsarAdminException refusal) {
            refusals.add(String.valueOf(refusal.getStatusCode()));
        }
        run.fact("refusals", refusals);
        Consumer<String> matching = run.closing(client.newConsumer(Schema.STRING)
                .topicsPattern("non-persistent://" + NAMESPACE + "/" + run.localName() + ".*")
                .subscriptionTopicsMode(RegexSubscriptionMode.NonPersistentOnly)
                .subscriptionName("pattern").subscribe());
        producer.send("pattern");
        Message<String> matched = matching.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("pattern", matched == null ? "none" : matched.getValue());
    }
}
