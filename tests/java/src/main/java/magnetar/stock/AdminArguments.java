package magnetar.stock;

import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.lang.reflect.Method;
import java.lang.reflect.Parameter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import org.apache.pulsar.client.admin.GetStatsOptions;
import org.apache.pulsar.client.admin.GrantTopicPermissionOptions;
import org.apache.pulsar.client.admin.ListNamespaceTopicsOptions;
import org.apache.pulsar.client.admin.ListTopicsOptions;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.admin.RevokeTopicPermissionOptions;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.client.api.transaction.TxnID;
import org.apache.pulsar.client.impl.MessageIdImpl;
import org.apache.pulsar.common.policies.data.AuthAction;
import org.apache.pulsar.common.policies.data.ClusterDataImpl;
import org.apache.pulsar.common.policies.data.ScalableSubscriptionType;
import org.apache.pulsar.common.policies.data.SchemaCompatibilityStrategy;
import org.apache.pulsar.common.policies.data.TenantInfo;
import org.apache.pulsar.common.protocol.schema.PostSchemaPayload;
import org.apache.pulsar.common.util.ObjectMapperFactory;

/** Arguments for each operation of the admin library, by the names of its parameters, and what they name. */
final class AdminArguments {
    private static final ObjectMapper JSON = ObjectMapperFactory.getMapper().getObjectMapper();
    private static final String CLUSTER = "standalone";
    private static final String CLUSTER_DATA = "{\"serviceUrl\": \"http://127.0.0.1:1\", \"brokerServiceUrl\":"
            + " \"pulsar://127.0.0.1:1\"}";
    private static final String SUBSCRIPTION = "sub";
    private static final String ALL_BUNDLES = "0x00000000_0xffffffff";
    private static final int SENT = 3;

    /** Objects, as Pulsar's JSON, by the names of their types. */
    private static final Map<String, String> OBJECTS = Map.ofEntries(
            Map.entry("AutoScalePolicyOverride", "{\"maxSegments\": 4}"),
            Map.entry("AutoSubscriptionCreationOverride", "{\"allowAutoSubscriptionCreation\": true}"),
            Map.entry("AutoTopicCreationOverride", "{\"allowAutoTopicCreation\": true, \"topicType\": \"partitioned\","
                    + " \"defaultNumPartitions\": 2}"),
            Map.entry("BacklogQuota", "{\"limitSize\": 1048576, \"limitTime\": -1, \"policy\": \"producer_exception\"}"),
            Map.entry("BookieAffinityGroupData", "{\"bookkeeperAffinityGroupPrimary\": \"group\"}"),
            Map.entry("BookieInfo", "{\"rack\": \"rack\", \"hostname\": \"host\"}"),
            Map.entry("BundlesData", "{\"numBundles\": 2, \"boundaries\": [\"0x00000000\", \"0x7fffffff\","
                    + " \"0xffffffff\"]}"),
            Map.entry("ClusterData", CLUSTER_DATA),
            Map.entry("ClusterUrl", "{\"serviceUrl\": \"http://127.0.0.1:1\", \"brokerServiceUrl\":"
                    + " \"pulsar://127.0.0.1:1\"}"),
            Map.entry("DelayedDeliveryPolicies", "{\"active\": true, \"tickTime\": 1000,"
                    + " \"maxDeliveryDelayInMillis\": 60000}"),
            Map.entry("DispatchRate", "{\"dispatchThrottlingRateInMsg\": 100, \"dispatchThrottlingRateInByte\": -1,"
                    + " \"relativeToPublishRate\": false, \"ratePeriodInSecond\": 1}"),
            Map.entry("EntryFilters", "{\"entryFilterNames\": \"filter\"}"),
            Map.entry("FailureDomain", "{\"brokers\": [\"broker\"]}"),
            Map.entry("FunctionState", "{\"key\": \"key\", \"stringValue\": \"value\"}"),
            Map.entry("InactiveTopicPolicies", "{\"inactiveTopicDeleteMode\": \"delete_when_no_subscriptions\","
                    + " \"maxInactiveDurationSeconds\": 600, \"deleteWhileInactive\": true}"),
            Map.entry("NamespaceIsolationData", "{\"namespaces\": [\"public/default\"], \"primary\": [\"broker\"],"
                    + " \"secondary\": [\"other\"], \"auto_failover_policy\": {\"policy_type\": \"min_available\","
                    + " \"parameters\": {\"min_limit\": \"1\", \"usage_threshold\": \"100\"}}}"),
            Map.entry("OffloadPolicies", "{\"managedLedgerOffloadDriver\": \"filesystem\", \"fileSystemURI\":"
                    + " \"file:///tmp\", \"managedLedgerOffloadThresholdInBytes\": 1048576}"),
            Map.entry("PackageMetadata", "{\"description\": \"package\"}"),
            Map.entry("PersistencePolicies", "{\"bookkeeperEnsemble\": 1, \"bookkeeperWriteQuorum\": 1,"
                    + " \"bookkeeperAckQuorum\": 1, \"managedLedgerMaxMarkDeleteRate\": 1.0}"),
            Map.entry("Policies", "{}"),
            Map.entry("PublishRate", "{\"publishThrottlingRateInMsg\": 100, \"publishThrottlingRateInByte\": 100000}"),
            Map.entry("ResourceGroup", "{\"publishRateInMsgs\": 100, \"publishRateInBytes\": 100000,"
                    + " \"dispatchRateInMsgs\": 100, \"dispatchRateInBytes\": 100000}"),
            Map.entry("ResourceQuota", "{\"msgRateIn\": 100, \"msgRateOut\": 100, \"bandwidthIn\": 100,"
                    + " \"bandwidthOut\": 100, \"memory\": 10, \"dynamic\": true}"),
            Map.entry("RetentionPolicies", "{\"retentionTimeInMinutes\": 10, \"retentionSizeInMB\": 10}"),
            Map.entry("SubscribeRate", "{\"subscribeThrottlingRatePerConsumer\": 10, \"ratePeriodInSecond\": 30}"),
            Map.entry("TenantInfo", "{\"adminRoles\": [\"keeper\"], \"allowedClusters\": [\"" + CLUSTER + "\"]}"));

