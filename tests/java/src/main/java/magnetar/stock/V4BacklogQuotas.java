package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.namespace;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.common.policies.data.BacklogQuota;
import org.apache.pulsar.common.policies.data.BacklogQuota.BacklogQuotaType;
import org.apache.pulsar.common.policies.data.BacklogQuota.RetentionPolicy;
import org.apache.pulsar.common.policies.data.RetentionPolicies;
import org.apache.pulsar.common.policies.data.TopicStats;

/** Backlog quotas: as the admin library sets them, and what producers and consumers see beyond. */
final class V4BacklogQuotas {
    private static final int LIMIT_MS = 15_000;
    private static final int QUIET_MS = 1000;
    private static final int OPERATION_TIMEOUT_S = 3;
    private static final int LIMIT_BYTES = 10_000;

    private V4BacklogQuotas() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_quota_hold", V4BacklogQuotas::hold);
        cases.put("v4_quota_exception", V4BacklogQuotas::exception);
        cases.put("v4_quota_eviction", V4BacklogQuotas::eviction);
        cases.put("v4_quota_change", V4BacklogQuotas::change);
        cases.put("v4_quota_policies", V4BacklogQuotas::policies);
    }

    /** A topic in a namespace of its own, with the subscription {@code s} at its start. */
    private static String topic(CaseRun run, PulsarAdmin admin) throws Exception {
        String topic = "persistent://" + namespace(run, admin) + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        admin.topics().createSubscription(topic, "s", MessageId.earliest);
        return topic;
    }

    private static Producer<String> producer(CaseRun run, PulsarClient client, String topic) throws Exception {
        return run.closing(client.newProducer(Schema.STRING).topic(topic).enableBatching(false)
                .sendTimeout(0, TimeUnit.SECONDS).create());
    }

    private static BacklogQuota quota(long bytes, int seconds, RetentionPolicy policy) {
        return BacklogQuota.builder().limitSize(bytes).limitTime(seconds).retentionPolicy(policy).build();
    }

    private static String text(int number) {
        return number + " " + "x".repeat(1000);
    }

    private static void sendAll(Producer<String> producer, int first, int count) throws Exception {
        for (int i = first; i < first + count; i++) {
            producer.send(text(i));
        }
    }

    private static List<Integer> receiveAll(PulsarClient client, String topic, String subscription, int count)
            throws Exception {
        List<Integer> numbers = new ArrayList<>();
        try (Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(topic)
                .subscriptionName(subscription).subscribe()) {
            for (Message<String> message; (message = consumer.receive(numbers.size() < count ? LIMIT_MS : QUIET_MS,
                    TimeUnit.MILLISECONDS)) != null;) {
                numbers.add(Integer.valueOf(message.getValue().split(" ")[0]));
                consumer.acknowledgeAsync(message).get();
            }
        }
        return numbers;
    }

    private static String creation(CaseRun run, PulsarClient client, String topic) throws Exception {
        try {
            producer(run, client, topic).close();
            return "ok";
        } catch (PulsarClientException failure) {
            return failure.getClass().getSimpleName();
        }
    }

    /** Waits until the broker has closed the producers: the client notices that. */
    private static void awaitDisconnection(Producer<String> producer) throws InterruptedException {
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS);
                producer.isConnected() && System.nanoTime() < end;) {
            Thread.sleep(10);
        }
    }

    private static void hold(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run, admin);
        admin.namespaces().setBacklogQuota(topic.substring("persistent://".length(), topic.lastIndexOf('/')),
                quota(LIMIT_BYTES, -1, RetentionPolicy.producer_request_hold));
        Producer<String> producer = producer(run, client, topic);
        sendAll(producer, 0, 20);
        V4Brokers.checkBacklogs(run, admin);
        awaitDisconnection(producer);
        run.fact("connected_beyond", producer.isConnected());
        run.fact("creation_beyond", creation(run, client, topic));
        List<CompletableFuture<MessageId>> queued = new ArrayList<>();
        for (int i = 20; i < 25; i++) {
            queued.add(producer.sendAsync(text(i)));
        }
        Thread.sleep(QUIET_MS);
        run.fact("sent_beyond", queued.stream().filter(CompletableFuture::isDone).count());
        List<Integer> received = new ArrayList<>(receiveAll(client, topic, "s", 20));
        CompletableFuture.allOf(queued.toArray(CompletableFuture[]::new)).get(2 * LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("connected_again", producer.isConnected());
        for (int number : receiveAll(client, topic, "s", 25 - received.size())) {
            received.add(number);
        }
        run.fact("received", received);
    }

    private static void exception(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run, admin);
        admin.topicPolicies().setBacklogQuota(topic, quota(LIMIT_BYTES, -1, RetentionPolicy.producer_exception),
                BacklogQuotaType.destination_storage);
        Producer<String> producer = producer(run, client, topic);
        sendAll(producer, 0, 20);
        V4Brokers.checkBacklogs(run, admin);
        awaitDisconnection(producer);
        run.fact("connected_beyond", producer.isConnected());
        try {
            producer.sendAsync(text(20)).get(LIMIT_MS, TimeUnit.MILLISECONDS);
            run.fact("send_beyond", "ok");
        } catch (ExecutionException failure) {
            run.fact("send_beyond", failure.getCause().getClass().getSimpleName());
        }
        run.fact("creation_beyond", creation(run, client, topic));
        run.fact("received", receiveAll(client, topic, "s", 20).size());
        run.fact("creation_below", creation(run, client, topic));
        producer.sendAsync(text(21)).get(2 * LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("received_below", receiveAll(client, topic, "s", 1));
        admin.topicPolicies().removeBacklogQuota(topic, BacklogQuotaType.destination_storage);
        run.fact("removed", admin.topicPolicies().getBacklogQuotaMap(topic).size());
    }

    private static void eviction(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run, admin);
        Consumer<String> fast = run.closing(
                client.newConsumer(Schema.STRING).topic(topic).subscriptionName("fast").subscribe());
        Producer<String> producer = producer(run, client, topic);
        sendAll(producer, 0, 20);
        for (int i = 0; i < 18; i++) {
            fast.acknowledgeAsync(fast.receive(LIMIT_MS, TimeUnit.MILLISECONDS)).get();
        }
        while (admin.topics().getStats(topic).getSubscriptions().get("fast").getMsgBacklog() > 2) {
            Thread.sleep(10); // acknowledgements go in groups
        }
        admin.topicPolicies().setBacklogQuota(topic, quota(LIMIT_BYTES, -1, RetentionPolicy.consumer_backlog_eviction));
        V4Brokers.checkBacklogs(run, admin);
        TopicStats stats = admin.topics().getStats(topic);
        run.fact("limit_size", stats.getBacklogQuotaLimitSize());
        run.fact("limit_time", stats.getBacklogQuotaLimitTime());
        run.fact("oldest_of", stats.getOldestBacklogMessageSubscriptionName());
        run.fact("oldest_age", stats.getOldestBacklogMessageAgeSeconds());
        run.fact("fast_backlog", stats.getSubscriptions().get("fast").getMsgBacklog());
        run.fact("connected", producer.isConnected());
        run.fact("left", receiveAll(client, topic, "s", 8));
        admin.topicPolicies().removeBacklogQuota(topic);
        // By age.
        sendAll(producer, 20, 5);
        Thread.sleep(2 * QUIET_MS);
        admin.topicPolicies().setBacklogQuota(topic, quota(-1, 1, RetentionPolicy.consumer_backlog_eviction),
                BacklogQuotaType.message_age);
        sendAll(producer, 25, 1);
        V4Brokers.checkBacklogs(run, admin);
        run.fact("young", receiveAll(client, topic, "s", 1));
    }

    /** Policies change while messages are sent and received; the backlog stays below all limits. */
    private static void change(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String topic = topic(run, admin);
        String namespace = topic.substring("persistent://".length(), topic.lastIndexOf('/'));
        Producer<String> producer = producer(run, client, topic);
        Consumer<String> consumer = run.closing(
                client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s").subscribe());
        List<CompletableFuture<MessageId>> sent = new ArrayList<>();
        int received = 0;
        for (RetentionPolicy policy : RetentionPolicy.values()) {
            for (BacklogQuotaType type : BacklogQuotaType.values()) {
                for (int i = 0; i < 20; i++) {
                    sent.add(producer.sendAsync(text(sent.size())));
                }
                admin.namespaces().setBacklogQuota(namespace, quota(100_000_000, 3600, policy), type);
                admin.topicPolicies().setBacklogQuota(topic, quota(200_000_000, 7200, policy), type);
                V4Brokers.checkBacklogs(run, admin);
                for (int i = 0; i < 20; i++, received++) {
                    consumer.acknowledge(consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS));
                }
            }
        }
        for (CompletableFuture<MessageId> each : sent) {
            each.get(LIMIT_MS, TimeUnit.MILLISECONDS);
        }
        run.fact("sent", sent.size());
        run.fact("received", received);
        run.fact("producer_disconnected", producer.getLastDisconnectedTimestamp());
        run.fact("consumer_disconnected", consumer.getLastDisconnectedTimestamp());
    }

    /** The policy at each level, and with retention. */
    private static void policies(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String topic = topic(run, admin);
        String namespace = topic.substring("persistent://".length(), topic.lastIndexOf('/'));
        run.fact("unset", shown(admin.namespaces().getBacklogQuotaMap(namespace)));
        admin.namespaces().setBacklogQuota(namespace, quota(100, -1, RetentionPolicy.producer_request_hold));
        admin.namespaces().setBacklogQuota(namespace, quota(-1, 3600, RetentionPolicy.producer_exception),
                BacklogQuotaType.message_age);
        run.fact("namespace", shown(admin.namespaces().getBacklogQuotaMap(namespace)));
        run.fact("of_policies", shown(admin.namespaces().getPolicies(namespace).backlog_quota_map));
        run.fact("topic_unset", shown(admin.topicPolicies().getBacklogQuotaMap(topic)));
        run.fact("topic_applied", shown(admin.topicPolicies().getBacklogQuotaMap(topic, true)));
        admin.topicPolicies(true).setBacklogQuota(topic, quota(50, -1, RetentionPolicy.producer_exception));
        run.fact("topic_global", shown(admin.topicPolicies(true).getBacklogQuotaMap(topic)));
        admin.topicPolicies(true).removeBacklogQuota(topic);
        admin.topics().setBacklogQuota(topic, quota(60, -1, RetentionPolicy.consumer_backlog_eviction),
                BacklogQuotaType.destination_storage);
        run.fact("topic_local", shown(admin.topics().getBacklogQuotaMap(topic)));
        run.fact("topic_local_applied", shown(admin.topics().getBacklogQuotaMap(topic, true)));
        admin.topics().removeBacklogQuota(topic, BacklogQuotaType.destination_storage);
        BacklogQuota large = quota(2 << 20, -1, RetentionPolicy.producer_exception);
        admin.namespaces().setBacklogQuota(namespace, large);
        try {
            admin.namespaces().setRetention(namespace, new RetentionPolicies(-1, 1));
            run.fact("retention", "ok");
        } catch (PulsarAdminException refused) {
            run.fact("retention", refused.getStatusCode());
        }
        admin.namespaces().removeBacklogQuota(namespace, BacklogQuotaType.message_age);
        admin.namespaces().removeBacklogQuota(namespace);
        admin.namespaces().setRetention(namespace, new RetentionPolicies(-1, 1));
        try {
            admin.namespaces().setBacklogQuota(namespace, large);
            run.fact("quota", "ok");
        } catch (PulsarAdminException refused) {
            run.fact("quota", refused.getStatusCode());
        }
        run.fact("removed", shown(admin.namespaces().getBacklogQuotaMap(namespace)));
    }

    private static Map<String, String> shown(Map<BacklogQuotaType, BacklogQuota> quotas) {
        Map<String, String> shown = new TreeMap<>();
        quotas.forEach((type, quota) -> shown.put(type.name(),
                quota.getLimitSize() + " " + quota.getLimitTime() + " " + quota.getPolicy()));
        return shown;
    }
}
