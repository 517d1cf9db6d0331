package magnetar.stock;

import java.time.Duration;
import java.util.Map;
import java.util.function.Consumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** The broker goes away and comes back while clients produce and consume; the caller does the taking away. */
final class OutageCases {
    private OutageCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("outage", OutageCases::outage);
        cases.put("outage_quiet", OutageCases::acknowledgedStaysAcknowledged);
    }

    /**
     * Tells {@code loaded} when a load runs and both subscriptions read; after each {@code back} signal it waits for
     * further acknowledgements and tells {@code loaded} again; after {@code rounds} of these it stops and compares.
     */
    private static void outage(CaseRun run) throws Exception {
        String namespace = "public/default";
        if (run.flag("deduplicate")) {
            namespace = "public/deduplicated";
            run.admin().createDeduplicatingNamespace(namespace);
        }
        ScalableTopic topic = run.admin().create(namespace, run.localName(), run.intArg("segments", 2));
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        PulsarClient reading = run.client();
        StreamConsumer<String> stream = run.closing(
                Readers.stream(reading, topic.name(), "stream").consumerName("s").subscribe());
        QueueConsumer<String> queue = run.closing(Readers.queue(reading, topic.name(), "queue").subscribe());
        // Holds everything until the end: what other subscriptions have acknowledged may be trimmed.
        PulsarClient holding = run.client();
        stored(holding, topic).close();
        holding.close();
        boolean[] sent = new boolean[1];
        Readers.Background streaming = Readers.background("stream", () ->
                Readers.drainStream(stream, streamed, () -> sent[0] && streamed.complete()));
        Readers.Background queueing = Readers.background("queue", () ->
                Readers.drainQueue(queue, queued, () -> sent[0] && queued.complete()));
        Load load = run.closing(new Load(run, run.client(), topic.name(), tally));
        int step = run.intArg("messagesBetween", 500);
        load.start();
        tally.awaitAcknowledged(step);
        run.event("loaded");
        for (int round = 1; round <= run.intArg("rounds", 1); round++) {
            run.awaitSignal("back-" + round);
            tally.awaitAcknowledged(tally.acknowledgedCount() + step);
            run.event("loaded");
        }
        load.stop();
        sent[0] = true;
        Duration limit = Duration.ofSeconds(run.intArg("drainLimitS", 40));
        run.fact("stream_complete", streaming.join(limit));
        run.fact("queue_complete", queueing.join(limit));
        tally.report(run);
        streamed.report(run, "stream_");
        queued.report(run, "queue_");
        reread(run, topic, tally);
    }

    /**
     * Everything sent is received and acknowledged before the broker goes; after it is back only new messages come.
     * The caller gives the client's last acknowledgements time to arrive.
     */
    private static void acknowledgedStaysAcknowledged(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient reading = run.client();
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        StreamConsumer<String> stream = run.closing(Readers.stream(reading, topic.name(), "stream").subscribe());
        QueueConsumer<String> queue = run.closing(
                Readers.queue(reading, topic.name(), "queue").acknowledgmentGroupTime(Duration.ZERO).subscribe());
        Load load = run.closing(new Load(run, run.client(), topic.name(), tally));
        load.send(300);
        Readers.drainStream(stream, streamed, streamed::complete);
        Readers.drainQueue(queue, queued, queued::complete);
        run.event("quiet");
        run.awaitSignal("back");
        load.send(300);
        Readers.drainStream(stream, streamed, streamed::complete);
        Readers.drainQueue(queue, queued, queued::complete);
        run.fact("stream_extra", Readers.readUntilQuiet(stream::receive, message -> streamed.add(message.value())));
        run.fact("queue_extra", Readers.readUntilQuiet(queue::receive, message -> queued.add(message.value())));
        tally.report(run);
        streamed.report(run, "stream_");
        queued.report(run, "queue_");
    }

    private static StreamConsumer<String> stored(PulsarClient client, ScalableTopic topic) throws Exception {
        return Readers.stream(client, topic.name(), "stored").consumerName("holder").subscribe();
    }

    /** What the topic holds in the end, read by a fresh client through a subscription that never acknowledged. */
    private static void reread(CaseRun run, ScalableTopic topic, Tally tally) throws Exception {
        Tally.Received stored = tally.new Received();
        StreamConsumer<String> consumer = run.closing(stored(run.client(), topic));
        Consumer<Message<String>> take = Readers.oncePerId(message -> stored.add(message.value()));
        Readers.readUntil(consumer::receive, stored::complete, take);
        Readers.readUntilQuiet(consumer::receive, take);
        stored.report(run, "stored_");
    }
}
