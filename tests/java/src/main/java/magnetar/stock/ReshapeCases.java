package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** Layout changes while messages flow. */
final class ReshapeCases {
    private ReshapeCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("split_under_load", run -> reshape(run, true));
        cases.put("merge_under_load", run -> reshape(run, false));
        cases.put("split_before_subscribe", ReshapeCases::subscribeAfterSplit);
    }

    /**
     * A load runs, a stream and a queue subscription read it, and the layout changes {@code changes} times: each split
     * takes the first active segment, each merge the first two.
     */
    private static void reshape(CaseRun run, boolean split) throws Exception {
        int changes = run.intArg("changes", 2);
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", split ? 2 : 4));
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        PulsarClient reading = run.client();
        StreamConsumer<String> stream = run.closing(Readers.stream(reading, topic.name(), "stream").subscribe());
        QueueConsumer<String> queue = run.closing(Readers.queue(reading, topic.name(), "queue").subscribe());
        boolean[] sent = new boolean[1];
        Readers.Background streaming = Readers.background("stream", () ->
                Readers.drainStream(stream, streamed, () -> sent[0] && streamed.complete()));
        Readers.Background queueing = Readers.background("queue", () ->
                Readers.drainQueue(queue, queued, () -> sent[0] && queued.complete()));
        Load load = run.closing(new Load(run, run.client(), topic.name(), tally));
        int step = run.intArg("messagesBetween", 400);
        load.start();
        tally.awaitAcknowledged(step);
        for (int i = 0; i < changes; i++) {
            List<Long> active = new ArrayList<>(run.admin().activeSegments(topic).values());
            if (split) {
                run.admin().split(topic, active.get(0));
            } else {
                run.admin().merge(topic, active.get(0), active.get(1));
            }
            tally.awaitAcknowledged(tally.acknowledgedCount() + step);
        }
        load.stop();
        sent[0] = true;
        Duration limit = Duration.ofSeconds(run.intArg("drainLimitS", 30));
        run.fact("stream_complete", streaming.join(limit));
        run.fact("queue_complete", queueing.join(limit));
        run.fact("active_segments", run.admin().activeSegments(topic).size());
        run.fact("epoch", run.admin().layout(topic).get("epoch").asInt());
        tally.report(run);
        streamed.report(run, "stream_");
        queued.report(run, "queue_");
    }

    /** Subscriptions made before a split, with nobody connected, still find everything in parents and children. */
    private static void subscribeAfterSplit(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        Readers.stream(client, topic.name(), "stream").consumerName("s").subscribe().close();
        Readers.queue(client, topic.name(), "queue").subscribe().close();
        Load load = run.closing(new Load(run, client, topic.name(), tally));
        load.send(100);
        run.admin().split(topic, 0);
        load.send(100);
        StreamConsumer<String> stream = run.closing(
                Readers.stream(client, topic.name(), "stream").consumerName("s").subscribe());
        Readers.drainStream(stream, streamed, streamed::complete);
        QueueConsumer<String> queue = run.closing(Readers.queue(client, topic.name(), "queue").subscribe());
        Readers.readUntilQuiet(queue::receive, message -> {
            queued.add(message.value());
            queue.acknowledge(message.id());
        });
        tally.report(run);
        streamed.report(run, "stream_");
        queued.report(run, "queue_");
    }
}
