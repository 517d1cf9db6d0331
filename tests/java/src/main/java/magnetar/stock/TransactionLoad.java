package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.config.BackoffPolicy;

/**
 * Random transactions over one input topic and several output topics, and the judgement of what they left behind.
 *
 * <p>A transaction takes some inputs, acknowledges each and writes one {@code out of} message for it, writes messages
 * of its own, and commits or aborts. Of its own messages all or none must be stored, as its end says; where the end
 * threw, nobody knows, and all or none will do. Of each input one output must be stored in the end.
 *
 * <p>An abort gives the broker the inputs back whose acknowledgements it has. The client itself refuses an
 * acknowledgement in a transaction that has timed out by its own clock, and the queue consumer does not say so: the
 * input stays with the consumer until that acknowledges it negatively. So the inputs of every transaction that failed
 * are acknowledged negatively; the broker ignores that for those that transactions have or had.
 */
final class TransactionLoad {
    private static final Duration STEP = Duration.ofMillis(100);
    private static final int EXAMPLES = 5;
    private static final String OUTPUT = "out of ";

    /** How a transaction ended, as far as the client knows. */
    enum End { COMMITTED, ABORTED, UNKNOWN }

    private final PulsarClient client;
    private final QueueConsumer<String> inputs;
    private final List<Producer<String>> outputs = new ArrayList<>();
    private final AtomicInteger numbers = new AtomicInteger();
    private final Map<String, List<String>> written = new LinkedHashMap<>();
    private final Map<String, End> ends = new LinkedHashMap<>();
    private final List<String> failures = new ArrayList<>();
    private final AtomicInteger dropped = new AtomicInteger();
    private final AtomicInteger givenBack = new AtomicInteger();
    private final Stall ending = new Stall();

    TransactionLoad(CaseRun run, Duration timeout, ScalableTopic input, Collection<ScalableTopic> outputTopics)
            throws Exception {
        client = run.transactionalClient(timeout);
        inputs = run.closing(Readers.queue(client, input.name(), "transform")
                .negativeAckRedeliveryBackoff(BackoffPolicy.exponential(STEP, STEP))
                .subscribe());
        for (ScalableTopic topic : outputTopics) {
            outputs.add(Transactions.producer(run, client, topic.name()));
        }
    }

    /** A transaction that has not ended yet. */
    final class Open {
        private final String name = "t" + numbers.getAndIncrement();
        private final List<MessageId> received = new ArrayList<>();
        private final Transaction transaction = client.newTransaction();

        private Open() throws Exception {
        }

        private void work(Random random, int maximumInputs, int maximumOwn) throws Exception {
            int taken = random.nextInt(maximumInputs + 1);
            for (int i = 0; i < taken; i++) {
                Message<String> message = inputs.receive(STEP);
                if (message == null) {
                    break;
                }
                received.add(message.id());
                if (!Transactions.acknowledge(inputs, message.id(), transaction)) {
                    dropped.incrementAndGet();
                    continue;
                }
                Transactions.send(any(random), transaction, List.of(OUTPUT + message.value()));
            }
            int own = maximumOwn == 0 ? 0 : 1 + random.nextInt(maximumOwn);
            List<String> values = Transactions.values(name, own);
            synchronized (TransactionLoad.this) {
                written.put(name, values);
                ends.put(name, End.UNKNOWN);
            }
            for (String value : values) {
                Transactions.send(any(random), transaction, List.of(value));
            }
        }

        void end(boolean commit) throws Exception {
            Transactions.end(transaction, commit);
            synchronized (TransactionLoad.this) {
                ends.put(name, commit ? End.COMMITTED : End.ABORTED);
                ending.step();
            }
            // An abort succeeds whatever became of the acknowledgements.
            if (!commit && Transactions.anyFailed(transaction)) {
                giveBack();
            }
        }

        private void giveBack() {
            received.forEach(inputs::negativeAcknowledge);
            givenBack.addAndGet(received.size());
        }
    }

    private Producer<String> any(Random random) {
        return outputs.get(random.nextInt(outputs.size()));
    }

    Open open(Random random) throws Exception {
        Open open = new Open();
        open.work(random, 3, 6);
        return open;
    }

