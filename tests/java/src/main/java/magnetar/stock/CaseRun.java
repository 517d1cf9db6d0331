package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.time.Duration;
import java.util.Collections;
import java.util.Deque;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentLinkedDeque;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeoutException;
import java.util.function.Consumer;
import java.util.function.Supplier;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.PulsarClientBuilder;
import org.apache.pulsar.client.api.v5.auth.AuthenticationFactory;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;
import org.apache.pulsar.client.api.v5.config.ConnectionPolicy;
import org.apache.pulsar.client.api.v5.config.TlsPolicy;
import org.apache.pulsar.client.api.v5.config.TransactionPolicy;

/** What a running case has at hand: its broker, its arguments, its facts, and everything it must close. */
final class CaseRun {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(10);

    private final String url;
    private final JsonNode args;
    private final Consumer<ObjectNode> events;
    private final ScalableAdmin admin;
    private final RenewedToken renewedToken;
    private final Map<String, Object> facts = Collections.synchronizedMap(new TreeMap<>());
    private final Map<String, Supplier<?>> progress = new ConcurrentHashMap<>();
    private final Deque<AutoCloseable> toClose = new ConcurrentLinkedDeque<>();
    private final Set<String> signals = new HashSet<>();
    private final BlockingQueue<JsonNode> orders = new LinkedBlockingQueue<>();

    CaseRun(JsonNode request, Consumer<ObjectNode> events) {
        this.url = request.get("url").asText();
        this.args = request.path("args");
        this.events = events;
        this.admin = new ScalableAdmin(request.get("admin").asText(), arg("adminToken", ""), arg("trust", ""));
        this.renewedToken = args.has("token") ? RenewedToken.of(args) : null;
    }

    /** Runs the body under its deadline ({@code timeoutS}, 90 s unless given): some calls of the client wait for ever. */
    void execute(Case body) throws Exception {
        Throwable[] failure = new Throwable[1];
        Thread thread = new Thread(() -> {
            try {
                body.run(this);
            } catch (Throwable thrown) { // handed to the thread that waits for this one
                failure[0] = thrown;
            }
        }, Thread.currentThread().getName() + "-body");
        thread.setDaemon(true);
        thread.start();
        Duration deadline = Duration.ofSeconds(intArg("timeoutS", 90));
        thread.join(deadline.toMillis());
        if (thread.isAlive()) {
            TimeoutException stuck = new TimeoutException("the case did not end within " + deadline.toSeconds() + " s");
            stuck.setStackTrace(thread.getStackTrace());
            progress.forEach((name, value) -> fact(name, value.get()));
            thread.interrupt();
            throw stuck;
        }
        if (failure[0] instanceof Exception exception) {
            throw exception;
        }
        if (failure[0] instanceof Error error) {
            throw error;
        }
    }

    String url() {
        return url;
    }

    ScalableAdmin admin() {
        return admin;
    }

    String arg(String name, String otherwise) {
        return args.path(name).asText(otherwise);
    }

    int intArg(String name, int otherwise) {
        return args.path(name).asInt(otherwise);
    }

    boolean flag(String name) {
        return args.path(name).asBoolean(false);
    }

    /** The token of the case's clients, where it changes; else null. */
    RenewedToken renewedToken() {
        return renewedToken;
    }

    /** The local name given as {@code topic}, or a fresh one. */
    String localName() {
        String fresh = "t-" + Long.toHexString(ThreadLocalRandom.current().nextLong());
        return arg("topic", fresh);
    }

    /** A fresh scalable topic with that many segments. */
    ScalableTopic scalableTopic(int segments) throws Exception {
        return admin.create(arg("namespace", "public/default"), localName(), segments);
    }

    /** Another topic of the case, its name with that ending. */
    ScalableTopic scalableTopic(String ending, int segments) throws Exception {
        return admin.create(arg("namespace", "public/default"), localName() + "-" + ending, segments);
    }

    PulsarClient client() throws Exception {
        return closing(clientBuilder().build());
    }

    /** A client whose transactions end by themselves after that time. */
    PulsarClient transactionalClient(Duration timeout) throws Exception {
        return closing(clientBuilder()
                .transactionPolicy(TransactionPolicy.builder().timeout(timeout).build())
                .build());
    }

    private PulsarClientBuilder clientBuilder() throws Exception {
        PulsarClientBuilder builder = PulsarClient.builder();
        if (!arg("authPlugin", "").isEmpty()) {
            builder.authentication(arg("authPlugin", ""), arg("authParams", ""));
        } else if (renewedToken != null) {
            builder.authentication(AuthenticationFactory.token(renewedToken));
        }
        if (!arg("trust", "").isEmpty()) {
            builder.tlsPolicy(TlsPolicy.builder()
                    .trustCertsFilePath(arg("trust", ""))
                    .certificateFilePath(arg("certificate", null))
                    .keyFilePath(arg("key", null))
                    .enableHostnameVerification(true)
                    .build());
        }
        return builder
                .serviceUrl(url)
                .operationTimeout(Duration.ofSeconds(intArg("operationTimeoutS", 30)))
                .connectionPolicy(ConnectionPolicy.builder()
                        .connectionBackoff(BackoffPolicy.exponential(Duration.ofMillis(100), Duration.ofSeconds(1)))
                        .build());
    }

    <T extends AutoCloseable> T closing(T resource) {
        toClose.push(resource);
        return resource;
    }

    void fact(String name, Object value) {
        facts.put(name, value);
    }

    /** A fact that is taken only if the case does not end within its deadline: how far it is. */
    void progress(String name, Supplier<?> value) {
        progress.put(name, value);
    }

    Map<String, Object> facts() {
        synchronized (facts) {
            return new TreeMap<>(facts);
        }
    }

    void event(String name) {
        ObjectNode event = JSON.createObjectNode().put("event", name);
        event.set("facts", JSON.valueToTree(facts()));
        events.accept(event);
    }

    void signal(String word) {
        synchronized (signals) {
            signals.add(word);
            signals.notifyAll();
        }
    }

    void awaitSignal(String word) throws InterruptedException {
        synchronized (signals) {
            while (!signals.contains(word)) {
                signals.wait();
            }
        }
    }

    /** Something for a case that takes orders to do. */
    void order(JsonNode order) {
        orders.add(order);
    }

    JsonNode nextOrder() throws InterruptedException {
        return orders.take();
    }

    /** What came of an order. */
    void answer(ObjectNode answer) {
        ObjectNode event = JSON.createObjectNode().put("event", "answer");
        event.set("facts", answer);
        events.accept(event);
    }

    /** Closes what the case opened, newest first; each close gets a bounded time, for the broker may be gone. */
    void close() {
        for (AutoCloseable resource : toClose) {
            Thread closer = new Thread(() -> {
                try {
                    resource.close();
                } catch (Exception ignored) { // the case has ended; what it saw is already in its facts
                }
            }, "closer");
            closer.setDaemon(true);
            closer.start();
            try {
                closer.join(CLOSE_TIMEOUT.toMillis());
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
                return;
            }
        }
    }

    static String describe(Throwable failure) {
        StringWriter text = new StringWriter();
        failure.printStackTrace(new PrintWriter(text));
        return text.toString();
    }
}
