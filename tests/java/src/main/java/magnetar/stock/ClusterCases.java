package magnetar.stock;

import static magnetar.stock.AdminCases.admin;

import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.pulsar.client.admin.Namespaces;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.admin.TopicPolicies;
import org.apache.pulsar.common.policies.data.ClusterData;
import org.apache.pulsar.common.policies.data.DispatchRate;
import org.apache.pulsar.common.policies.data.TenantInfo;

/** Clusters, and the lists that name them, as the admin library sets and shows them. */
final class ClusterCases {
    private ClusterCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("clusters", ClusterCases::clusters);
        cases.put("cluster_lists", ClusterCases::lists);
    }

    /** A call of the admin library. */
    private interface Call {
        void run() throws Exception;
    }

    private static String outcome(Call call) throws Exception {
        try {
            call.run();
            return "done";
        } catch (PulsarAdminException refusal) {
            return String.valueOf(refusal.getStatusCode());
        }
    }

    /** Sets a namespace's clusters: with a third parameter, that partitions are to be compared, from 5.0 on. */
    private static void replicate(PulsarAdmin admin, String namespace, Set<String> clusters) throws Exception {
        for (Method each : Namespaces.class.getMethods()) {
            if (each.getName().equals("setNamespaceReplicationClusters")) {
                Object[] arguments = each.getParameterCount() == 2
                        ? new Object[] {namespace, clusters} : new Object[] {namespace, clusters, false};
                try {
                    each.invoke(admin.namespaces(), arguments);
                    return;
                } catch (InvocationTargetException failure) {
                    throw (Exception) failure.getCause();
                }
            }
        }
        throw new NoSuchMethodException("setNamespaceReplicationClusters");
    }

    private static ClusterData data(String host) {
        return ClusterData.builder().serviceUrl("http://" + host + ":8080")
                .brokerServiceUrl("pulsar://" + host + ":6650").build();
    }

    private static void clusters(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String local = admin.namespaces().getNamespaceReplicationClusters("public/default").get(0);
        String east = run.localName() + "-east";
        String south = run.localName() + "-south";
        ClusterData full = ClusterData.builder().serviceUrl("http://east:8080").serviceUrlTls("https://east:8443")
                .brokerServiceUrl("pulsar://east:6650").brokerServiceUrlTls("pulsar+ssl://east:6651")
                .authenticationPlugin("org.apache.pulsar.client.impl.auth.AuthenticationToken")
                .authenticationParameters("token:secret").brokerClientTlsEnabled(true)
                .brokerClientTrustCertsFilePath("/etc/ca.pem").listenerName("external").build();
        run.fact("unknown", outcome(() -> admin.clusters().getCluster(east)));
        admin.clusters().createCluster(east, full);
        run.closing(() -> outcome(() -> admin.clusters().deleteCluster(east)));
        ClusterData shown = admin.clusters().getCluster(east);
        run.fact("shown", full.getServiceUrlTls().equals(shown.getServiceUrlTls())
                && full.getBrokerServiceUrlTls().equals(shown.getBrokerServiceUrlTls())
                && full.getAuthenticationPlugin().equals(shown.getAuthenticationPlugin())
                && full.getAuthenticationParameters().equals(shown.getAuthenticationParameters())
                && full.getBrokerClientTrustCertsFilePath().equals(shown.getBrokerClientTrustCertsFilePath())
                && full.getListenerName().equals(shown.getListenerName()) && shown.isBrokerClientTlsEnabled());
        run.fact("listed", admin.clusters().getClusters().containsAll(List.of(local, east)));
        run.fact("again", outcome(() -> admin.clusters().createCluster(east, full)));
        admin.clusters().updateCluster(east, data("moved"));
        run.fact("moved", admin.clusters().getCluster(east).getBrokerServiceUrl());
        run.fact("wrong_url", outcome(() -> admin.clusters().createCluster(south,
                ClusterData.builder().serviceUrl("http://s").brokerServiceUrl("http://south:6650").build())));
        run.fact("wrong_name", outcome(() -> admin.clusters().createCluster("a b", full)));
        run.fact("unknown_peer", outcome(() -> admin.clusters().updatePeerClusterNames(east,
                new LinkedHashSet<>(Set.of(south)))));
        admin.clusters().createCluster(south, data("south"));
        run.closing(() -> outcome(() -> admin.clusters().deleteCluster(south)));
        admin.clusters().updatePeerClusterNames(south, new LinkedHashSet<>(Set.of(east)));
        run.fact("peers", List.copyOf(admin.clusters().getPeerClusterNames(south)).equals(List.of(east)));
        admin.clusters().deleteCluster(south);
        admin.clusters().deleteCluster(east);
        run.fact("deleted", outcome(() -> admin.clusters().getCluster(east)));
        run.fact("deleted_again", outcome(() -> admin.clusters().deleteCluster(east)));
        run.fact("left", admin.clusters().getClusters().contains(east));
    }

    private static void lists(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String local = admin.namespaces().getNamespaceReplicationClusters("public/default").get(0);
        String east = run.localName() + "-east";
        String south = run.localName() + "-south";
        admin.clusters().createCluster(east, data("east"));
        admin.clusters().createCluster(south, data("south"));
        Set<String> both = new TreeSet<>(Set.of(local, east));
        Set<String> all = new TreeSet<>(Set.of(local, east, south));
        String tenant = run.localName();
        run.fact("unknown_of_tenant", outcome(() -> admin.tenants().createTenant(tenant,
                TenantInfo.builder().allowedClusters(Set.of(local, "unknown")).build())));
        admin.tenants().createTenant(tenant, TenantInfo.builder().allowedClusters(both).build());
        String namespace = tenant + "/n";
        admin.namespaces().createNamespace(namespace, both);
        run.fact("created", both.equals(Set.copyOf(admin.namespaces().getNamespaceReplicationClusters(namespace)))
                && both.equals(admin.namespaces().getPolicies(namespace).replication_clusters));
        run.fact("deleted_in_use", outcome(() -> admin.clusters().deleteCluster(east)));
        run.fact("not_of_tenant",
                outcome(() -> replicate(admin, namespace, all)));
        admin.tenants().updateTenant(tenant, TenantInfo.builder().allowedClusters(all).build());
        admin.namespaces().setNamespaceAllowedClusters(namespace, both);
        run.fact("allowed", both.equals(Set.copyOf(admin.namespaces().getNamespaceAllowedClusters(namespace))));
        run.fact("not_allowed",
                outcome(() -> replicate(admin, namespace, all)));
        run.fact("too_few_allowed",
                outcome(() -> admin.namespaces().setNamespaceAllowedClusters(namespace, Set.of(local))));
        run.fact("empty",
                outcome(() -> replicate(admin, namespace, Set.of())));
        ofTopic(run, admin, namespace, local, east);
        DispatchRate rate = DispatchRate.builder().dispatchThrottlingRateInMsg(5).dispatchThrottlingRateInByte(6L)
                .ratePeriodInSecond(1).build();
        admin.namespaces().setReplicatorDispatchRate(namespace, rate);
        run.fact("rate", rate.equals(admin.namespaces().getReplicatorDispatchRate(namespace)));
        admin.namespaces().removeReplicatorDispatchRate(namespace);
        run.fact("rate_removed", admin.namespaces().getReplicatorDispatchRate(namespace) == null);
        replicate(admin, namespace, Set.of(local));
        run.fact("alone", List.of(local).equals(admin.namespaces().getNamespaceReplicationClusters(namespace)));
    }

    private static void ofTopic(CaseRun run, PulsarAdmin admin, String namespace, String local, String east)
            throws Exception {
        String topic = "persistent://" + namespace + "/x";
        admin.topics().createNonPartitionedTopic(topic);
        TopicPolicies policies = admin.topicPolicies();
        run.fact("topic_unset", policies.getReplicationClusters(topic, false) == null);
        run.fact("topic_applied", Set.of(local, east).equals(policies.getReplicationClusters(topic, true)));
        policies.setReplicationClusters(topic, List.of(local)).get();
        run.fact("topic", Set.of(local).equals(policies.getReplicationClusters(topic, false))
                && Set.of(local).equals(policies.getReplicationClusters(topic, true)));
        policies.removeReplicationClusters(topic);
        admin.topics().setReplicationClusters(topic, List.of(local, east));
        run.fact("older", Set.of(local, east).equals(admin.topics().getReplicationClusters(topic, false)));
        admin.topics().removeReplicationClusters(topic);
        run.fact("topic_removed", policies.getReplicationClusters(topic, false) == null);
        run.fact("topic_without_local", outcome(() -> admin.topics().setReplicationClusters(topic, List.of(east))));
        TopicPolicies global = admin.topicPolicies(true);
        global.setReplicationClusters(topic, List.of(local, east)).get();
        run.fact("global", Set.of(local, east).equals(global.getReplicationClusters(topic, false)));
        global.removeReplicationClusters(topic);
        for (TopicPolicies level : List.of(policies, global)) {
            DispatchRate rate = DispatchRate.builder().dispatchThrottlingRateInMsg(7).dispatchThrottlingRateInByte(8L)
                    .ratePeriodInSecond(1).build();
            level.setReplicatorDispatchRate(topic, rate);
            String of = level == global ? "global_rate" : "topic_rate";
            run.fact(of, rate.equals(level.getReplicatorDispatchRate(topic))
                    && rate.equals(level.getReplicatorDispatchRate(topic, true)));
            level.removeReplicatorDispatchRate(topic);
            run.fact(of + "_removed", level.getReplicatorDispatchRate(topic) == null);
        }
    }
}
