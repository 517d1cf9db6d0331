package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.topic;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.ListTopicsOptions;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.admin.Topics;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.naming.TopicDomain;
import org.apache.pulsar.common.policies.data.AutoSubscriptionCreationOverride;
import org.apache.pulsar.common.policies.data.SubscriptionStats;
import org.apache.pulsar.common.policies.data.TopicStats;
import org.apache.pulsar.common.stats.AnalyzeSubscriptionBacklogResult;

/** Operations on whole topics and their subscriptions, by the admin library. */
final class V4TopicOperations {
    private static final String NAMESPACE = "public/default";
    private static final int MANY = 10_050;
    private static final int QUIET_MS = 500;
    private static final int LIMIT_MS = 15_000;

    private V4TopicOperations() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_backlog_operations", V4TopicOperations::backlogs);
        cases.put("v4_subscription_properties", V4TopicOperations::properties);
        cases.put("v4_listed_topics", V4TopicOperations::listed);
        cases.put("v4_overloads_of_partitions", V4TopicOperations::partitions);
        cases.put("v4_policies_of_subscriptions", V4TopicOperations::policies);
    }

    /** The case that needs the admin library of version 5, which goes on behind the last message by itself. */
    static void addLoopTo(Map<String, Case> cases) {
        cases.put("counted_backlog", V4TopicOperations::counted);
    }

    /** Ids of messages that are no batches. */
    private static List<MessageId> sent(PulsarClient client, String topic, int count) throws Exception {
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        List<MessageId> ids = new ArrayList<>();
        try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).enableBatching(false)
                .blockIfQueueFull(true).create()) {
            for (int i = 0; i < count; i++) {
                sends.add(producer.sendAsync("m" + i));
            }
            for (CompletableFuture<MessageId> each : sends) {
                ids.add(each.get());
            }
        }
        return ids;
    }

    private static String first(PulsarAdmin admin, String topic) throws Exception {
        List<Message<byte[]>> messages = admin.topics().peekMessages(topic, "s", 1);
        return messages.isEmpty() ? "nothing" : new String(messages.get(0).getValue());
    }

    private static List<Object> shown(AnalyzeSubscriptionBacklogResult found) {
        return List.of(found.getEntries(), found.getMessages(), found.getFilterAcceptedEntries(),
                found.getFilterRejectedEntries(), found.getMarkerMessages(), found.isAborted());
    }

    private static void backlogs(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String topic = topic(run);
        Topics topics = admin.topics();
        topics.createNonPartitionedTopic(topic);
        topics.createSubscription(topic, "s", MessageId.earliest);
        List<MessageId> ids = sent(client(run), topic, MANY);
        topics.resetCursor(topic, "s", ids.get(1), true);
        run.fact("after_reset_behind_the_second", first(admin, topic));
        run.fact("peeked", topics.peekMessages(topic, "s", 200).size());
        AnalyzeSubscriptionBacklogResult once = topics.analyzeSubscriptionBacklog(topic, "s", Optional.empty());
        run.fact("once", shown(once));
        run.fact("from_an_id",
                shown(topics.analyzeSubscriptionBacklog(topic, "s", Optional.of(ids.get(MANY - 3)))));
        run.fact("stored", topics.getInternalInfo(topic).contains("\"s\""));
        topics.truncate(topic);
        TopicStats stats = topics.getStats(topic);
        run.fact("truncated", List.of(stats.getSubscriptions().get("s").getMsgBacklog(), stats.getStorageSize()));
        boolean shown = false;
        for (PulsarAdmin broker : V4Brokers.each(run, admin)) {
            shown |= broker.brokerStats().getTopics().contains(topic);
        }
        run.fact("in_statistics_of_the_broker", shown);
        topics.createPartitionedTopic(topic + "-parts", 2);
        topics.createSubscription(topic + "-parts", "s", MessageId.earliest);
        sent(client(run), topic + "-parts", 4);
        topics.truncate(topic + "-parts");
        run.fact("partitions_truncated",
                topics.getPartitionedStats(topic + "-parts", false).getSubscriptions().get("s").getMsgBacklog());
    }

    private static void counted(CaseRun run) throws Exception {
        Topics topics = admin(run).topics();
        String topic = topic(run);
        topics.createNonPartitionedTopic(topic);
        topics.createSubscription(topic, "s", MessageId.earliest);
        List<MessageId> ids = sent(client(run), topic, MANY);
        run.fact("once", shown(topics.analyzeSubscriptionBacklog(topic, "s", Optional.empty())));
        run.fact("until_a_number", shown(topics.analyzeSubscriptionBacklog(topic, "s", Optional.empty(), MANY)));
        run.fact("until_the_end", shown(topics.analyzeSubscriptionBacklog(topic, "s", Optional.of(ids.get(1)),
                result -> false)));
        try {
            topics.getMessageIdByIndex(topic, 1);
        } catch (PulsarAdminException error) {
            run.fact("by_index", error.getMessage());
        }
    }

    private static void properties(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run);
        String topic = topic(run);
        Topics topics = admin.topics();
        topics.createPartitionedTopic(topic, 2);
        topics.createSubscription(topic, "s", MessageId.earliest, false, Map.of("team", "a"));
        run.fact("given", topics.getSubscriptionProperties(topic, "s"));
        topics.updateSubscriptionProperties(topic, "s", Map.of("owner", "b", "since", "2026"));
        run.fact("replaced", new TreeMap<>(topics.getSubscriptionProperties(topic, "s")));
        SubscriptionStats stats = topics.getStats(topic + "-partition-1").getSubscriptions().get("s");
        run.fact("in_statistics", new TreeMap<>(stats.getSubscriptionProperties()));
        client.newConsumer(Schema.STRING).topic(topic).subscriptionName("subscribed")
                .subscriptionProperties(Map.of("from", "a consumer")).subscribe().close();
        run.fact("of_a_consumer", topics.getSubscriptionProperties(topic, "subscribed"));
    }

    /** The names of this case's topics, without what is before them. */
    private static Set<String> own(CaseRun run, List<String> names) {
        Set<String> found = new TreeSet<>();
        for (String name : names) {
            String local = name.substring(name.lastIndexOf('/') + 1);
            if (local.startsWith(run.localName())) {
                found.add(name.substring(0, name.indexOf(':')) + local.substring(run.localName().length()));
            }
        }
        return found;
    }

    private static void listed(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run);
        String topic = topic(run);
        Topics topics = admin.topics();
        topics.createNonPartitionedTopic(topic);
        topics.createPartitionedTopic(topic + "-parts", 1);
        sent(client, topic + "-parts", 1);
        run.closing(client.newProducer(Schema.STRING).topic("non-" + topic).create());
        ListTopicsOptions withSystem = ListTopicsOptions.builder().includeSystemTopic(true).build();
        run.fact("persistent", own(run, topics.getList(NAMESPACE, TopicDomain.persistent)));
        run.fact("non_persistent", own(run, topics.getList(NAMESPACE, TopicDomain.non_persistent)));
        run.fact("with_options", own(run, topics.getList(NAMESPACE, TopicDomain.persistent, withSystem)));
        run.fact("with_a_query", own(run, topics.getList(NAMESPACE, TopicDomain.persistent,
                Map.<Topics.QueryParam, Object>of(Topics.QueryParam.Bundle, "0x00000000_0xffffffff"))));
        run.fact("partitioned", own(run, topics.getPartitionedTopicList(NAMESPACE, withSystem)));
        List<Long> counted = new ArrayList<>();
        for (TopicStats stats : List.of(topics.getStats(topic + "-parts-partition-0", true),
                topics.getStats(topic + "-parts-partition-0", true, true),
                topics.getStats(topic + "-parts-partition-0", true, true, true))) {
            counted.add(stats.getMsgInCounter());
        }
        run.fact("messages", counted);
        admin.namespaces().unload(NAMESPACE);
        run.fact("messages_since_unload", topics.getStats(topic + "-parts-partition-0").getMsgInCounter());
    }

    private static void partitions(CaseRun run) throws Exception {
        Topics topics = admin(run).topics();
        PulsarClient client = client(run);
        String topic = topic(run);
        List<Integer> counts = new ArrayList<>();
        topics.createPartitionedTopic(topic, 1);
        topics.updatePartitionedTopic(topic, 2, false);
        counts.add(topics.getPartitionedTopicMetadata(topic).partitions);
        topics.updatePartitionedTopic(topic, 3, false, true);
        counts.add(topics.getPartitionedTopicMetadata(topic).partitions);
        run.fact("partitions", counts);
        sent(client, topic, 6);
        run.fact("messages", topics.getPartitionedStats(topic, true, true, true, true).getMsgInCounter());
        Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s").subscribe();
        try {
            topics.deletePartitionedTopic(topic, false);
        } catch (PulsarAdminException error) {
            run.fact("refused", error.getStatusCode());
        }
        consumer.close();
        topics.deletePartitionedTopic(topic, true);
        run.fact("left", own(run, topics.getPartitionedTopicList(NAMESPACE)));
        topics.createPartitionedTopic(topic, 1);
        sent(client, topic, 1);
        topics.deletePartitionedTopic(topic, true, true);
        run.fact("left_again", own(run, topics.getPartitionedTopicList(NAMESPACE)));
        run.fact("partitions_left", own(run, topics.getList(NAMESPACE)));
    }

    private static boolean subscribes(PulsarClient client, String topic, String name) throws Exception {
        try {
            client.newConsumer(Schema.STRING).topic(topic).subscriptionName(name).subscribe().close();
            return true;
        } catch (PulsarClientException.SubscriptionNotFoundException
                 | PulsarClientException.TopicDoesNotExistException error) {
            return false;
        }
    }

    /** How many unacknowledged messages a Shared consumer gets. */
    private static int received(PulsarClient client, String topic) throws Exception {
        Set<String> found = new HashSet<>();
        try (Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s")
                .subscriptionType(SubscriptionType.Shared).receiverQueueSize(1)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
            Message<String> message = consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
            while (message != null) {
                found.add(message.getValue());
                message = consumer.receive(QUIET_MS, TimeUnit.MILLISECONDS);
            }
        }
        return found.size();
    }

    private static void policies(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        PulsarClient client = client(run);
        Topics topics = admin.topics();
        AutoSubscriptionCreationOverride never = AutoSubscriptionCreationOverride.builder()
                .allowAutoSubscriptionCreation(false).build();
        Map<String, Object> subscribed = new TreeMap<>();
        Map<String, Object> unacknowledged = new TreeMap<>();
        for (boolean global : List.of(false, true)) {
            String topic = topic(run) + "-" + global;
            topics.createNonPartitionedTopic(topic);
            sent(client, topic, 5);
            admin.topicPolicies(global).setMaxUnackedMessagesOnSubscription(topic, 2);
            unacknowledged.put("global " + global, received(client, topic));
            admin.topicPolicies(global).setAutoSubscriptionCreation(topic, never);
            subscribed.put("global " + global, subscribes(client, topic, "new"));
            admin.topicPolicies(global).removeAutoSubscriptionCreation(topic);
            subscribed.put("removed " + global, subscribes(client, topic, "new"));
        }
        String topic = topic(run);
        topics.createNonPartitionedTopic(topic);
        sent(client, topic, 5);
        topics.setMaxUnackedMessagesOnSubscription(topic, 3);
        unacknowledged.put("topics()", received(client, topic));
        run.fact("unacknowledged", unacknowledged);
        run.fact("subscribed", subscribed);
        List<String> deduplication = new ArrayList<>();
        topics.enableDeduplication(topic, true);
        deduplication.add(topics.getStats(topic).getDeduplicationStatus());
        topics.disableDeduplication(topic);
        deduplication.add(topics.getStats(topic).getDeduplicationStatus());
        run.fact("deduplication", deduplication);
    }
}
