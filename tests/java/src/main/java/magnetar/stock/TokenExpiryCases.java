package magnetar.stock;

import java.lang.reflect.Method;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.impl.ClientCnx;
import org.apache.pulsar.client.impl.PulsarClientImpl;

/** Tokens of the v5 client that expire while it sends and reads. */
final class TokenExpiryCases {
    private TokenExpiryCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("token_expires", TokenExpiryCases::tokenExpires);
    }

    /**
     * A load, read by a stream and a queue subscription, until {@code untilMs}: beyond the expiry of the first token. A
     * transaction is open meanwhile. Without a new token ({@code stays}) only the connections count.
     */
    private static void tokenExpires(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        PulsarClient client = run.transactionalClient(Duration.ofSeconds(60));
        StreamConsumer<String> stream = run.closing(Readers.stream(client, topic.name(), "stream").subscribe());
        QueueConsumer<String> queue = run.closing(Readers.queue(client, topic.name(), "queue").subscribe());
        boolean[] sent = new boolean[1];
        Readers.Background streaming = Readers.background("stream", () ->
                Readers.drainStream(stream, streamed, () -> sent[0] && streamed.complete()));
        Readers.Background queueing = Readers.background("queue", () ->
                Readers.drainQueue(queue, queued, () -> sent[0] && queued.complete()));
        ScalableTopic other = run.scalableTopic("transactional", 1);
        List<String> inside = Transactions.values("inside", 10);
        Transaction transaction = client.newTransaction();
        Transactions.send(Transactions.producer(run, client, other.name()), transaction, inside);
        Load load = run.closing(new Load(run, client, topic.name(), tally));
        load.start();
        tally.awaitAcknowledged(1);
        Set<ClientCnx> connections = connections(client);
        while (System.currentTimeMillis() < Long.parseLong(run.arg("untilMs", ""))) {
            Thread.sleep(10);
        }
        run.fact("connections", connections.size());
        run.fact("connections_kept", connections.stream().filter(each -> each.ctx().channel().isActive()).count());
        run.fact("renewals", run.renewedToken().renewals());
        if (run.flag("stays")) {
            return;
        }
        transaction.commit();
        Watcher watcher = Watcher.queue(run, client, other.name(), "queue");
        watcher.await(inside);
        run.fact("committed", watcher.seen(inside));
        load.stop();
        sent[0] = true;
        Duration limit = Duration.ofSeconds(30);
        run.fact("stream_complete", streaming.join(limit));
        run.fact("queue_complete", queueing.join(limit));
        tally.report(run);
        streamed.report(run, "stream_");
        queued.report(run, "queue_");
    }

    /** Those that the client has now. */
    private static Set<ClientCnx> connections(PulsarClient client) throws Exception {
        Method method = client.getClass().getDeclaredMethod("v4Client");
        method.setAccessible(true);
        PulsarClientImpl inner = (PulsarClientImpl) method.invoke(client);
        return inner.getCnxPool().getConnections().stream().map(each -> each.join()).collect(Collectors.toSet());
    }
}