    /** Numbers and switches by the names of parameters; others are 1 and false. */
    private static final Map<String, Object> VALUES = Map.ofEntries(
            Map.entry("applied", true), Map.entry("enabled", true), Map.entry("enable", true),
            Map.entry("force", true), Map.entry("encryptionRequired", true), Map.entry("replicas", 2),
            Map.entry("schemaValidationEnforced", true), Map.entry("isAllowAutoUpdateSchema", true),
            Map.entry("numPartitions", 3), Map.entry("numMessages", 2), Map.entry("segmentId", 0L),
            Map.entry("segmentId1", 0L), Map.entry("segmentId2", 1L), Map.entry("version", 0L),
            Map.entry("coordinatorId", 0), Map.entry("messageTTLInSecond", 600), Map.entry("ttlInSeconds", 600),
            Map.entry("entryId", 0L), Map.entry("expireTimeInSeconds", 0L), Map.entry("maxMessageSize", 1000),
            Map.entry("compactionThreshold", 1048576L), Map.entry("index", 0L), Map.entry("batchIndex", 0),
            Map.entry("interval", 100), Map.entry("offloadThreshold", 1048576L),
            Map.entry("offloadThresholdInSeconds", 600L), Map.entry("lag", 600L),
            Map.entry("backlogScanMaxEntries", 1000L), Map.entry("timeout", 0L));

    private final PulsarAdmin admin;
    private final PulsarClient client;
    private final String tenant;
    private final String broker;
    private final Set<String> namespaces = new HashSet<>();

    AdminArguments(PulsarAdmin admin, PulsarClient client, String tenant) throws PulsarAdminException {
        this.admin = admin;
        this.client = client;
        this.tenant = tenant;
        this.broker = admin.brokers().getActiveBrokers().get(0);
    }

    void createTenant() throws PulsarAdminException {
        admin.tenants().createTenant(tenant, tenantInfo());
    }

    private static TenantInfo tenantInfo() {
        return TenantInfo.builder().allowedClusters(new TreeSet<>(Set.of(CLUSTER))).build();
    }

