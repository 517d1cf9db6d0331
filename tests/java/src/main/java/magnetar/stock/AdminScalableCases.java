package magnetar.stock;

import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.ScalableTopics;
import org.apache.pulsar.common.policies.data.ScalableSubscriptionType;

/** Scalable topics by the library of {@code pulsar-admin}, which 4.x does not have. */
final class AdminScalableCases {
    private AdminScalableCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("admin_scalable", AdminScalableCases::walk);
        cases.put("admin_scalable_calls", AdminScalableCases::calls);
        cases.put("admin_segments", AdminScalableCases::segments);
    }

    /** Makes a topic, splits and merges it, and deletes it again. */
    private static void walk(CaseRun run) throws Exception {
        PulsarAdmin admin = AdminCases.admin(run);
        ScalableTopics topics = admin.scalableTopics();
        String topic = "topic://public/default/" + run.localName();
        topics.createScalableTopic(topic, 2, Map.of("team", run.localName()));
        run.fact("listed", topics.listScalableTopics("public/default").contains(topic));
        run.fact("by_properties", topics.listScalableTopicsByProperties(
                "public/default", Map.of("team", run.localName())).equals(List.of(topic)));
        topics.createSubscription(topic, "sub", ScalableSubscriptionType.STREAM);
        topics.splitSegment(topic, 0);
        topics.mergeSegments(topic, 2, 3);
        run.fact("segments", topics.getMetadata(topic).getSegments().size());
        run.fact("subscriptions", topics.getStats(topic).getSubscriptions().keySet());
        topics.clearBacklog(topic, "sub");
        topics.deleteSubscription(topic, "sub");
        topics.deleteScalableTopic(topic, true);
        run.fact("deleted", AdminCases.outcome(() -> topics.getMetadata(topic)));
    }

    /** Makes a subscription on one segment of two, and seals that segment. */
    private static void segments(CaseRun run) throws Exception {
        ScalableTopics topics = AdminCases.admin(run).scalableTopics();
        String name = "public/default/" + run.localName();
        topics.createScalableTopic("topic://" + name, 2);
        String segment = name + "/0000-7fff-0";
        topics.createSegment("segment://" + segment, List.of("made"));
        topics.terminateSegment("segment://" + segment);
        run.fact("segment", segment);
    }

    /** What the case's role gets for each call. */
    private static void calls(CaseRun run) throws Exception {
        ScalableTopics topics = AdminCases.admin(run).scalableTopics();
        String topic = run.scalableTopic(2).name();
        run.fact("list", AdminCases.outcome(() -> topics.listScalableTopics("public/default")));
        run.fact("create", AdminCases.outcome(() -> topics.createScalableTopic(topic + "-new", 1)));
        run.fact("layout", AdminCases.outcome(() -> topics.getMetadata(topic)));
        run.fact("missing", AdminCases.outcome(() -> topics.getMetadata(topic + "-missing")));
        run.fact("statistics", AdminCases.outcome(() -> topics.getStats(topic)));
        run.fact("subscription", AdminCases.outcome(
                () -> topics.createSubscription(topic, "sub", ScalableSubscriptionType.STREAM)));
        run.fact("split", AdminCases.outcome(() -> topics.splitSegment(topic, 0)));
        run.fact("delete", AdminCases.outcome(() -> topics.deleteScalableTopic(topic, true)));
    }
}
