package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.util.Map;
import java.util.TreeMap;

/** The REST calls that the cases need. */
final class ScalableAdmin {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration TIMEOUT = Duration.ofSeconds(30);

    private final String base;
    private final HttpClient http = HttpClient.newBuilder().followRedirects(HttpClient.Redirect.ALWAYS).build();

    private final String token;

    /** The token goes with every request; an empty one does not. */
    ScalableAdmin(String base, String token) {
        this.base = base;
        this.token = token;
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

    private String send(String method, String path, String body) throws IOException, InterruptedException {
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
