package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.pulsar.client.api.v5.Checkpoint;
import org.apache.pulsar.client.api.v5.CheckpointConsumer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Checkpoint consumers: positions kept by the application, alone and in a group. */
final class CheckpointCases {
    private CheckpointCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("checkpoint", CheckpointCases::restoreAfterSplit);
        cases.put("checkpoint_latest", CheckpointCases::latest);
        cases.put("checkpoint_group", CheckpointCases::group);
    }

    private static CheckpointConsumer<String> open(CaseRun run, PulsarClient client, ScalableTopic topic, Checkpoint from)
            throws Exception {
        return run.closing(client.newCheckpointConsumer(Schema.string()).topic(topic.name()).startPosition(from).create());
    }

    /** Reads a part, checkpoints, splits, sends more; a new consumer restored from bytes reads exactly the rest. */
    private static void restoreAfterSplit(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        Load load = run.closing(new Load(run, client, topic.name(), tally));
        load.send(200);
        CheckpointConsumer<String> first = open(run, client, topic, Checkpoint.earliest());
        Readers.readUntil(first::receive, () -> all.distinct() == 120, message -> all.add(message.value()));
        byte[] saved = first.checkpoint().toByteArray();
        first.close();
        for (long segment : run.admin().activeSegments(topic).values()) {
            run.admin().split(topic, segment);
        }
        load.send(200);
        CheckpointConsumer<String> second = open(run, client, topic, Checkpoint.fromByteArray(saved));
        Readers.readUntil(second::receive, all::complete, message -> all.add(message.value()));
        int extra = Readers.readUntilQuiet(second::receive, message -> all.add(message.value()));
        run.fact("active_segments", run.admin().activeSegments(topic).size());
        run.fact("checkpoint_bytes", saved.length);
        run.fact("extra", extra);
        tally.report(run);
        all.report(run, "");
    }

    private static void latest(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(2);
        PulsarClient client = run.client();
        Tally before = new Tally();
        Tally after = new Tally();
        Tally.Received received = after.new Received();
        new Load(run, client, topic.name(), before).send(50);
        CheckpointConsumer<String> consumer = open(run, client, topic, Checkpoint.latest());
        new Load(run, client, topic.name(), after).send(50);
        run.fact("received", Readers.readUntilQuiet(consumer::receive, message -> received.add(message.value())));
    }

    /** Two members share the segments: together everything, each message at one of them. */
    private static void group(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(4);
        Tally tally = new Tally();
        Tally.Received all = tally.new Received();
        List<Tally.Received> parts = new ArrayList<>();
        List<Readers.Background> readers = new ArrayList<>();
        Map<String, Integer> reads = new TreeMap<>();
        for (String name : List.of("one", "two")) {
            PulsarClient client = run.client();
            CheckpointConsumer<String> member = run.closing(client.newCheckpointConsumer(Schema.string())
                    .topic(topic.name())
                    .consumerGroup("group")
                    .consumerName(name)
                    .startPosition(Checkpoint.earliest())
                    .create());
            Tally.Received part = tally.new Received();
            parts.add(part);
            readers.add(Readers.background("member-" + name, () -> Readers.readUntil(
                    member::receive, () -> tally.settledCount() == 400 && all.complete(), message -> {
                        part.add(message.value());
                        all.add(message.value());
                    })));
        }
        Load load = new Load(run, run.client(), topic.name(), tally);
        load.send(200);
        if (run.flag("split")) {
            run.admin().split(topic, run.admin().activeSegments(topic).firstEntry().getValue());
        }
        load.send(200);
        for (Readers.Background reader : readers) {
            reader.join();
        }
        reads.put("one", parts.get(0).distinct());
        reads.put("two", parts.get(1).distinct());
        run.fact("reads", reads);
        tally.report(run);
        all.report(run, "");
    }
}
