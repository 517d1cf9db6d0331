package magnetar.stock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;

/**
 * Runs cases of the official Pulsar clients and prints what it saw as JSON lines; judging them is the caller's part.
 *
 * <p>{@code --case NAME --url pulsar://... --admin http://... [--ARG VALUE ...]} runs one case and exits.
 * {@code --serve} reads one JSON object per line: {@code {"id":1,"case":"queue","url":..,"admin":..,"args":{..}}} starts
 * a case in a thread of its own, {@code {"id":1,"signal":"finish"}} wakes one that waits for that word,
 * {@code {"id":1,"order":{..}}} is what a case that takes orders does next, and answers. Each line
 * answered carries the id: {@code {"id":1,"event":"loaded",...}} on the way, and at the end either
 * {@code {"id":1,"ok":true,"facts":{..}}} or {@code {"id":1,"ok":false,"error":"..","facts":{..}}}.
 */
public final class Driver {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final Duration FAILED_PAUSE = Duration.ofSeconds(5);

    private final Map<String, Case> cases;
    private final PrintStream out;
    private final Map<Long, CaseRun> running = new ConcurrentHashMap<>();

    private Driver(Map<String, Case> cases, PrintStream out) {
        this.cases = cases;
        this.out = out;
    }

    private static Map<String, Case> cases() {
        Map<String, Case> cases = new TreeMap<>();
        QueueCases.addTo(cases);
        RateCases.addTo(cases);
        DelayCases.addTo(cases);
        StreamCases.addTo(cases);
        CheckpointCases.addTo(cases);
        ReshapeCases.addTo(cases);
        SequenceCases.addTo(cases);
        MigrationCases.addTo(cases);
        MessageCases.addTo(cases);
        ProducerCases.addTo(cases);
        SchemaCases.addTo(cases);
        NamespaceCases.addTo(cases);
        OutageCases.addTo(cases);
        TransactionCases.addTo(cases);
        TransactionAckCases.addTo(cases);
        TransactionLoadCases.addTo(cases);
        V4TransactionCases.addMixedTo(cases);
        V4TopicOperations.addLoopTo(cases);
        BenchCases.addTo(cases);
        TransactionBenchCases.addTo(cases);
        InteropSession.addTo(cases);
        TokenExpiryCases.addTo(cases);
        AdminScalableCases.addTo(cases);
        AdminCases.addTo(cases);
        StatisticsCases.addTo(cases);
        AdminOperations.addTo(cases);
        ClusterCases.addTo(cases);
        ReplicationCases.addTo(cases);
        MovingConsumerCases.addTo(cases);
        return cases;
    }

    public static void main(String[] arguments) throws Exception {
        run(cases(), arguments);
    }

    /** Runs one of these cases and exits, or serves all of them. */
    static void run(Map<String, Case> cases, String[] arguments) throws Exception {
        // Nothing but protocol lines may reach standard output.
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        Driver driver = new Driver(cases, out);
        if (arguments.length == 1 && arguments[0].equals("--serve")) {
            driver.serve();
            System.exit(0);
        }
        ObjectNode request = JSON.createObjectNode().put("id", 1L);
        ObjectNode args = request.putObject("args");
        for (int i = 0; i + 1 < arguments.length; i += 2) {
            String name = arguments[i].replaceFirst("^--", "");
            ObjectNode target = switch (name) {
                case "case", "url", "admin" -> request;
                default -> args;
            };
            target.put(name, arguments[i + 1]);
        }
        if (!request.hasNonNull("case") || !request.hasNonNull("url") || !request.hasNonNull("admin")) {
            System.err.println("usage: --case NAME --url pulsar://HOST:PORT --admin http://HOST:PORT [--ARG VALUE ...]"
                    + "\n       --serve\ncases: " + String.join(" ", cases.keySet()));
            System.exit(2);
        }
        boolean passed = driver.run(request);
        System.exit(passed ? 0 : 1);
    }

    private void serve() throws IOException {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        print(JSON.createObjectNode().put("event", "serving"));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonNode request = JSON.readTree(line);
            CaseRun told = running.get(request.get("id").asLong());
            if (request.has("signal")) {
                if (told != null) {
                    told.signal(request.get("signal").asText());
                }
                continue;
            }
            if (request.has("order")) {
                if (told != null) {
                    told.order(request.get("order"));
                }
                continue;
            }
            Thread thread = new Thread(() -> run(request), "case-" + request.get("id").asLong());
            thread.setDaemon(true);
            thread.start();
        }
    }

    private boolean run(JsonNode request) {
        long id = request.get("id").asLong();
        String name = request.get("case").asText();
        ObjectNode answer = JSON.createObjectNode().put("id", id);
        CaseRun run = new CaseRun(request, event -> print(event.put("id", id)));
        running.put(id, run);
        try {
            Case body = cases.get(name);
            if (body == null) {
                throw new IllegalArgumentException("no case " + name + "; there are " + cases.keySet());
            }
            run.execute(body);
            answer.put("ok", true);
        } catch (Throwable failure) { // one failed case must not end the process that runs the others
            answer.put("ok", false).put("error", CaseRun.describe(failure));
        }
        answer.set("facts", JSON.valueToTree(run.facts()));
        print(answer);
        running.remove(id);
        boolean passed = answer.get("ok").asBoolean();
        if (!passed) {
            pause();
        }
        run.close();
        return passed;
    }

    /** Gives the caller time to look at the brokers while the clients of a failed case are still there. */
    private static void pause() {
        try {
            Thread.sleep(FAILED_PAUSE.toMillis());
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    private synchronized void print(ObjectNode line) {
        out.println(line.toString());
    }
}
