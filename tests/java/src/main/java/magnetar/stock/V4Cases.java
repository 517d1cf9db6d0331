package magnetar.stock;

import static magnetar.stock.V4Clients.topic;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.PulsarVersion;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.ClientBuilder;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;
import org.apache.pulsar.client.api.transaction.Transaction;

/** The v4 client on {@code persistent://} topics. */
final class V4Cases {
    private static final int QUIET_MS = 300;
    private static final int LIMIT_MS = 15_000;

    private V4Cases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_messages", V4Cases::messages);
        cases.put("v4_transaction", V4Cases::transaction);
        cases.put("v4_token_expires", V4Cases::tokenExpires);
        cases.put("v4_migration", V4Cases::migration);
    }

    /** A topic with v4 clients is not migrated unless forced; then its producers get TopicTerminated. */
    private static void migration(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        ScalableTopic topic = new ScalableTopic("public/default/" + run.localName());
        Consumer<String> consumer = consumer(run, client, SubscriptionType.Shared);
        run.fact("status_with_consumer", migrate(run, topic, false));
        Producer<String> producer = producer(run, client, LIMIT_MS);
        consumer.close();
        run.fact("status_with_producer", migrate(run, topic, false));
        producer.send("before");
        run.fact("status_forced", migrate(run, topic, true));
        String refusal = "none";
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS); System.nanoTime() < end;) {
            try {
                producer.send("after");
                Thread.sleep(QUIET_MS);
            } catch (PulsarClientException failure) {
                refusal = failure.getClass().getSimpleName();
                break;
            }
        }
        run.fact("refusal", refusal);
        try {
            producer(run, client, LIMIT_MS);
            run.fact("new_producer", "none");
        } catch (PulsarClientException failure) {
            run.fact("new_producer", failure.getClass().getSimpleName());
        }
        Consumer<String> again = consumer(run, client, SubscriptionType.Shared);
        Message<String> message = again.receive(LIMIT_MS, TimeUnit.MILLISECONDS);
        run.fact("old_message", message == null ? "none" : message.getValue());
        run.fact("status_again", migrate(run, topic, true));
    }

    private static int migrate(CaseRun run, ScalableTopic topic, boolean force) throws Exception {
        try {
            run.admin().migrate(topic, force);
            return 204;
        } catch (ScalableAdmin.RestFailure failure) {
            return failure.status();
        }
    }

    private static ClientBuilder builder(CaseRun run) throws Exception {
        ClientBuilder builder = PulsarClient.builder()
                .serviceUrl(run.url())
                .operationTimeout(run.intArg("operationTimeoutS", 30), TimeUnit.SECONDS);
        if (!run.arg("authPlugin", "").isEmpty()) {
            builder.authentication(run.arg("authPlugin", ""), run.arg("authParams", ""));
        } else if (run.renewedToken() != null) {
            builder.authentication(AuthenticationFactory.token(run.renewedToken()));
        }
        if (!run.arg("trust", "").isEmpty()) {
            builder.tlsTrustCertsFilePath(run.arg("trust", "")).enableTlsHostnameVerification(true);
        }
        if (!run.arg("certificate", "").isEmpty()) {
            builder.tlsCertificateFilePath(run.arg("certificate", "")).tlsKeyFilePath(run.arg("key", ""));
        }
        return builder;
    }

    private static PulsarClient client(CaseRun run) throws Exception {
        return run.closing(builder(run).build());
    }

    private static Producer<String> producer(CaseRun run, PulsarClient client, int sendTimeoutMs) throws Exception {
        return run.closing(client.newProducer(Schema.STRING)
                .topic(topic(run))
                .enableBatching(run.flag("batching"))
                .sendTimeout(sendTimeoutMs, TimeUnit.MILLISECONDS)
                .create());
    }

    private static Consumer<String> consumer(CaseRun run, PulsarClient client, SubscriptionType type) throws Exception {
        return run.closing(client.newConsumer(Schema.STRING)
                .topic(topic(run))
                .subscriptionName(type.name())
                .subscriptionType(type)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                .subscribe());
    }

    /** Acknowledged values in the order that they came in, until so many have come and then nothing more comes. */
    private static List<String> read(Consumer<String> consumer, int count) throws Exception {
        List<String> values = new ArrayList<>();
        while (true) {
            Message<String> message = consumer.receive(values.size() < count ? LIMIT_MS : QUIET_MS, TimeUnit.MILLISECONDS);
            if (message == null) {
                return values;
            }
            consumer.acknowledge(message);
            values.add(message.getValue());
        }
    }

    /** Messages to a subscription of each type. */
    private static void messages(CaseRun run) throws Exception {
        int count = run.intArg("messages", 100);
        run.fact("version", PulsarVersion.getVersion());
        PulsarClient client = client(run);
        Producer<String> producer = producer(run, client, LIMIT_MS);
        List<Consumer<String>> consumers = new ArrayList<>();
        for (SubscriptionType type : SubscriptionType.values()) {
            consumers.add(consumer(run, client, type));
        }
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        List<String> values = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            values.add("m|" + i);
            sends.add(producer.newMessage().key("k" + i % 10).value(values.get(i)).sendAsync());
        }
        for (CompletableFuture<MessageId> send : sends) {
            send.get();
        }
        List<Boolean> same = new ArrayList<>();
        for (Consumer<String> consumer : consumers) {
            same.add(read(consumer, count).equals(values));
        }
        run.fact("same", same);
    }

    /** A transaction with messages, where the broker lets a v4 client have one; else {@code refusal}. */
    private static void transaction(CaseRun run) throws Exception {
        PulsarClient client;
        try {
            client = run.closing(builder(run).enableTransaction(true).build());
        } catch (PulsarClientException error) {
            run.fact("refusal", error.getMessage());
            return;
        }
        Producer<String> producer = producer(run, client, 0);
        Consumer<String> consumer = consumer(run, client, SubscriptionType.Shared);
        Transaction transaction = client.newTransaction().withTransactionTimeout(1, TimeUnit.MINUTES).build().get();
        for (int i = 0; i < 10; i++) {
            producer.newMessage(transaction).value("m|" + i).send();
        }
        run.fact("seen_while_open", read(consumer, 0).size());
        transaction.commit().get();
        run.fact("seen", read(consumer, 10).size());
    }

    /**
     * Sends and reads beyond the expiry of the first token, until {@code untilMs}. Then, if the token was not renewed,
     * another client ({@code readerToken}) reads what was acknowledged.
     */
    private static void tokenExpires(CaseRun run) throws Exception {
        PulsarClient client = client(run);
        Producer<String> producer = producer(run, client, 2000);
        Consumer<String> consumer = consumer(run, client, SubscriptionType.Exclusive);
        long untilMs = Long.parseLong(run.arg("untilMs", ""));
        List<String> acknowledged = new ArrayList<>();
        Set<String> failures = new HashSet<>();
        List<String> received = new ArrayList<>();
        Readers.Background reading = Readers.background("v4-reader", () -> {
            while (System.currentTimeMillis() < untilMs) {
                Message<String> message = consumer.receive(100, TimeUnit.MILLISECONDS);
                if (message != null) {
                    consumer.acknowledge(message);
                    received.add(message.getValue());
                }
            }
        });
        for (int i = 0; System.currentTimeMillis() < untilMs; i++) {
            String value = "m|" + i;
            try {
                producer.send(value);
                acknowledged.add(value);
            } catch (PulsarClientException failure) {
                failures.add(failure.getClass().getSimpleName());
            }
            Thread.sleep(5);
        }
        reading.join();
        run.fact("sent", acknowledged.size());
        run.fact("failures", failures);
        run.fact("renewals", run.renewedToken().renewals());
        run.fact("connected", List.of(producer.isConnected(), consumer.isConnected()));
        run.fact("disconnections_ms",
                List.of(producer.getLastDisconnectedTimestamp(), consumer.getLastDisconnectedTimestamp()));
        if (producer.isConnected()) {
            received.addAll(read(consumer, acknowledged.size() - received.size()));
        } else {
            received.clear();
            PulsarClient again = run.closing(PulsarClient.builder()
                    .serviceUrl(run.url())
                    .tlsTrustCertsFilePath(run.arg("trust", ""))
                    .authentication(AuthenticationFactory.token(run.arg("readerToken", "")))
                    .build());
            received.addAll(read(consumer(run, again, SubscriptionType.Shared), acknowledged.size()));
        }
        Set<String> distinct = new HashSet<>(received);
        run.fact("missing", acknowledged.stream().filter(value -> !distinct.contains(value)).count());
        run.fact("duplicates", received.size() - distinct.size());
    }
}