    /** One whole transaction; what it throws is counted. */
    void one(Random random, boolean mayAbort) {
        one(random, mayAbort, Duration.ZERO);
    }

    /** A transaction that begins its work after a pause; what it throws is counted. */
    void one(Random random, boolean mayAbort, Duration pause) {
        Open open = null;
        try {
            boolean commit = !mayAbort || random.nextInt(10) < 7;
            open = new Open();
            Thread.sleep(pause.toMillis());
            open.work(random, mayAbort ? 3 : 10, mayAbort ? 6 : 0);
            open.end(commit);
        } catch (Exception failure) {
            failed(failure);
            if (open != null) {
                open.giveBack();
            }
        }
    }

    synchronized void failed(Exception failure) {
        failures.add(Transactions.refusal(() -> {
            throw failure;
        }));
    }

    synchronized int endedCount() {
        return (int) ends.values().stream().filter(end -> end != End.UNKNOWN).count();
    }

    /** How far it is, for a case that does not end. */
    synchronized Map<String, Object> progress() {
        Map<String, Object> progress = new TreeMap<>();
        progress.put("begun", numbers.get());
        for (End end : End.values()) {
            progress.put(end.name().toLowerCase(), ends.values().stream().filter(end::equals).count());
        }
        progress.put("inputs_of_the_client", new ConsumerInside(inputs).describe());
        progress.put("acknowledgements_dropped", dropped.get());
        progress.put("inputs_given_back", givenBack.get());
        progress.put("failures", failures.size());
        progress.put("last_failures", List.copyOf(
                failures.subList(Math.max(0, failures.size() - EXAMPLES), failures.size())));
        return progress;
    }

    static List<String> outputsOf(List<String> inputs) {
        return inputs.stream().map(input -> OUTPUT + input).toList();
    }

    /** Compares what is stored on all output topics together with what became of each transaction. */
    synchronized void report(CaseRun run, List<String> allInputs, List<String> stored) {
        Map<String, Integer> times = new LinkedHashMap<>();
        stored.forEach(value -> times.merge(value, 1, Integer::sum));
        List<String> torn = new ArrayList<>();
        List<String> lost = new ArrayList<>();
        List<String> shown = new ArrayList<>();
        int unknownStored = 0;
        for (Map.Entry<String, List<String>> entry : written.entrySet()) {
            long found = entry.getValue().stream().filter(times::containsKey).count();
            End end = ends.get(entry.getKey());
            if (found != 0 && found != entry.getValue().size()) {
                torn.add(entry.getKey() + " " + end + " " + found + "/" + entry.getValue().size());
            } else if (end == End.COMMITTED && found == 0 && !entry.getValue().isEmpty()) {
                lost.add(entry.getKey());
            } else if (end == End.ABORTED && found != 0) {
                shown.add(entry.getKey());
            } else if (end == End.UNKNOWN && found != 0) {
                unknownStored++;
            }
        }
        Set<String> expected = new HashSet<>(outputsOf(allInputs));
        for (End end : End.values()) {
            run.fact(end.name().toLowerCase(), ends.values().stream().filter(end::equals).count());
        }
        run.fact("unknown_stored", unknownStored);
        run.fact("longest_stall_ms", ending.longestMillis());
        run.fact("failures", failures.size());
        Map<String, Integer> kinds = new TreeMap<>();
        failures.forEach(failure -> kinds.merge(failure.replaceAll("[0-9]+", "N"), 1, Integer::sum));
        run.fact("failure_kinds", kinds);
        run.fact("torn", torn.stream().limit(EXAMPLES).toList());
        run.fact("committed_but_missing", lost.stream().limit(EXAMPLES).toList());
        run.fact("aborted_but_stored", shown.stream().limit(EXAMPLES).toList());
        run.fact("inputs", allInputs.size());
        run.fact("acknowledgements_dropped", dropped.get());
        run.fact("inputs_given_back", givenBack.get());
        run.fact("inputs_missing", expected.stream().filter(value -> !times.containsKey(value)).count());
        run.fact("inputs_twice", expected.stream().filter(value -> times.getOrDefault(value, 0) > 1).count());
        run.fact("stored_twice", times.entrySet().stream()
                .filter(entry -> entry.getValue() > 1).map(Map.Entry::getKey).limit(EXAMPLES).toList());
    }
}