    private void createNamespaceOnce(String namespace) throws PulsarAdminException {
        synchronized (namespaces) {
            if (namespaces.add(namespace)) {
                admin.namespaces().createNamespace(namespace);
            }
        }
    }

    /** Makes what an operation works on: a namespace or a topic of its own, with what belongs to it. */
    Place prepare(String name, Method method, int number) throws Exception {
        Place place = new Place(name, method, number);
        place.create();
        return place;
    }

    /** What one call names. */
    final class Place {
        private final String kind;
        private final String method;
        private final Set<String> names = new TreeSet<>();
        private final String local;
        private final String own;
        private final String namespace;
        private final String topic;
        private final String segment;
        // Downloads write into theirs while uploads read.
        private final Path file;
        private long ledgerId = -1;
        private MessageId last = MessageId.earliest;
        private TxnID transaction = new TxnID(0, 0);

        Place(String kind, Method method, int number) throws IOException {
            this.kind = kind;
            this.method = method.getName();
            for (Parameter each : method.getParameters()) {
                names.add(each.getName());
            }
            local = this.method.toLowerCase() + "-" + number;
            own = tenant + "-" + number;
            namespace = tenant + "/" + (kind.equals("Namespaces") ? local : kind.split(" ")[0].toLowerCase());
            String domain = switch (kind) {
                case "ScalableTopics" -> "topic";
                case "NonPersistentTopics" -> "non-persistent";
                default -> "persistent";
            };
            topic = domain + "://" + namespace + "/" + local;
            segment = "segment://" + namespace + "/" + local + "/0000-7fff-0";
            file = Files.createTempFile("package", ".nar");
            file.toFile().deleteOnExit();
        }

        String anonymous(String reason) {
            return reason.replace(local, "NAME").replace(own, "TENANT").replace(tenant, "TENANT").replace(broker, "BROKER")
                    .replace(file.toString(), "FILE").replace("/ledger/" + ledgerId + "/", "/ledger/LEDGER/");
        }

        void create() throws Exception {
            if (kind.equals("Tenants") && !method.equals("createTenant")) {
                admin.tenants().createTenant(own, tenantInfo());
            }
            if (ofOtherCluster()) {
                admin.clusters().createCluster(local, JSON.readValue(CLUSTER_DATA, ClusterDataImpl.class));
            }
            boolean wanted = names.contains("namespace") || names.contains("options") || ofTopic();
            if (wanted && !method.equals("createNamespace")) {
                createNamespaceOnce(namespace);
            }
            if (ofTopic() && !isOfFunctions()) {
                createTopic();
            }
        }

        /** The local cluster is not changed over REST. */
        private boolean ofOtherCluster() {
            return Set.of("updateCluster", "deleteCluster", "updatePeerClusterNames", "getPeerClusterNames")
                    .contains(method);
        }

        private boolean ofSubscriptionRate() {
            return method.equals("getSubscriptionDispatchRate");
        }

        private boolean isOfFunctions() {
            return Set.of("Functions", "Sources", "Sinks").contains(kind);
        }

        private boolean ofTopic() {
            return names.stream().anyMatch(Set.of("topic", "topicName", "sourceTopic", "segmentTopic", "shadowTopic",
                    "topics")::contains) || method.endsWith("OnTopics") || method.equals("abortTransaction")
                    || method.equals("getTransactionMetadata") || ofSubscriptionRate();
        }

