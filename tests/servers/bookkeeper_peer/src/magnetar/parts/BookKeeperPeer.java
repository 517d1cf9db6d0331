package magnetar.parts;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import org.apache.bookkeeper.client.api.BKException;

/**
 * BookKeeper's own client, told what to do by lines of JSON on standard input.
 *
 * <p>A request is {@code {"id":1,"op":"create",...}}; {@link Operations} lists what there is. Each is carried out in a
 * thread of its own and answered, whenever it is done, by {@code {"id":1,"ok":true,"facts":{..}}} or by
 * {@code {"id":1,"ok":false,"code":-101,"error":"..","facts":{..}}}, where the code is BookKeeper's, or 0.
 */
public final class BookKeeperPeer {
    private static final ObjectMapper JSON = new ObjectMapper();

    private final PrintStream out;
    private final Operations operations = new Operations();

    private BookKeeperPeer(PrintStream out) {
        this.out = out;
    }

    public static void main(String[] arguments) throws IOException {
        // Nothing but protocol lines may reach standard output.
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        System.setOut(System.err);
        new BookKeeperPeer(out).serve();
        // Ledgers that are open stay so: nobody closes clients here.
        Runtime.getRuntime().halt(0);
    }

    private void serve() throws IOException {
        ExecutorService threads = Executors.newCachedThreadPool();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        print(JSON.createObjectNode().put("event", "serving"));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            JsonNode request = JSON.readTree(line);
            threads.execute(() -> answer(request));
        }
    }

    private void answer(JsonNode request) {
        ObjectNode facts = JSON.createObjectNode();
        ObjectNode answer = JSON.createObjectNode().put("id", request.get("id").asLong());
        try {
            operations.run(request, facts);
            answer.put("ok", true);
        } catch (Throwable failure) { // one failed request must not end the process that serves the others
            Throwable cause = failure instanceof ExecutionException && failure.getCause() != null
                    ? failure.getCause() : failure;
            answer.put("ok", false).put("error", cause.toString());
            answer.put("code", cause instanceof BKException known ? known.getCode() : 0);
        }
        answer.set("facts", facts);
        print(answer);
    }

    private synchronized void print(ObjectNode line) {
        out.println(line.toString());
    }
}
