package magnetar.stock;

import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.pulsar.client.admin.GrantTopicPermissionOptions;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminBuilder;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.admin.RevokeTopicPermissionOptions;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.common.policies.data.AuthAction;
import org.apache.pulsar.common.policies.data.SubscriptionAuthMode;
import org.apache.pulsar.common.policies.data.TenantInfo;

/** The library of {@code pulsar-admin} over HTTPS: tenants, namespaces, permissions, topics. */
final class AdminCases {
    private static final Set<AuthAction> BOTH = Set.of(AuthAction.produce, AuthAction.consume);

    private AdminCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("admin_walk", AdminCases::walk);
        cases.put("admin_calls", AdminCases::calls);
    }

    static PulsarAdmin admin(CaseRun run) throws Exception {
        PulsarAdminBuilder builder = PulsarAdmin.builder()
                .serviceHttpUrl(run.arg("web", ""))
                .tlsTrustCertsFilePath(run.arg("trust", ""))
                .enableTlsHostnameVerification(true);
        if (!run.arg("authPlugin", "").isEmpty()) {
            builder.authentication(run.arg("authPlugin", ""), run.arg("authParams", ""));
        }
        return run.closing(builder.build());
    }

    /** Makes a tenant with all that belongs to it, grants and revokes, and deletes it again. */
    private static void walk(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String tenant = run.localName();
        String namespace = tenant + "/work";
        admin.tenants().createTenant(tenant, TenantInfo.builder()
                .adminRoles(Set.of("keeper"))
                .allowedClusters(new TreeSet<>(admin.clusters().getClusters()))
                .build());
        run.fact("admin_roles", admin.tenants().getTenantInfo(tenant).getAdminRoles());
        admin.namespaces().createNamespace(namespace);
        run.fact("namespaces", admin.namespaces().getNamespaces(tenant).equals(List.of(namespace)));
        namespacePermissions(run, admin, namespace);
        topicPermissions(run, admin, namespace);
        String one = "persistent://" + namespace + "/one";
        String many = "persistent://" + namespace + "/many";
        admin.topics().createPartitionedTopic(many, 3);
        run.fact("partitions", admin.topics().getPartitionedTopicMetadata(many).partitions);
        run.fact("topics", admin.topics().getList(namespace).contains(one));
        run.fact("partitioned_topics", admin.topics().getPartitionedTopicList(namespace).equals(List.of(many)));
        admin.topics().createSubscription(one, "sub", MessageId.earliest);
        run.fact("subscriptions", admin.topics().getStats(one).getSubscriptions().keySet());
        admin.topics().deletePartitionedTopic(many);
        admin.topics().delete(one, true);
        admin.namespaces().deleteNamespace(namespace);
        admin.tenants().deleteTenant(tenant);
        run.fact("deleted", !admin.tenants().getTenants().contains(tenant));
    }

    private static void namespacePermissions(CaseRun run, PulsarAdmin admin, String namespace) throws Exception {
        admin.namespaces().grantPermissionOnNamespace(namespace, "alice", BOTH);
        admin.namespaces().grantPermissionOnNamespace(namespace, "bob", Set.of(AuthAction.consume));
        run.fact("granted", sorted(admin.namespaces().getPermissions(namespace)));
        admin.namespaces().revokePermissionsOnNamespace(namespace, "alice");
        run.fact("left", sorted(admin.namespaces().getPermissions(namespace)));
        admin.namespaces().grantPermissionOnSubscription(namespace, "sub", Set.of("alice", "bob"));
        run.fact("of_subscription", sorted(admin.namespaces().getPermissionOnSubscription(namespace)));
        admin.namespaces().revokePermissionOnSubscription(namespace, "sub", "alice");
        run.fact("of_subscription_left", sorted(admin.namespaces().getPermissionOnSubscription(namespace)));
        admin.namespaces().setSubscriptionAuthMode(namespace, SubscriptionAuthMode.Prefix);
        run.fact("mode", admin.namespaces().getSubscriptionAuthMode(namespace).name());
    }

    private static void topicPermissions(CaseRun run, PulsarAdmin admin, String namespace) throws Exception {
        String one = "persistent://" + namespace + "/one";
        admin.topics().createNonPartitionedTopic(one);
        admin.topics().grantPermission(one, "carol", Set.of(AuthAction.produce));
        run.fact("of_topic", sorted(admin.topics().getPermissions(one)));
        admin.topics().revokePermissions(one, "carol");
        run.fact("of_topic_left", sorted(admin.topics().getPermissions(one)));
        admin.namespaces().grantPermissionOnTopics(List.of(
                GrantTopicPermissionOptions.builder().topic(one).role("dave").actions(BOTH).build()));
        run.fact("of_topics", sorted(admin.topics().getPermissions(one)));
        admin.namespaces().revokePermissionOnTopics(List.of(
                RevokeTopicPermissionOptions.builder().topic(one).role("dave").build()));
        run.fact("of_topics_left", sorted(admin.topics().getPermissions(one)));
    }

    private static <T> Map<String, Set<T>> sorted(Map<String, Set<T>> permissions) {
        Map<String, Set<T>> sorted = new TreeMap<>();
        permissions.forEach((name, values) -> sorted.put(name, new TreeSet<>(values)));
        return sorted;
    }

    /** What the case's role gets for each call, on things that exist and on things that do not. */
    private static void calls(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String here = "public/default";
        String topic = "persistent://public/default/" + run.localName();
        Map<String, Call> calls = new LinkedHashMap<>();
        calls.put("tenants", () -> admin.tenants().getTenants());
        calls.put("tenant", () -> admin.tenants().getTenantInfo("public"));
        calls.put("missing tenant", () -> admin.tenants().getTenantInfo("missing"));
        calls.put("new tenant", () -> admin.tenants().createTenant("new", TenantInfo.builder().build()));
        calls.put("namespaces", () -> admin.namespaces().getNamespaces("public"));
        calls.put("missing namespaces", () -> admin.namespaces().getNamespaces("missing"));
        calls.put("new namespace", () -> admin.namespaces().createNamespace("public/new"));
        calls.put("permissions", () -> admin.namespaces().getPermissions(here));
        calls.put("grant", () -> admin.namespaces().grantPermissionOnNamespace(here, "stranger", BOTH));
        calls.put("topics", () -> admin.topics().getList(here));
        calls.put("new topic", () -> admin.topics().createNonPartitionedTopic(topic));
        calls.put("grant on topic", () -> admin.topics().grantPermission(topic, "stranger", BOTH));
        calls.put("statistics", () -> admin.topics().getStats(topic));
        calls.put("lookup", () -> admin.lookups().lookupTopic(topic));
        for (Map.Entry<String, Call> each : calls.entrySet()) {
            run.fact(each.getKey(), outcome(each.getValue()));
        }
    }

    static String outcome(Call call) throws Exception {
        try {
            call.run();
            return "done";
        } catch (PulsarAdminException failure) {
            return failure.getClass().getSimpleName() + " " + failure.getStatusCode();
        }
    }

    /** A call of the library. */
    @FunctionalInterface
    interface Call {
        void run() throws Exception;
    }
}
