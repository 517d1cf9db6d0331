package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.namespace;
import static magnetar.stock.V4Clients.until;

import java.lang.reflect.Method;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.Namespaces;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.CryptoKeyReader;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.PersistencePolicies;
import org.apache.pulsar.common.policies.data.SchemaAutoUpdateCompatibilityStrategy;
import org.apache.pulsar.common.policies.data.SchemaCompatibilityStrategy;

/** Policies of a namespace of the case's own, as v4 applications and their administrators meet them. */
final class V4Policies {
    private static final int OPERATION_TIMEOUT_S = 10;
    private static final int LIMIT_MS = 15_000;

    private V4Policies() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_max_topics", V4Policies::maxTopics);
        cases.put("v4_encryption_required", V4Policies::encryptionRequired);
        cases.put("v4_schema_policies", V4Policies::schemaPolicies);
        cases.put("v4_persistence", V4Policies::persistence);
        cases.put("v4_namespace_operations", V4Policies::namespaceOperations);
    }

    private static String outcome(Callable<?> call) {
        try {
            call.call();
            return "done";
        } catch (PulsarClientException refusal) {
            return refusal.getClass().getSimpleName();
        } catch (PulsarAdminException refusal) {
            return String.valueOf(refusal.getStatusCode());
        } catch (Exception other) {
            return other.toString();
        }
    }

    private static String outcome(CaseRun run, Opening opening) {
        return outcome(() -> run.closing(opening.open()));
    }

    /** Opens a client's part. */
    private interface Opening {
        AutoCloseable open() throws Exception;
    }

    private static void maxTopics(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String prefix = "persistent://" + namespace + "/";
        run.fact("unset", admin.namespaces().getMaxTopicsPerNamespace(namespace));
        admin.namespaces().setMaxTopicsPerNamespace(namespace, 4);
        run.fact("maximum", admin.namespaces().getMaxTopicsPerNamespace(namespace));
        admin.topics().createPartitionedTopic(prefix + "p", 2);
        admin.topics().createNonPartitionedTopic(prefix + "x");
        run.fact("grow", outcome(() -> {
            admin.topics().updatePartitionedTopic(prefix + "p", 4);
            return null;
        }));
        run.fact("automatic", outcome(run, () -> client.newProducer().topic(prefix + "y").create()));
        run.fact("partitioned", outcome(() -> {
            admin.topics().createPartitionedTopic(prefix + "q", 1);
            return null;
        }));
        run.fact("unpartitioned", outcome(() -> {
            admin.topics().createNonPartitionedTopic(prefix + "z");
            return null;
        }));
        run.fact("producer", outcome(run, () -> client.newProducer().topic(prefix + "z").create()));
        run.fact("consumer",
                outcome(run, () -> client.newConsumer().topic(prefix + "z").subscriptionName("s").subscribe()));
        run.fact("existing", outcome(run, () -> client.newProducer().topic(prefix + "p").create()));
        admin.topics().delete(prefix + "x", true);
        run.fact("after_delete", outcome(run, () -> client.newProducer().topic(prefix + "z").create()));
        admin.namespaces().removeMaxTopicsPerNamespace(namespace);
        run.fact("without", outcome(run, () -> client.newProducer().topic(prefix + "w").create()));
    }

    private static void encryptionRequired(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        CryptoKeyReader keys = new RsaKeyReader();
        Producer<String> plain = run.closing(client.newProducer(Schema.STRING).topic(topic)
                .sendTimeout(5, TimeUnit.SECONDS).create());
        plain.send("before");
        run.fact("before", admin.namespaces().getEncryptionRequiredStatus(namespace));
        admin.namespaces().setEncryptionRequiredStatus(namespace, true);
        run.fact("after", admin.namespaces().getEncryptionRequiredStatus(namespace));
        run.fact("closed", until(() -> !plain.isConnected()));
        run.fact("new", outcome(run, () -> client.newProducer(Schema.STRING).topic(topic).create()));
        Consumer<String> consumer = run.closing(client.newConsumer(Schema.STRING).topic(topic)
                .subscriptionName("s").cryptoKeyReader(keys)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe());
        Producer<String> encrypting = run.closing(client.newProducer(Schema.STRING).topic(topic)
                .addEncryptionKey("key").cryptoKeyReader(keys).create());
        encrypting.send("secret");
        for (String wanted : Arrays.asList("before", "secret")) {
            Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            run.fact("received_" + wanted, message != null && message.getValue().equals(wanted));
        }
        run.fact("stuck", outcome(() -> plain.send("late")));
        admin.namespaces().setEncryptionRequiredStatus(namespace, false);
        run.fact("back", until(plain::isConnected));
        run.fact("again", outcome(() -> plain.send("again")));
    }

    /** Versions of 5 have a third argument, for replicators. */
    private static void allowAutoUpdate(PulsarAdmin admin, String namespace, boolean allowed) throws Exception {
        for (Method method : Namespaces.class.getMethods()) {
            if (method.getName().equals("setIsAllowAutoUpdateSchema")) {
                Object[] arguments = {namespace, allowed, null};
                method.invoke(admin.namespaces(), Arrays.copyOf(arguments, method.getParameterCount()));
                return;
            }
        }
        throw new IllegalStateException("no setIsAllowAutoUpdateSchema");
    }

    /** Sets persistence policies of one copy, which any broker can keep, and reads them at each level. */
    private static void persistence(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        run.fact("unset", admin.namespaces().getPersistence(namespace) == null
                && admin.topicPolicies().getPersistence(topic) == null);
        run.fact("of_broker", shown(admin.topicPolicies().getPersistence(topic, true)));
        admin.namespaces().setPersistence(namespace, new PersistencePolicies(1, 1, 1, 0.5));
        run.fact("of_namespace", shown(admin.namespaces().getPersistence(namespace)));
        run.fact("inherited", shown(admin.topicPolicies().getPersistence(topic, true)));
        admin.topicPolicies().setPersistence(topic, new PersistencePolicies(1, 1, 1, 2.0));
        run.fact("of_topic_set", until(() -> shown(policy(admin, topic, false)).equals("1 1 1 2.0")));
        run.fact("applied", shown(policy(admin, topic, true)));
        try (Producer<byte[]> producer = client(run, OPERATION_TIMEOUT_S).newProducer().topic(topic).create()) {
            run.fact("sent", producer.send(new byte[] {1}) != null);
        }
        run.fact("impossible", outcome(() -> {
            admin.namespaces().setPersistence(namespace, new PersistencePolicies(1, 2, 2, 0.0));
            return null;
        }));
        run.fact("more_copies", outcome(() -> {
            admin.namespaces().setPersistence(namespace, new PersistencePolicies(2, 2, 2, 0.0));
            return null;
        }));
        admin.topicPolicies().removePersistence(topic);
        run.fact("of_topic_removed", until(() -> policy(admin, topic, false) == null));
        admin.topics().setPersistence(topic, new PersistencePolicies(1, 1, 1, 3.0));
        run.fact("older_set", until(() -> shown(policy(admin, topic, false)).equals("1 1 1 3.0")));
        run.fact("older", List.of(shown(admin.topics().getPersistence(topic)),
                shown(admin.topics().getPersistence(topic, true))));
        admin.topics().removePersistence(topic);
        run.fact("older_removed", until(() -> policy(admin, topic, false) == null));
        admin.namespaces().removePersistence(namespace);
        run.fact("removed", admin.namespaces().getPersistence(namespace) == null);
    }

    private static PersistencePolicies policy(PulsarAdmin admin, String topic, boolean applied) {
        try {
            return admin.topicPolicies().getPersistence(topic, applied);
        } catch (PulsarAdminException refusal) {
            throw new IllegalStateException(refusal);
        }
    }

    private static String shown(PersistencePolicies policy) {
        return policy == null ? "none" : policy.getBookkeeperEnsemble() + " " + policy.getBookkeeperWriteQuorum()
                + " " + policy.getBookkeeperAckQuorum() + " " + policy.getManagedLedgerMaxMarkDeleteRate();
    }

    private static void schemaPolicies(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createNonPartitionedTopic(topic);
        run.fact("automatic", admin.namespaces().getIsAllowAutoUpdateSchema(namespace));
        allowAutoUpdate(admin, namespace, false);
        run.fact("automatic_set", admin.namespaces().getIsAllowAutoUpdateSchema(namespace));
        run.fact("unknown_producer", outcome(run, () -> client.newProducer(Schema.STRING).topic(topic).create()));
        run.fact("unknown_consumer", outcome(run,
                () -> client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s").subscribe()));
        admin.schemas().createSchema(topic, Schema.STRING.getSchemaInfo());
        run.fact("known_producer", outcome(run, () -> client.newProducer(Schema.STRING).topic(topic).create()));
        run.fact("validated", admin.namespaces().getSchemaValidationEnforced(namespace));
        run.fact("of_topic", admin.topics().getSchemaValidationEnforced(topic, false));
        run.fact("without_schema", outcome(run, () -> client.newProducer().topic(topic).create()));
        admin.topics().setSchemaValidationEnforced(topic, true);
        run.fact("of_topic_set", admin.topics().getSchemaValidationEnforced(topic, false));
        run.fact("without_schema_enforced", outcome(run, () -> client.newProducer().topic(topic).create()));
        admin.topics().setSchemaValidationEnforced(topic, false);
        admin.namespaces().setSchemaValidationEnforced(namespace, true);
        run.fact("validated_set", admin.namespaces().getSchemaValidationEnforced(namespace, true));
        allowAutoUpdate(admin, namespace, true);
        admin.namespaces().setSchemaAutoUpdateCompatibilityStrategy(namespace,
                SchemaAutoUpdateCompatibilityStrategy.AutoUpdateDisabled);
        run.fact("older", String.valueOf(admin.namespaces().getSchemaAutoUpdateCompatibilityStrategy(namespace)));
        run.fact("strategy", String.valueOf(admin.topicPolicies().getSchemaCompatibilityStrategy(topic, true)));
        run.fact("incompatible", outcome(run, () -> client.newProducer(Schema.INT32).topic(topic).create()));
        admin.topicPolicies().setSchemaCompatibilityStrategy(topic, SchemaCompatibilityStrategy.ALWAYS_COMPATIBLE);
        run.fact("strategy_set", String.valueOf(admin.topicPolicies().getSchemaCompatibilityStrategy(topic, false)));
        run.fact("compatible", outcome(run, () -> client.newProducer(Schema.INT32).topic(topic).create()));
        admin.topicPolicies().removeSchemaCompatibilityStrategy(topic);
        run.fact("removed", admin.topicPolicies().getSchemaCompatibilityStrategy(topic, false) == null);
    }

    private static void namespaceOperations(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run, OPERATION_TIMEOUT_S);
        String namespace = namespace(run, admin);
        String topic = "persistent://" + namespace + "/t";
        admin.topics().createPartitionedTopic(topic, 2);
        admin.topics().createMissedPartitions(topic);
        for (String subscription : Arrays.asList("a", "b")) {
            admin.topics().createSubscription(topic, subscription, MessageId.earliest);
        }
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
            for (int i = 0; i < 4; i++) {
                producer.send(new byte[1]);
            }
        }
        admin.namespaces().clearNamespaceBacklogForSubscription(namespace, "a");
        run.fact("cleared", backlog(admin, topic, "a"));
        run.fact("other", backlog(admin, topic, "b"));
        admin.namespaces().clearNamespaceBacklog(namespace);
        run.fact("all", backlog(admin, topic, "b"));
        Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("b")
                .subscriptionType(SubscriptionType.Shared).replicateSubscriptionState(run.flag("replicated")).subscribe();
        run.fact("replicated", admin.topics().getReplicatedSubscriptionStatus(topic, "b").values());
        run.fact("shown", admin.topics().getPartitionedStats(topic, false).getSubscriptions().get("b").isReplicated());
        admin.topics().setReplicatedSubscriptionStatus(topic, "b", false);
        run.fact("reset", admin.topics().getReplicatedSubscriptionStatus(topic, "b").values());
        run.fact("busy", outcome(() -> {
            admin.namespaces().unsubscribeNamespace(namespace, "b");
            return null;
        }));
        consumer.close();
        admin.namespaces().unsubscribeNamespace(namespace, "a");
        admin.namespaces().unsubscribeNamespace(namespace, "b");
        run.fact("left", admin.topics().getSubscriptions(topic));
        admin.namespaces().setProperties(namespace, Collections.singletonMap("owner", "billing"));
        admin.namespaces().setProperty(namespace, "tier", "1");
        run.fact("properties", admin.namespaces().getProperties(namespace));
        run.fact("property", admin.namespaces().getProperty(namespace, "tier"));
        run.fact("removed", admin.namespaces().removeProperty(namespace, "tier"));
        run.fact("absent", admin.namespaces().getProperty(namespace, "tier") == null);
        admin.namespaces().clearProperties(namespace);
        run.fact("no_properties", admin.namespaces().getProperties(namespace));
    }

    private static long backlog(PulsarAdmin admin, String topic, String subscription) throws Exception {
        return admin.topics().getPartitionedStats(topic, false).getSubscriptions().get(subscription).getMsgBacklog();
    }
}
