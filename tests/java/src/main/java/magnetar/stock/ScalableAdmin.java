package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.io.InputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyStore;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.time.Duration;
import java.util.Map;
import java.util.TreeMap;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** The REST calls that the cases need. */
final class ScalableAdmin {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration TIMEOUT = Duration.ofSeconds(30);

    private final String base;
    private final HttpClient http;
    private final String token;

    /**
     * The token goes with every request; an empty one does not. Over https the certificates of the PEM file {@code
     * trust} are trusted.
     */
    ScalableAdmin(String base, String token, String trust) {
        this.base = base;
        this.token = token;
        HttpClient.Builder builder = HttpClient.newBuilder().followRedirects(HttpClient.Redirect.ALWAYS);
        if (base.startsWith("https:")) {
            builder.sslContext(trusting(Path.of(trust)));
        }
        this.http = builder.build();
    }

    private static SSLContext trusting(Path pem) {
        try (InputStream in = Files.newInputStream(pem)) {
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            for (Certificate each : CertificateFactory.getInstance("X.509").generateCertificates(in)) {
                store.setCertificateEntry("trusted-" + store.size(), each);
            }
            TrustManagerFactory managers = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            managers.init(store);
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, managers.getTrustManagers(), null);
            return context;
        } catch (IOException | GeneralSecurityException e) {
            throw new IllegalArgumentException(pem + " cannot be used: " + e.getMessage(), e);
        }
    }

    ScalableTopic create(String namespace, String local, int segments) throws IOException, InterruptedException {
        return create(namespace, local, segments, Map.of());
    }

    ScalableTopic create(String namespace, String local, int segments, Map<String, String> properties)
            throws IOException, InterruptedException {
        String path = namespace + "/" + local;
        send("PUT", "/admin/v2/scalable/" + path + "?numInitialSegments=" + segments, JSON.writeValueAsString(properties));
        return new ScalableTopic(path);
    }

    /** An ordinary topic, unpartitioned for 0; the result has its names, and those that it has once it is migrated. */
    ScalableTopic createOrdinary(String namespace, String local, int partitions) throws IOException, InterruptedException {
        String path = namespace + "/" + local;
        String resource = "/admin/v2/persistent/" + path;
        if (partitions > 0) {
            send("PUT", resource + "/partitions", Integer.toString(partitions));
        } else {
            send("PUT", resource, "{}");
        }
        return new ScalableTopic(path);
    }

    /** A subscription of an ordinary topic, at its first message. */
    void createSubscription(ScalableTopic topic, String subscription) throws IOException, InterruptedException {
        send("PUT", "/admin/v2/persistent/" + topic.path() + "/subscription/" + subscription,
                "{\"ledgerId\": -1, \"entryId\": -1}");
    }

    void migrate(ScalableTopic topic, boolean force) throws IOException, InterruptedException {
        send("POST", "/admin/v2/scalable/" + topic.path() + "/migrate?force=" + force, null);
    }

    void delete(ScalableTopic topic) throws IOException, InterruptedException {
        send("DELETE", "/admin/v2/scalable/" + topic.path() + "?force=true", null);
    }

    void split(ScalableTopic topic, long segment) throws IOException, InterruptedException {
        send("POST", "/admin/v2/scalable/" + topic.path() + "/split/" + segment, null);
    }

    void merge(ScalableTopic topic, long first, long second) throws IOException, InterruptedException {
        send("POST", "/admin/v2/scalable/" + topic.path() + "/merge/" + first + "/" + second, null);
    }

    /** Active segments: id by the start of its hash range. */
    TreeMap<Integer, Long> activeSegments(ScalableTopic topic) throws IOException, InterruptedException {
        TreeMap<Integer, Long> active = new TreeMap<>();
        for (JsonNode segment : layout(topic).get("segments")) {
            if (segment.get("state").asText().equals("ACTIVE")) {
                active.put(segment.get("hashRange").get("start").asInt(), segment.get("segmentId").asLong());
            }
        }
        return active;
    }

    JsonNode layout(ScalableTopic topic) throws IOException, InterruptedException {
        return JSON.readTree(send("GET", "/admin/v2/scalable/" + topic.path(), null));
    }

    /** A namespace with broker-side deduplication on; making it twice is no error. */
    void createDeduplicatingNamespace(String namespace) throws IOException, InterruptedException {
        try {
            send("PUT", "/admin/v2/namespaces/" + namespace, "{}");
        } catch (RestFailure failure) {
            if (failure.status() != 409) {
                throw failure;
            }
        }
        send("POST", "/admin/v2/namespaces/" + namespace + "/deduplication", "true");
    }

    void createNamespace(String namespace) throws IOException, InterruptedException {
        send("PUT", "/admin/v2/namespaces/" + namespace, "{}");
    }

    /** Limits the bytes of the backlog of each segment in a namespace. */
    void limitBacklog(String namespace, long bytes, String policy) throws IOException, InterruptedException {
        send("POST", "/admin/v2/namespaces/" + namespace + "/backlogQuota",
                "{\"limitSize\": " + bytes + ", \"limitTime\": -1, \"policy\": \"" + policy + "\"}");
    }

    /** Has each broker check the backlogs of its topics. */
    void checkBacklogs() throws IOException, InterruptedException {
        JsonNode brokers = JSON.readTree(send("GET", "/admin/v2/brokers", null));
        for (JsonNode broker : brokers) {
            String url = brokers.size() == 1 ? base : "http://" + broker.asText();
            send("GET", url, "/admin/v2/brokers/backlog-quota-check", null);
        }
    }

    private String send(String method, String path, String body) throws IOException, InterruptedException {
        return send(method, base, path, body);
    }

    private String send(String method, String base, String path, String body)
            throws IOException, InterruptedException {
        HttpRequest.Builder request = HttpRequest.newBuilder(URI.create(base + path))
                .timeout(TIMEOUT)
                .header("Content-Type", "application/json")
                .method(method, body == null ? BodyPublishers.noBody() : BodyPublishers.ofString(body));
        if (!token.isEmpty()) {
            request.header("Authorization", "Bearer " + token);
        }
        HttpResponse<String> response = http.send(request.build(), BodyHandlers.ofString());
        if (response.statusCode() >= 300) {
            throw new RestFailure(method + " " + path, response.statusCode(), response.body());
        }
        return response.body();
    }

    /** A status that is not a success. */
    static final class RestFailure extends IOException {
        private final int status;

        RestFailure(String what, int status, String body) {
            super(what + " answered " + status + ": " + body);
            this.status = status;
        }

        int status() {
            return status;
        }
    }
}