        private void createTopic() throws Exception {
            boolean partitioned = method.contains("Partition");
            if (kind.equals("ScalableTopics")) {
                if (method.equals("migrateToScalable")) {
                    admin.topics().createNonPartitionedTopic(topic.replace("topic://", "persistent://"));
                } else if (!method.equals("createScalableTopic")) {
                    admin.scalableTopics().createScalableTopic(topic, 2);
                    if (names.contains("subscription") && !method.startsWith("create")) {
                        admin.scalableTopics().createSubscription(topic, SUBSCRIPTION,
                                ScalableSubscriptionType.STREAM);
                    }
                }
                return;
            }
            if (method.startsWith("create") && method.endsWith("Topic") && !method.contains("Shadow")) {
                return;
            }
            if (partitioned) {
                admin.topics().createPartitionedTopic(topic, 2);
            } else if (kind.equals("NonPersistentTopics")) {
                admin.topics().createNonPartitionedTopic(topic);
            } else {
                admin.topics().createNonPartitionedTopic(topic, Map.of("key", "value"));
            }
            if (!method.equals("createSubscription") && names.stream().anyMatch(
                    Set.of("subName", "subscription", "subscriptionName")::contains)) {
                admin.topics().createSubscription(topic, SUBSCRIPTION, MessageId.earliest);
            }
            if (method.startsWith("revokePermissions") && kind.equals("Topics")) {
                admin.topics().grantPermission(topic, "name", Set.of(AuthAction.produce));
            }
            if (kind.equals("Schemas") && !method.equals("createSchema")) {
                admin.schemas().createSchema(topic, Schema.STRING.getSchemaInfo());
            }
            if (kind.equals("Transactions")) {
                beginTransaction();
            } else if (!partitioned && (names.contains("ledgerId") || method.contains("Message"))
                    && kind.equals("Topics") && !method.contains("Max") && !method.contains("TTL")) {
                send();
            }
        }

        private void send() throws Exception {
            try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
                for (int i = 0; i < SENT; i++) {
                    last = producer.send(new byte[] {1});
                    ledgerId = ((MessageIdImpl) last).getLedgerId();
                }
            }
        }

        /** A transaction with a message and an acknowledgement, left open. */
        private void beginTransaction() throws Exception {
            send();
            Transaction begun = client.newTransaction().withTransactionTimeout(10, TimeUnit.MINUTES).build().get();
            transaction = begun.getTxnID();
            try (Producer<byte[]> producer = client.newProducer().topic(topic).create();
                    Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName(SUBSCRIPTION)
                            .subscriptionType(SubscriptionType.Shared)
                            .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
                Message<byte[]> received = consumer.receive(10, TimeUnit.SECONDS);
                producer.newMessage(begun).value(new byte[] {2}).send();
                consumer.acknowledgeAsync(received.getMessageId(), begun).get();
            }
        }

        Object[] argumentsOf(Method operation) throws Exception {
            Parameter[] parameters = operation.getParameters();
            Object[] values = new Object[parameters.length];
            for (int i = 0; i < parameters.length; i++) {
                values[i] = valueOf(parameters[i]);
            }
            return values;
        }

        private Object valueOf(Parameter parameter) throws Exception {
            Class<?> type = parameter.getType();
            String name = parameter.getName();
            if (type == String.class) {
                return text(name);
            }
            Object number = VALUES.getOrDefault(name, 1);
            if (name.equals("numPartitions") && kind.equals("NonPersistentTopics")) {
                number = 2;
            }
            if (type == boolean.class || type == Boolean.class) {
                return VALUES.getOrDefault(name, false);
            }
            if (type == int.class || type == Integer.class) {
                return ((Number) number).intValue();
            }
            if (type == long.class || type == Long.class) {
                return name.equals("ledgerId") ? ledgerId : ((Number) number).longValue();
            }
            if (type.isEnum()) {
                return enumOf(type);
            }
            if (OBJECTS.containsKey(type.getSimpleName())) {
                return JSON.readValue(OBJECTS.get(type.getSimpleName()), type);
            }
            return other(type, name, parameter.getParameterizedType().getTypeName());
        }

        private Object enumOf(Class<?> type) {
            return switch (type.getSimpleName()) {
                case "SchemaCompatibilityStrategy" -> SchemaCompatibilityStrategy.BACKWARD;
                case "TimeUnit" -> TimeUnit.SECONDS;
                default -> type.getEnumConstants()[0];
            };
        }

