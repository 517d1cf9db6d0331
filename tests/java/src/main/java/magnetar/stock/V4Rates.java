package magnetar.stock;

import static magnetar.stock.V4Clients.admin;
import static magnetar.stock.V4Clients.client;
import static magnetar.stock.V4Clients.namespace;
import static magnetar.stock.V4Clients.topic;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.admin.TopicPolicies;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.common.policies.data.DispatchRate;
import org.apache.pulsar.common.policies.data.PublishRate;
import org.apache.pulsar.common.policies.data.SubscribeRate;

/** Policies of rates, as the v4 client and the admin library see them. */
final class V4Rates {
    private static final int PER_SECOND = 50;
    private static final int LIMIT_MS = 30_000;
    private static final int AN_HOUR_S = 3600;

    private V4Rates() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_publish_rate", V4Rates::publishing);
        cases.put("v4_dispatch_rate", V4Rates::delivery);
        cases.put("v4_dispatch_rate_removed", V4Rates::removal);
        cases.put("v4_subscribe_rate", V4Rates::subscribing);
        cases.put("v4_rate_policies", V4Rates::policies);
    }

    private static DispatchRate dispatchRate(int messages, long bytes, int periodS) {
        return DispatchRate.builder()
                .dispatchThrottlingRateInMsg(messages)
                .dispatchThrottlingRateInByte(bytes)
                .ratePeriodInSecond(periodS)
                .build();
    }

    private static long sinceMs(long begin) {
        return TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - begin);
    }

    /** Sends that many messages, not batched, and waits for all receipts. */
    private static void send(CaseRun run, PulsarClient client, int messages) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic(run)).enableBatching(false).create()) {
            List<CompletableFuture<MessageId>> receipts = new ArrayList<>();
            for (int i = 0; i < messages; i++) {
                receipts.add(producer.sendAsync(new byte[run.intArg("size", 10)]));
            }
            CompletableFuture.allOf(receipts.toArray(CompletableFuture[]::new)).get();
        }
    }

    private static int receive(Consumer<byte[]> consumer, int messages) throws Exception {
        int received = 0;
        while (received < messages && consumer.receive(LIMIT_MS, TimeUnit.MILLISECONDS) != null) {
            received++;
        }
        return received;
    }

    private static Consumer<byte[]> consumer(CaseRun run, PulsarClient client) throws Exception {
        return run.closing(client.newConsumer()
                .topic(topic(run))
                .subscriptionName("s")
                .subscriptionType(SubscriptionType.valueOf(run.arg("type", "Exclusive")))
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .subscribe());
    }

    /** The time that receipts take; another topic of the same client does not wait. */
    private static void publishing(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        PulsarAdmin admin = admin(run);
        admin.topics().createNonPartitionedTopic(topic(run));
        boolean inBytes = run.flag("bytes");
        admin.topicPolicies().setPublishRate(topic(run),
                inBytes ? new PublishRate(-1, PER_SECOND * 1000L) : new PublishRate(PER_SECOND, -1));
        Producer<String> other = run.closing(client.newProducer(Schema.STRING).topic(topic(run) + "-other").create());
        long begin = System.nanoTime();
        send(run, client, run.intArg("messages", 0));
        run.fact("took_ms", sinceMs(begin));
        run.fact("other", other.send("x") != null);
    }

    /** The time that delivery takes under each form of the dispatch rate. */
    private static void delivery(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        int messages = run.intArg("messages", 0);
        send(run, client, messages);
        TopicPolicies policies = admin(run).topicPolicies();
        DispatchRate rate = run.flag("bytes")
                ? dispatchRate(-1, PER_SECOND * 1000L, 1) : dispatchRate(PER_SECOND, -1, 1);
        switch (run.arg("policy", "")) {
            case "topic" -> policies.setDispatchRate(topic(run), rate);
            case "subscriptions" -> policies.setSubscriptionDispatchRate(topic(run), rate);
            default -> policies.setSubscriptionDispatchRate(topic(run), "s", rate);
        }
        long begin = System.nanoTime();
        run.fact("received", receive(consumer(run, client), messages));
        run.fact("took_ms", sinceMs(begin));
    }

    /** A consumer that waits for a rate of one message an hour gets all when the policy goes. */
    private static void removal(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        send(run, client, 100);
        TopicPolicies policies = admin(run).topicPolicies();
        policies.setDispatchRate(topic(run), dispatchRate(1, -1, AN_HOUR_S));
        Consumer<byte[]> consumer = consumer(run, client);
        run.fact("first", receive(consumer, 1));
        policies.removeDispatchRate(topic(run));
        run.fact("others", receive(consumer, 99));
    }

    /** A consumer that comes again within the period is refused, one of another name is not. */
    private static void subscribing(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        admin.topics().createNonPartitionedTopic(topic(run));
        admin.topicPolicies().setSubscribeRate(topic(run), new SubscribeRate(1, AN_HOUR_S));
        run.fact("first", subscribe(run, "c"));
        run.fact("again", subscribe(run, "c"));
        run.fact("other_name", subscribe(run, "d"));
        admin.topicPolicies().removeSubscribeRate(topic(run));
        run.fact("without_rate", subscribe(run, "c"));
    }

    private static String subscribe(CaseRun run, String name) throws Exception {
        // A new client counts its consumers from 0 again: host, name and id are the same.
        try (PulsarClient client = PulsarClient.builder().serviceUrl(run.url()).build()) {
            client.newConsumer().topic(topic(run)).subscriptionName("s").consumerName(name).subscribe().close();
            return "ok";
        } catch (PulsarClientException failure) {
            return failure.getClass().getSimpleName();
        }
    }

    /** Each policy is set, read and removed with the admin library. */
    private static void policies(CaseRun run) throws Exception {
        PulsarAdmin admin = admin(run);
        String topic = topic(run);
        admin.topics().createNonPartitionedTopic(topic);
        String namespace = namespace(run, admin);
        PublishRate publish = new PublishRate(5, 6L);
        SubscribeRate subscribe = new SubscribeRate(7, 8);
        DispatchRate dispatch = DispatchRate.builder().dispatchThrottlingRateInMsg(1).dispatchThrottlingRateInByte(2L)
                .relativeToPublishRate(true).ratePeriodInSecond(3).build();
        for (boolean global : new boolean[] {false, true}) {
            TopicPolicies policies = admin.topicPolicies(global);
            policies.setPublishRate(topic, publish);
            policies.setDispatchRate(topic, dispatch);
            policies.setSubscriptionDispatchRate(topic, dispatch);
            policies.setSubscriptionDispatchRate(topic, "s", dispatch);
            policies.setSubscribeRate(topic, subscribe);
            String of = global ? "global" : "topic";
            run.fact(of, publish.equals(policies.getPublishRate(topic))
                    && dispatch.equals(policies.getDispatchRate(topic))
                    && dispatch.equals(policies.getDispatchRate(topic, true))
                    && dispatch.equals(policies.getSubscriptionDispatchRate(topic))
                    && dispatch.equals(policies.getSubscriptionDispatchRate(topic, "s"))
                    && dispatch.equals(policies.getSubscriptionDispatchRate(topic, "s", true))
                    && subscribe.equals(policies.getSubscribeRate(topic, true)));
            policies.removePublishRate(topic);
            policies.removeDispatchRate(topic);
            policies.removeSubscriptionDispatchRate(topic);
            policies.removeSubscriptionDispatchRate(topic, "s");
            policies.removeSubscribeRate(topic);
            run.fact(of + "_removed", policies.getPublishRate(topic) == null
                    && policies.getDispatchRate(topic) == null
                    && policies.getSubscriptionDispatchRate(topic) == null
                    && policies.getSubscriptionDispatchRate(topic, "s") == null
                    && policies.getSubscribeRate(topic) == null);
            run.fact(of + "_replicator", refusal(() -> policies.setReplicatorDispatchRate(topic, dispatch)));
        }
        admin.namespaces().setPublishRate(namespace, publish);
        admin.namespaces().setDispatchRate(namespace, dispatch);
        admin.namespaces().setSubscriptionDispatchRate(namespace, dispatch);
        admin.namespaces().setSubscribeRate(namespace, subscribe);
        run.fact("namespace", publish.equals(admin.namespaces().getPublishRate(namespace))
                && dispatch.equals(admin.namespaces().getDispatchRate(namespace))
                && dispatch.equals(admin.namespaces().getSubscriptionDispatchRate(namespace))
                && subscribe.equals(admin.namespaces().getSubscribeRate(namespace))
                && admin.namespaces().getPolicies(namespace).publishMaxMessageRate.containsValue(publish));
        admin.namespaces().removePublishRate(namespace);
        admin.namespaces().removeDispatchRate(namespace);
        admin.namespaces().removeSubscriptionDispatchRate(namespace);
        admin.namespaces().removeSubscribeRate(namespace);
        run.fact("namespace_removed", admin.namespaces().getPublishRate(namespace) == null
                && admin.namespaces().getDispatchRate(namespace) == null
                && admin.namespaces().getSubscriptionDispatchRate(namespace) == null
                && admin.namespaces().getSubscribeRate(namespace) == null);
        run.fact("namespace_replicator", refusal(() -> admin.namespaces().setReplicatorDispatchRate(namespace, dispatch)));
    }

    /** A call of the admin library that is to fail. */
    private interface Refused {
        void call() throws PulsarAdminException;
    }

    private static String refusal(Refused call) {
        try {
            call.call();
            return "ok";
        } catch (PulsarAdminException failure) {
            return failure.getStatusCode() + " " + failure.getMessage();
        }
    }
}
