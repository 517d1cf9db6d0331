package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.StreamConsumer;

/** Many random transactions at once, with and without the broker going away in the middle. */
final class TransactionLoadCases {
    private static final Duration REREAD_LIMIT = Duration.ofSeconds(20);

    private TransactionLoadCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("txn_random", TransactionLoadCases::openAtOnce);
        cases.put("txn_outage", TransactionLoadCases::outage);
    }

    /** An input topic, two output topics, and subscriptions that hold and watch the outputs from the start. */
    private static final class Stage {
        private final CaseRun run;
        private final ScalableTopic input;
        private final List<ScalableTopic> outputs;
        private final List<String> inputs;
        private final List<Watcher> watchers = new ArrayList<>();

        private Stage(CaseRun run) throws Exception {
            this.run = run;
            input = run.scalableTopic("in", 4);
            outputs = List.of(run.scalableTopic("a", 4), run.scalableTopic("b", 2));
            inputs = Transactions.values("in", run.intArg("inputs", 600));
            PulsarClient client = run.client();
            for (ScalableTopic output : outputs) {
                Readers.stream(client, output.name(), "stored").consumerName("holder").subscribe().close();
                watchers.add(Watcher.queue(run, client, output.name(), "watcher"));
            }
            Transactions.send(Transactions.producer(run, client, input.name()), null, inputs);
        }

        /** Takes what is left of the input, in transactions that only commit, until every input's output is seen. */
        private void drain(TransactionLoad load, long seed) throws Exception {
            List<String> expected = TransactionLoad.outputsOf(inputs);
            Random random = new Random(seed);
            while (watchers.get(0).seen(expected) + watchers.get(1).seen(expected) < expected.size()) {
                load.one(random, false);
            }
            Watcher.awaitQuiet(watchers);
        }

        /** Read by a fresh client through the subscription that has held everything. */
        private List<String> stored() throws Exception {
            List<String> stored = new ArrayList<>();
            PulsarClient client = run.client();
            for (int i = 0; i < outputs.size(); i++) {
                StreamConsumer<String> consumer = run.closing(
                        Readers.stream(client, outputs.get(i).name(), "stored").consumerName("holder").subscribe());
                // Whatever has been watched is there, however slowly it comes.
                Set<String> awaited = new HashSet<>(watchers.get(i).values());
                long limit = System.nanoTime() + REREAD_LIMIT.toNanos();
                Readers.readUntil(consumer::receive, () -> awaited.isEmpty() || System.nanoTime() > limit, message -> {
                    stored.add(message.value());
                    awaited.remove(message.value());
                    // What lies behind a split comes when its parent has been acknowledged.
                    consumer.acknowledgeCumulative(message.id());
                });
                Readers.readUntilQuiet(consumer::receive, message -> stored.add(message.value()));
            }
            return stored;
        }
    }

    /** {@code transactions} of them, all open at the same moment, then each ended in its own thread. */
    private static void openAtOnce(CaseRun run) throws Exception {
        Stage stage = new Stage(run);
        int transactions = run.intArg("transactions", 200);
        long seed = run.intArg("seed", 7);
        TransactionLoad load = new TransactionLoad(run, Duration.ofSeconds(120), stage.input, stage.outputs);
        CyclicBarrier allOpen = new CyclicBarrier(transactions);
        List<Readers.Background> threads = new ArrayList<>();
        for (int i = 0; i < transactions; i++) {
            Random random = new Random(seed * 1000 + i);
            threads.add(Readers.background("transaction-" + i, () -> {
                TransactionLoad.Open open = load.open(random);
                allOpen.await(60, TimeUnit.SECONDS);
                open.end(random.nextInt(10) < 6);
            }));
        }
        for (Readers.Background thread : threads) {
            thread.join();
        }
        stage.drain(load, seed);
        load.report(run, stage.inputs, stage.stored());
    }

    /**
     * Threads run transactions without a pause; tells {@code loaded} when some have ended, and again after each
     * {@code back} signal when as many more have; then the rest of the input is drained and everything compared.
     * With {@code reshape} an input and an output segment are split after each {@code back}.
     */
    private static void outage(CaseRun run) throws Exception {
        Stage stage = new Stage(run);
        long seed = run.intArg("seed", 7);
        int step = run.intArg("transactionsBetween", 60);
        Duration timeout = Duration.ofSeconds(run.intArg("transactionTimeoutS", 10));
        TransactionLoad load = new TransactionLoad(run, timeout, stage.input, stage.outputs);
        AtomicBoolean stopping = new AtomicBoolean();
        List<Readers.Background> threads = new ArrayList<>();
        for (int i = 0; i < run.intArg("threads", 16); i++) {
            Random random = new Random(seed * 1000 + i);
            threads.add(Readers.background("transactions-" + i, () -> {
                while (!stopping.get()) {
                    load.one(random, true);
                }
            }));
        }
        Transactions.until(() -> load.endedCount() >= step);
        run.event("loaded");
        for (int round = 1; round <= run.intArg("rounds", 1); round++) {
            run.awaitSignal("back-" + round);
            if (run.flag("reshape")) {
                splitFirst(run, stage.input);
                splitFirst(run, stage.outputs.get(0));
            }
            int before = load.endedCount();
            Transactions.until(() -> load.endedCount() >= before + step);
            run.event("loaded");
        }
        stopping.set(true);
        for (Readers.Background thread : threads) {
            thread.join();
        }
        stage.drain(load, seed);
        load.report(run, stage.inputs, stage.stored());
    }

    private static void splitFirst(CaseRun run, ScalableTopic topic) throws Exception {
        run.admin().split(topic, run.admin().activeSegments(topic).firstEntry().getValue());
    }
}