        private Object other(Class<?> type, String name, String generic) throws Exception {
            return switch (type.getSimpleName()) {
                case "MessageId" -> last;
                case "TxnID" -> transaction;
                case "Optional" -> Optional.empty();
                case "Predicate" -> (Predicate<Object>) each -> false;
                case "GetStatsOptions" -> GetStatsOptions.builder().build();
                case "ListTopicsOptions" -> ListTopicsOptions.EMPTY;
                case "ListNamespaceTopicsOptions" -> ListNamespaceTopicsOptions.builder().build();
                case "SchemaInfo" -> Schema.STRING.getSchemaInfo();
                case "PostSchemaPayload" -> new PostSchemaPayload("STRING", "", Map.of());
                case "FunctionConfig", "SinkConfig", "SourceConfig" -> ofFunctions(type);
                case "UpdateOptions" -> null;
                case "Map" -> generic.contains("QueryParam") ? Map.of() : new HashMap<>(Map.of("key", "value"));
                case "LinkedHashSet" -> new LinkedHashSet<>(Set.of(CLUSTER));
                case "Set" -> new TreeSet<>(setOf(name, generic));
                case "List" -> listOf(name, generic);
                default -> throw new IllegalArgumentException("no value for " + type + " " + name);
            };
        }

        private Set<? extends Comparable<?>> setOf(String name, String generic) {
            if (generic.contains("AuthAction")) {
                return Set.of(AuthAction.produce);
            }
            if (generic.contains("SubscriptionType")) {
                return Set.of(SubscriptionType.Exclusive, SubscriptionType.Shared);
            }
            return Set.of(name.startsWith("cluster") ? CLUSTER : "name");
        }

        private List<?> listOf(String name, String generic) {
            if (generic.contains("RevokeTopicPermissionOptions")) {
                return List.of(RevokeTopicPermissionOptions.builder().topic(topic).role("role").build());
            }
            if (generic.contains("GrantTopicPermissionOptions")) {
                return List.of(GrantTopicPermissionOptions.builder().topic(topic).role("role")
                        .actions(Set.of(AuthAction.produce)).build());
            }
            return switch (name) {
                case "splitBoundaries" -> List.of(0x7fffffffL);
                case "clusterIds" -> List.of(CLUSTER);
                case "subscriptions" -> List.of(SUBSCRIPTION);
                case "shadowTopics" -> List.of(topic + "-shadow");
                default -> List.of(topic);
            };
        }

        private Object ofFunctions(Class<?> type) throws Exception {
            return JSON.readValue("{\"tenant\": \"" + tenant + "\", \"namespace\": \"functions\", \"name\": \"" + local
                    + "\", \"className\": \"Name\", \"archive\": \"" + file + "\"}", type);
        }

        private String text(String name) {
            return switch (name) {
                case "topic", "topicName", "sourceTopic" -> topic;
                case "shadowTopic" -> method.startsWith("create") ? topic + "-shadow" : topic;
                case "segmentTopic" -> segment;
                case "tenant" -> kind.equals("Tenants") ? own : tenant;
                // One operation of topics calls its topic so.
                case "namespace" -> isOfFunctions() ? "functions" : kind.equals("Topics") && ofSubscriptionRate()
                        ? topic : namespace;
                case "cluster" -> ofOtherCluster() || method.equals("createCluster") ? local : CLUSTER;
                case "subName", "subscription", "subscriptionName" -> SUBSCRIPTION;
                case "bundle", "bundleRange" -> ALL_BUNDLES;
                case "function", "sink", "source", "policyName", "domainName", "resourcegroup", "resourcegroupname",
                        "name", "namespaceAntiAffinityGroup" -> local;
                case "packageName" -> "function://" + tenant + "/functions/" + local + "@v1";
                case "type" -> "function";
                case "path", "fileName", "sourceFile", "destinationFile", "triggerFile" -> file.toString();
                case "pkgUrl" -> "http://127.0.0.1:1/package.nar";
                case "initialPosition" -> "earliest";
                case "key" -> "key";
                case "configName" -> "maxPublishRatePerTopicInMessages";
                case "configValue", "value", "triggerValue" -> "1";
                case "splitAlgorithmName" -> "range_equally_divide";
                case "targetUrl" -> "oxia://127.0.0.1:1/default";
                case "bookieAddress" -> "127.0.0.1:3181";
                case "brokerId", "broker" -> broker;
                default -> "name";
            };
        }
    }
}
