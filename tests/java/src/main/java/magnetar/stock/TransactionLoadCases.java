package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Consumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;

/** Many random transactions at once, with and without the broker going away in the middle. */
final class TransactionLoadCases {
    private static final Duration CONTROLLER_LIMIT = Duration.ofSeconds(30);
    private static final Duration REREAD_LIMIT = Duration.ofSeconds(20);
    private static final int EXAMPLES = 5;

    private TransactionLoadCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("txn_random", TransactionLoadCases::openAtOnce);
        cases.put("txn_outage", TransactionLoadCases::outage);
        cases.put("txn_late", TransactionLoadCases::late);
        cases.put("txn_copies", TransactionLoadCases::copies);
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
                hold(client, output);
                watchers.add(Watcher.queue(run, client, output.name(), "watcher"));
            }
            hold(client, input);
            Transactions.send(Transactions.producer(run, client, input.name()), null, inputs);
        }

        private static void hold(PulsarClient client, ScalableTopic topic) throws Exception {
            Readers.stream(client, topic.name(), "stored").consumerName("holder").subscribe().close();
        }

        /** Transactions with that timeout. */
        private TransactionLoad load(Duration timeout) throws Exception {
            TransactionLoad load = new TransactionLoad(run, timeout, input, outputs);
            run.progress("transactions", load::progress);
            return load;
        }

        /** Takes what is left of the input, in transactions that only commit, until every input's output is seen. */
        private void drain(TransactionLoad load, long seed) throws Exception {
            Set<String> unseen = ConcurrentHashMap.newKeySet();
            unseen.addAll(TransactionLoad.outputsOf(inputs));
            run.progress("drained", () -> unseen.size() + " outputs not seen, such as "
                    + unseen.stream().limit(EXAMPLES).toList());
            Random random = new Random(seed);
            while (true) {
                // One that was stored on both topics counts once.
                watchers.forEach(watcher -> watcher.values().forEach(unseen::remove));
                if (unseen.isEmpty()) {
                    break;
                }
                load.one(random, false);
            }
            Watcher.awaitQuiet(watchers);
        }

        /** Of the outputs: read by a fresh client through the subscriptions that have held everything. */
        private List<String> stored() throws Exception {
            List<String> stored = new ArrayList<>();
            PulsarClient client = run.client();
            for (int i = 0; i < outputs.size(); i++) {
                // Whatever has been watched is there, however slowly it comes.
                read(client, outputs.get(i), watchers.get(i).values(), stored);
            }
            return stored;
        }

        /** Inputs that the client itself had stored twice, by sending them again: no fault of transactions. */
        private long inputsStoredTwice() throws Exception {
            List<String> stored = new ArrayList<>();
            read(run.client(), input, inputs, stored);
            return stored.size() - stored.stream().distinct().count();
        }

        private void read(PulsarClient client, ScalableTopic topic, Collection<String> values, List<String> stored)
                throws Exception {
            StreamConsumer<String> consumer = run.closing(
                    Readers.stream(client, topic.name(), "stored").consumerName("holder").subscribe());
            Set<String> awaited = new HashSet<>(values);
            Consumer<Message<String>> keep = Readers.oncePerId(message -> stored.add(message.value()));
            Consumer<Message<String>> take = message -> {
                keep.accept(message);
                awaited.remove(message.value());
                // What lies behind a split comes when its parent has been acknowledged.
                consumer.acknowledgeCumulative(message.id());
            };
            long limit = System.nanoTime() + REREAD_LIMIT.toNanos();
            Readers.readUntil(consumer::receive, () -> awaited.isEmpty() || System.nanoTime() > limit, take);
            Readers.readUntilQuiet(consumer::receive, take);
        }
    }

    /** {@code transactions} of them, all open at the same moment, then each ended in its own thread. */
    private static void openAtOnce(CaseRun run) throws Exception {
        Stage stage = new Stage(run);
        int transactions = run.intArg("transactions", 200);
        long seed = run.intArg("seed", 7);
        TransactionLoad load = stage.load(Duration.ofSeconds(120));
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
        run.fact("inputs_stored_twice", stage.inputsStoredTwice());
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
        TransactionLoad load = stage.load(timeout);
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
        run.fact("inputs_stored_twice", stage.inputsStoredTwice());
    }

    /** A transaction times out by the client's own clock, and acknowledges inputs only then: others use them. */
    private static void late(CaseRun run) throws Exception {
        Stage stage = new Stage(run);
        Duration timeout = Duration.ofSeconds(run.intArg("transactionTimeoutS", 3));
        TransactionLoad load = stage.load(timeout);
        Random random = new Random(run.intArg("seed", 7));
        load.one(random, false, timeout.plusMillis(500));
        stage.drain(load, random.nextLong());
        load.report(run, stage.inputs, stage.stored());
        run.fact("inputs_stored_twice", stage.inputsStoredTwice());
    }

    /**
     * All inputs are received by the client and not taken; the broker goes away, so that the client gets them again
     * and has two of each. One transaction uses the first copies, another one the second copies; with {@code prune}
     * their segment has left the layout by then.
     */
    private static void copies(CaseRun run) throws Exception {
        ScalableTopic input = run.scalableTopic("in", 1);
        PulsarClient client = run.transactionalClient(Duration.ofSeconds(60));
        QueueConsumer<String> consumer = run.closing(Readers.queue(client, input.name(), "transform").subscribe());
        ConsumerInside inside = new ConsumerInside(consumer);
        List<String> inputs = Transactions.values("in", run.intArg("inputs", 50));
        Transactions.send(Transactions.producer(run, client, input.name()), null, inputs);
        Transactions.until(() -> inside.waiting() == inputs.size());
        run.event("received");
        run.awaitSignal("back");
        Transactions.until(() -> inside.waiting() == 2 * inputs.size());
        Transaction first = client.newTransaction();
        run.fact("first_dropped", use(consumer, inputs, first));
        run.fact("first_commit", Transactions.refusal(first::commit));
        if (run.flag("prune")) {
            long segment = run.admin().activeSegments(input).firstEntry().getValue();
            run.admin().split(input, segment);
            Transactions.until(() -> !inside.attached(segment));
        }
        Transaction second = client.newTransaction();
        run.fact("second_dropped", use(consumer, inputs, second));
        run.fact("second_commit", Transactions.refusal(second::commit));
    }

    /** Acknowledges as many messages as there are inputs; of how many the client dropped that. */
    private static int use(QueueConsumer<String> consumer, List<String> inputs, Transaction transaction) throws Exception {
        int dropped = 0;
        for (int i = 0; i < inputs.size(); i++) {
            dropped += Transactions.acknowledge(consumer, consumer.receive().id(), transaction) ? 0 : 1;
        }
        return dropped;
    }

    /** Asks again while the answer is 503: after a fault the topic may have no controller for a moment. */
    private static void splitFirst(CaseRun run, ScalableTopic topic) throws Exception {
        long limit = System.nanoTime() + CONTROLLER_LIMIT.toNanos();
        while (true) {
            try {
                run.admin().split(topic, run.admin().activeSegments(topic).firstEntry().getValue());
                return;
            } catch (ScalableAdmin.RestFailure failure) {
                if (failure.status() != 503 || System.nanoTime() > limit) {
                    throw failure;
                }
                Thread.sleep(50);
            }
        }
    }
}
