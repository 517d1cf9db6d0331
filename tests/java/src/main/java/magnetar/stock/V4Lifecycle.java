package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.namespace;

import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.AutoSubscriptionCreationOverride;
import org.apache.pulsar.common.policies.data.AutoTopicCreationOverride;
import org.apache.pulsar.common.policies.data.DelayedDeliveryPolicies;
import org.apache.pulsar.common.policies.data.InactiveTopicDeleteMode;
import org.apache.pulsar.common.policies.data.InactiveTopicPolicies;

/** Policies of creation, expiry, deletion and delays: as the admin library sends them, and what clients see. */
final class V4Lifecycle {
    private static final int OPERATION_TIMEOUT_S = 10;
    private static final int LIMIT_MS = 15_000;
    private static final int QUIET_MS = 500;

    private V4Lifecycle() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_creation_policies", V4Lifecycle::creation);
        cases.put("v4_delay_policies", V4Lifecycle::delays);
        cases.put("v4_expiry_policies", V4Lifecycle::expiry);
        cases.put("v4_inactive_topics", V4Lifecycle::inactive);
        cases.put("v4_deduplication_policies", V4Lifecycle::deduplication);
    }

    /** "ok", or the simple name of the exception. */
    private static String outcome(AutoCloseableCall call) throws Exception {
        try {
            call.call().close();
            return "ok";
        } catch (PulsarClientException failure) {
            return failure.getClass().getSimpleName();
        }
    }

    /** Opens something that is to be closed. */
    private interface AutoCloseableCall {
        AutoCloseable call() throws Exception;
    }

    private static String subscribe(PulsarClient client, String topic, String name) throws Exception {
        return outcome(() -> client.newConsumer().topic(topic).subscriptionName(name).subscribe());
    }

    private static void creation(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String base = "persistent://" + namespace + "/";
        admin.namespaces().setAutoTopicCreation(namespace, AutoTopicCreationOverride.builder()
                .allowAutoTopicCreation(true).topicType("partitioned").defaultNumPartitions(3).build());
        AutoTopicCreationOverride shown = admin.namespaces().getAutoTopicCreation(namespace);
        run.fact("shown", shown.getTopicType() + " " + shown.getDefaultNumPartitions());
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(base + "made").create());
        Consumer<String> consumer = run.closing(
                client.newConsumer(Schema.STRING).topic(base + "made").subscriptionName("s").subscribe());
        for (int i = 0; i < 30; i++) {
            producer.newMessage().key("k" + i).value("m" + i).send();
        }
        int received = 0;
        for (Message<String> message; (message = consumer.receive(received < 30 ? LIMIT_MS : 100,
                TimeUnit.MILLISECONDS)) != null; received++) {
            consumer.acknowledge(message);
        }
        run.fact("received", received);
        run.fact("partitions", admin.topics().getPartitionedTopicMetadata(base + "made").partitions);
        admin.namespaces().setAutoTopicCreation(namespace,
                AutoTopicCreationOverride.builder().allowAutoTopicCreation(false).build());
        run.fact("producer_of_missing", outcome(() -> client.newProducer().topic(base + "none").create()));
        run.fact("consumer_of_missing", subscribe(client, base + "none", "s"));
        run.fact("reader_of_missing", outcome(() -> client.newReader().topic(base + "none")
                .startMessageId(org.apache.pulsar.client.api.MessageId.earliest).create()));
        admin.namespaces().removeAutoTopicCreation(namespace);
        run.fact("removed", String.valueOf(admin.namespaces().getAutoTopicCreation(namespace)));
        admin.namespaces().setAutoSubscriptionCreation(namespace,
                AutoSubscriptionCreationOverride.builder().allowAutoSubscriptionCreation(false).build());
        run.fact("missing_subscription", subscribe(client, base + "made", "none"));
        admin.topics().createNonPartitionedTopic(base + "single");
        admin.topicPolicies().setAutoSubscriptionCreation(base + "single",
                AutoSubscriptionCreationOverride.builder().allowAutoSubscriptionCreation(true).build());
        run.fact("subscription_by_policy_of_topic", subscribe(client, base + "single", "new"));
        admin.topicPolicies().removeAutoSubscriptionCreation(base + "single");
        run.fact("missing_again", subscribe(client, base + "single", "none"));
        run.fact("known", subscribe(client, base + "single", "new"));
    }

    private static void delays(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        admin.namespaces().setDelayedDeliveryMessages(namespace, DelayedDeliveryPolicies.builder()
                .active(true).tickTime(50).maxDeliveryDelayInMillis(60_000).build());
        DelayedDeliveryPolicies shown = admin.topicPolicies().getDelayedDeliveryPolicy(topic, true);
        run.fact("applied", shown.isActive() + " " + shown.getTickTime() + " " + shown.getMaxDeliveryDelayInMillis());
        Producer<String> producer = run.closing(client.newProducer(Schema.STRING).topic(topic).create());
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING).topic(topic)
                .subscriptionName("s").subscriptionType(SubscriptionType.Shared).subscribe());
        try {
            producer.newMessage().value("too late").deliverAfter(61, TimeUnit.SECONDS).send();
            run.fact("too_late", "ok");
        } catch (PulsarClientException failure) {
            run.fact("too_late", failure.getClass().getSimpleName());
        }
        producer.newMessage().value("waits").deliverAfter(59, TimeUnit.SECONDS).send();
        producer.send("now");
        run.fact("first", consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS).getValue());
        run.fact("waits", consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS) == null);
        admin.topicPolicies().setDelayedDeliveryPolicy(topic,
                DelayedDeliveryPolicies.builder().active(false).tickTime(1000).build());
        Message<String> released = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("when_inactive", released == null ? "none" : released.getValue());
        admin.topicPolicies().removeDelayedDeliveryPolicy(topic);
        admin.namespaces().removeDelayedDeliveryMessages(namespace);
        run.fact("removed", String.valueOf(admin.namespaces().getDelayedDelivery(namespace)));
    }

    private static void expiry(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String namespace = namespace(run, admin);
        run.fact("unset", String.valueOf(admin.namespaces().getSubscriptionExpirationTime(namespace)));
        admin.namespaces().setSubscriptionExpirationTime(namespace, 10);
        run.fact("set", admin.namespaces().getSubscriptionExpirationTime(namespace));
        admin.namespaces().removeSubscriptionExpirationTime(namespace);
        run.fact("removed", String.valueOf(admin.namespaces().getSubscriptionExpirationTime(namespace)));
    }

    private static void inactive(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String base = "persistent://" + namespace + "/";
        InactiveTopicPolicies policies =
                new InactiveTopicPolicies(InactiveTopicDeleteMode.delete_when_subscriptions_caught_up, 1, true);
        admin.namespaces().setInactiveTopicPolicies(namespace, policies);
        run.fact("same", policies.equals(admin.namespaces().getInactiveTopicPolicies(namespace)));
        for (String name : new String[] {"caught-up", "behind", "used", "excepted"}) {
            Producer<String> producer = client.newProducer(Schema.STRING).topic(base + name).create();
            Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(base + name)
                    .subscriptionName("s").subscribe();
            producer.send("x");
            Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            if (name.equals("excepted")) {
                admin.topicPolicies().setInactiveTopicPolicies(base + name,
                        new InactiveTopicPolicies(InactiveTopicDeleteMode.delete_when_no_subscriptions, 1, false));
            }
            if (!name.equals("behind")) {
                consumer.acknowledgeAsync(message).get();
            }
            consumer.close();
            if (!name.equals("used")) {
                producer.close();
            }
        }
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(2 * LIMIT_MS);
                exists(admin, base + "caught-up") && System.nanoTime() < end;) {
            Thread.sleep(100);
        }
        Thread.sleep(2 * QUIET_MS);
        for (String name : new String[] {"caught-up", "behind", "used", "excepted"}) {
            run.fact(name, exists(admin, base + name));
        }
        Producer<String> again = run.closing(client.newProducer(Schema.STRING).topic(base + "caught-up").create());
        again.send("y");
        run.fact("made_again", exists(admin, base + "caught-up"));
        admin.namespaces().removeInactiveTopicPolicies(namespace);
        run.fact("removed", String.valueOf(admin.namespaces().getInactiveTopicPolicies(namespace)));
    }

    /** Messages with a number that was sent before are dropped while a policy says so. */
    private static void deduplication(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        run.fact("status_before", admin.topics().getStats(topic).getDeduplicationStatus());
        admin.namespaces().setDeduplicationStatus(namespace, true);
        run.fact("shown", admin.namespaces().getDeduplicationStatus(namespace));
        run.fact("applied", admin.topicPolicies().getDeduplicationStatus(topic, true));
        run.fact("status", deduplicationUntil(admin, topic, "Enabled"));
        Consumer<String> consumer = run.closing(
                client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s").subscribe());
        Producer<String> producer =
                run.closing(client.newProducer(Schema.STRING).topic(topic).producerName("p").create());
        for (long number : new long[] {1, 2, 2, 1, 3}) {
            producer.newMessage().sequenceId(number).value("m" + number).send();
        }
        admin.topicPolicies().setDeduplicationStatus(topic, false);
        run.fact("status_of_topic", deduplicationUntil(admin, topic, "Disabled"));
        producer.close();
        try (Producer<String> again = client.newProducer(Schema.STRING).topic(topic).producerName("p").create()) {
            again.newMessage().sequenceId(3L).value("again").send();
        }
        java.util.List<String> values = new java.util.ArrayList<>();
        for (Message<String> message; (message = consumer.receive(values.size() < 4 ? LIMIT_MS : QUIET_MS,
                TimeUnit.MILLISECONDS)) != null;) {
            values.add(message.getValue());
        }
        run.fact("values", values);
        try {
            admin.namespaces().setDeduplicationSnapshotInterval(namespace, 100);
            run.fact("snapshot_interval", "ok");
        } catch (PulsarAdminException failure) {
            run.fact("snapshot_interval", failure.getStatusCode() + " " + failure.getMessage());
        }
    }

    /** The deduplication status of a topic once it is the awaited one, or the last one after a while. */
    private static String deduplicationUntil(PulsarAdmin admin, String topic, String awaited) throws Exception {
        String status = null;
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS);
                !awaited.equals(status) && System.nanoTime() < end;) {
            Thread.sleep(status == null ? 0 : 50);
            status = admin.topics().getStats(topic).getDeduplicationStatus();
        }
        return status;
    }

    private static boolean exists(PulsarAdmin admin, String topic) throws PulsarAdminException {
        return admin.topics().getList(topic.substring("persistent://".length(), topic.lastIndexOf('/')))
                .contains(topic);
    }
}
