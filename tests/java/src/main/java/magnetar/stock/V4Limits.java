package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.namespace;
import static magnetar.stock.V4Clients.until;

import java.io.IOException;
import java.time.Clock;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.RetentionPolicies;

/** How many clients a topic has, how large messages are, and how long they are kept, by policies. */
final class V4Limits {
    private static final int OPERATION_TIMEOUT_S = 10;
    private static final int LIMIT_MS = 15_000;
    private static final int TTL_S = 600;

    private V4Limits() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_limits", V4Limits::limits);
        cases.put("v4_message_ttl", V4Limits::timeToLive);
        cases.put("v4_expired_messages", V4Limits::expired);
        cases.put("v4_retention", V4Limits::retention);
    }

    private static String outcome(Callable<?> call) {
        try {
            call.call();
            return "ok";
        } catch (PulsarClientException refusal) {
            return refusal.getClass().getSimpleName();
        } catch (Exception other) {
            return other.toString();
        }
    }

    private static boolean works(Callable<? extends AutoCloseable> opening) {
        return outcome(() -> {
            opening.call().close();
            return null;
        }).equals("ok");
    }

    private static void limits(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.namespaces().setMaxProducersPerTopic(namespace, 2);
        admin.namespaces().setMaxConsumersPerTopic(namespace, 3);
        admin.namespaces().setMaxConsumersPerSubscription(namespace, 2);
        admin.namespaces().setMaxSubscriptionsPerTopic(namespace, 2);
        admin.topics().createNonPartitionedTopic(topic);
        Callable<Producer<byte[]>> producer = () -> run.closing(client.newProducer().topic(topic).create());
        List<Producer<byte[]>> attached = List.of(producer.call(), producer.call());
        run.fact("third_producer", outcome(producer));
        admin.topicPolicies().setMaxProducers(topic, 3);
        run.fact("third_by_topic", until(() -> works(producer)));
        admin.topicPolicies().setMaxProducers(topic, 1);
        run.fact("refused_by_topic", until(() -> !works(producer)));
        attached.get(0).close();
        run.fact("at_the_maximum", outcome(producer));
        run.fact("attached_stays", outcome(() -> attached.get(1).send(new byte[200])));
        admin.topicPolicies().setMaxMessageSize(topic, 100);
        run.fact("too_large", until(() -> outcome(() -> attached.get(1).send(new byte[200]))
                .equals("NotAllowedException")));
        run.fact("small", outcome(() -> attached.get(1).send(new byte[10])));
        consumers(run, admin, client, topic);
    }

    private static void consumers(CaseRun run, PulsarAdmin admin, PulsarClient client, String topic)
            throws Exception {
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        for (String subscription : List.of("a", "a", "b")) {
            consumers.add(run.closing(subscribe(client, topic, subscription, SubscriptionType.Shared)));
        }
        run.fact("third_of_subscription",
                outcome(() -> subscribe(client, topic, "a", SubscriptionType.Shared)));
        run.fact("fourth_of_topic", outcome(() -> subscribe(client, topic, "b", SubscriptionType.Shared)));
        for (Consumer<byte[]> each : consumers) {
            each.close();
        }
        run.fact("third_subscription", outcome(() -> subscribe(client, topic, "c", SubscriptionType.Shared)));
        admin.topicPolicies().setSubscriptionTypesEnabled(topic, Set.of(SubscriptionType.Exclusive));
        run.fact("other_type", until(() -> outcome(() -> {
            subscribe(client, topic, "a", SubscriptionType.Shared).close();
            return null;
        }).equals("NotAllowedException")));
        run.fact("enabled_type", works(() -> subscribe(client, topic, "a", SubscriptionType.Exclusive)));
    }

    private static Consumer<byte[]> subscribe(
            PulsarClient client, String topic, String subscription, SubscriptionType type) throws Exception {
        return client.newConsumer().topic(topic).subscriptionName(subscription).subscriptionType(type).subscribe();
    }

    /** Sends messages that are as old as {@code age} by the clock of their producer. */
    private static List<MessageId> send(CaseRun run, String topic, Duration age, String... values) throws Exception {
        List<MessageId> ids = new ArrayList<>();
        try (PulsarClient client = PulsarClient.builder().serviceUrl(run.url())
                        .clock(Clock.offset(Clock.systemUTC(), age.negated())).build();
                Producer<String> producer =
                        client.newProducer(Schema.STRING).topic(topic).enableBatching(false).create()) {
            for (String value : values) {
                ids.add(producer.send(value));
            }
        }
        return ids;
    }

    private static long backlog(PulsarAdmin admin, String topic, String subscription) {
        try {
            return admin.topics().getStats(topic).getSubscriptions().get(subscription).getMsgBacklog();
        } catch (PulsarAdminException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private static String next(Consumer<String> consumer) throws Exception {
        Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        return message == null ? "none" : message.getValue();
    }

    private static void timeToLive(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String base = "persistent://" + namespace + "/";
        for (String name : List.of("kept", "t")) {
            admin.topics().createNonPartitionedTopic(base + name);
            admin.topics().createSubscription(base + name, "absent", MessageId.earliest);
            send(run, base + name, Duration.ofHours(1), "old 0", "old 1", "old 2");
            send(run, base + name, Duration.ZERO, "young");
        }
        run.fact("unset", String.valueOf(admin.namespaces().getNamespaceMessageTTL(namespace)));
        admin.topicPolicies().setMessageTTL(base + "kept", 2 * 3600);
        admin.namespaces().setNamespaceMessageTTL(namespace, TTL_S);
        run.fact("set", admin.namespaces().getNamespaceMessageTTL(namespace));
        run.fact("expired", until(() -> backlog(admin, base + "t", "absent") == 1));
        run.fact("kept_by_topic", backlog(admin, base + "kept", "absent"));
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING).topic(base + "t")
                .subscriptionName("absent").subscribe());
        run.fact("first", next(consumer));
        admin.namespaces().removeNamespaceMessageTTL(namespace);
        run.fact("removed", String.valueOf(admin.namespaces().getNamespaceMessageTTL(namespace)));
    }

    private static void expired(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        for (String subscription : List.of("one", "other", "by-id", "before-id")) {
            admin.topics().createSubscription(topic, subscription, MessageId.earliest);
        }
        List<MessageId> ids = send(run, topic, Duration.ofHours(1), "old 0", "old 1", "old 2");
        send(run, topic, Duration.ZERO, "young");
        admin.topics().expireMessages(topic, "by-id", ids.get(1), false);
        until(() -> backlog(admin, topic, "by-id") < 4);
        run.fact("left_by_id", backlog(admin, topic, "by-id"));
        admin.topics().expireMessages(topic, "before-id", ids.get(1), true);
        until(() -> backlog(admin, topic, "before-id") < 4);
        run.fact("left_excluded", backlog(admin, topic, "before-id"));
        admin.topics().expireMessages(topic, "one", TTL_S);
        run.fact("of_one", until(() -> backlog(admin, topic, "one") == 1));
        run.fact("of_the_other", backlog(admin, topic, "other"));
        admin.topics().expireMessagesForAllSubscriptions(topic, TTL_S);
        run.fact("of_all", until(() -> backlog(admin, topic, "other") == 1 && backlog(admin, topic, "by-id") == 1));
    }

    /** Acknowledged messages of a closed ledger stay where a policy keeps them. */
    private static void retention(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String base = "persistent://" + namespace + "/";
        admin.namespaces().setRetention(namespace, new RetentionPolicies(60, 100));
        RetentionPolicies shown = admin.namespaces().getRetention(namespace);
        run.fact("shown", shown.getRetentionTimeInMinutes() + " " + shown.getRetentionSizeInMB());
        for (String name : List.of("kept", "dropped")) {
            String topic = base + name;
            admin.topics().createNonPartitionedTopic(topic);
            admin.topics().createSubscription(topic, "s", MessageId.earliest);
            send(run, topic, Duration.ZERO, "m0", "m1", "m2");
            if (name.equals("dropped")) {
                admin.topicPolicies().setRetention(topic, new RetentionPolicies(0, 0));
                run.fact("of_topic", until(() -> ofTopic(admin, topic)));
            }
            admin.topics().skipAllMessages(topic, "s");
            admin.topics().unload(topic);
            send(run, topic, Duration.ZERO, "m3");
            admin.topics().trimTopic(topic);
        }
        run.fact("dropped", until(() -> firstOf(client, base + "dropped").equals("m3")));
        run.fact("kept", firstOf(client, base + "kept"));
    }

    private static boolean ofTopic(PulsarAdmin admin, String topic) {
        try {
            RetentionPolicies policy = admin.topicPolicies().getRetention(topic);
            return policy != null && policy.getRetentionSizeInMB() == 0;
        } catch (PulsarAdminException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private static String firstOf(PulsarClient client, String topic) {
        try (Reader<String> reader = client.newReader(Schema.STRING).topic(topic)
                .startMessageId(MessageId.earliest).create()) {
            Message<String> message = reader.readNext(LIMIT_MS, TimeUnit.MILLISECONDS);
            return message == null ? "none" : message.getValue();
        } catch (IOException failure) {
            throw new IllegalStateException(failure);
        }
    }
}
