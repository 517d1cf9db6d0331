package magnetar.stock;

import java.time.Duration;
import java.util.Map;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** An ordinary topic that becomes scalable while v5 clients are attached to it. */
final class MigrationCases {
    private MigrationCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("migrate_under_load", MigrationCases::underLoad);
    }

    /**
     * A producer, a queue and a checkpoint consumer are attached to an ordinary topic of {@code partitions}, 0 for an
     * unpartitioned one, while it is migrated and then split. A stream consumer, which the M1 client opens on scalable
     * topics alone, goes on with the subscription that the ordinary topic had, unless it is left out.
     */
    private static void underLoad(CaseRun run) throws Exception {
        int partitions = run.intArg("partitions", 0);
        ScalableTopic topic = run.admin().createOrdinary("public/default", run.localName(), partitions);
        run.admin().createSubscription(topic, "stream");
        Tally tally = new Tally();
        Tally.Received streamed = tally.new Received();
        Tally.Received queued = tally.new Received();
        Tally.Received checkpointed = tally.new Received();
        PulsarClient reading = run.client();
        QueueConsumer<String> queue =
                run.closing(Readers.queue(reading, topic.persistentName(), "queue").subscribe());
        CheckpointConsumer<String> checkpoint = run.closing(reading.newCheckpointConsumer(Schema.string())
                .topic(topic.persistentName())
                .startPosition(Checkpoint.earliest())
                .create());
        boolean[] sent = new boolean[1];
        Readers.Background queueing = Readers.background("queue", () ->
                Readers.drainQueue(queue, queued, () -> sent[0] && queued.complete()));
        Readers.Background checkpointing = Readers.background("checkpoint", () -> Readers.readUntil(
                checkpoint::receive, () -> sent[0] && checkpointed.complete(), each -> checkpointed.add(each.value())));
        Load load = run.closing(new Load(run, run.client(), topic.persistentName(), tally));
        int step = run.intArg("messagesBetween", 400);
        load.start();
        tally.awaitAcknowledged(step);
        run.admin().migrate(topic, run.flag("force"));
        tally.awaitAcknowledged(tally.acknowledgedCount() + step);
        Readers.Background streaming = null;
        if (!run.flag("withoutStream")) {
            StreamConsumer<String> stream = run.closing(Readers.stream(reading, topic.name(), "stream").subscribe());
            streaming = Readers.background("stream", () ->
                    Readers.drainStream(stream, streamed, () -> sent[0] && streamed.complete()));
        }
        run.admin().split(topic, run.admin().activeSegments(topic).firstEntry().getValue());
        tally.awaitAcknowledged(tally.acknowledgedCount() + step);
        load.stop();
        sent[0] = true;
        Duration limit = Duration.ofSeconds(run.intArg("drainLimitS", 30));
        if (streaming != null) {
            run.fact("stream_complete", streaming.join(limit));
            streamed.report(run, "stream_");
        }
        run.fact("queue_complete", queueing.join(limit));
        run.fact("checkpoint_complete", checkpointing.join(limit));
        run.fact("active_segments", run.admin().activeSegments(topic).size());
        tally.report(run);
        queued.report(run, "queue_");
        checkpointed.report(run, "checkpoint_");
    }
}
