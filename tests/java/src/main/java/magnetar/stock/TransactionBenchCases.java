package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Measurements of transactions: each warms up first, then hands every run's figures over. */
final class TransactionBenchCases {
    private static final Duration TIMEOUT = Duration.ofSeconds(120);
    private static final Duration PATIENCE = Duration.ofSeconds(20);
    private static final int WINDOW = 1000;

    private TransactionBenchCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("bench_transactions", TransactionBenchCases::rate);
        cases.put("bench_visibility", TransactionBenchCases::visibility);
        cases.put("bench_end", TransactionBenchCases::endCost);
    }

    private static Producer<byte[]> producer(CaseRun run, PulsarClient client, ScalableTopic topic) throws Exception {
        return run.closing(client.newProducer(Schema.bytes())
                .topic(topic.name())
                .batchingPolicy(run.flag("batching") ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled())
                .create());
    }

    private static void send(Producer<byte[]> producer, Transaction transaction, byte[] payload, int sends) throws Exception {
        Semaphore inFlight = new Semaphore(WINDOW);
        List<CompletableFuture<MessageId>> receipts = new ArrayList<>();
        for (int i = 0; i < sends; i++) {
            inFlight.acquire();
            CompletableFuture<MessageId> receipt = producer.async().newMessage()
                    .key("k" + i).value(payload).transaction(transaction).send();
            receipt.whenComplete((id, failure) -> inFlight.release());
            receipts.add(receipt);
        }
        for (CompletableFuture<MessageId> receipt : receipts) {
            receipt.get();
        }
    }

    /** Committed transactions of {@code sends} per second, {@code concurrent} at once, and how long commits take. */
    private static void rate(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient client = run.transactionalClient(TIMEOUT);
        Producer<byte[]> producer = producer(run, client, topic);
        List<Double> rates = new ArrayList<>();
        List<Double> p50 = new ArrayList<>();
        List<Double> p99 = new ArrayList<>();
        List<Double> took = new ArrayList<>();
        int warmups = run.intArg("warmups", 1);
        int committed = 0;
        for (int i = 0; i < warmups + run.intArg("runs", 3); i++) {
            ConcurrentLinkedQueue<Long> commits = new ConcurrentLinkedQueue<>();
            double seconds = transactionsFor(run, client, producer, commits);
            took.add(seconds);
            committed += commits.size();
            if (i >= warmups) {
                long[] nanos = commits.stream().mapToLong(Long::longValue).sorted().toArray();
                rates.add(nanos.length / seconds);
                p50.add(nanos[nanos.length / 2] / 1e6);
                p99.add(nanos[(int) (nanos.length * 99L / 100)] / 1e6);
            }
        }
        run.fact("transactions_per_s", rates);
        run.fact("commit_p50_ms", p50);
        run.fact("commit_p99_ms", p99);
        run.fact("seconds", took); // warm-ups too
        run.fact("committed", committed); // warm-ups too
    }

    /** Runs for {@code seconds}; gives the seconds until the last one had ended. */
    private static double transactionsFor(
            CaseRun run, PulsarClient client, Producer<byte[]> producer, ConcurrentLinkedQueue<Long> commits)
            throws Exception {
        byte[] payload = new byte[run.intArg("sizeBytes", 1024)];
        int sends = run.intArg("sends", 10);
        AtomicBoolean stopping = new AtomicBoolean();
        long begin = System.nanoTime();
        List<Readers.Background> threads = new ArrayList<>();
        for (int i = 0; i < run.intArg("concurrent", 32); i++) {
            threads.add(Readers.background("bench-" + i, () -> {
                while (!stopping.get()) {
                    Transaction transaction = client.newTransaction();
                    send(producer, transaction, payload, sends);
                    long before = System.nanoTime();
                    transaction.commit();
                    commits.add(System.nanoTime() - before);
                }
            }));
        }
        Thread.sleep(run.intArg("seconds", 8) * 1000L);
        stopping.set(true);
        for (Readers.Background thread : threads) {
            thread.join();
        }
        return (System.nanoTime() - begin) / 1e9;
    }

    /** Milliseconds from the call of commit until a consumer has the last of ten messages; one transaction at a time. */
    private static void visibility(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient client = run.transactionalClient(TIMEOUT);
        Producer<byte[]> producer = producer(run, client, topic);
        QueueConsumer<byte[]> consumer = run.closing(run.client().newQueueConsumer(Schema.bytes())
                .topic(topic.name())
                .subscriptionName("bench")
                .subscribe());
        byte[] payload = new byte[run.intArg("sizeBytes", 1024)];
        int sends = run.intArg("sends", 10);
        int rounds = run.intArg("rounds", 300);
        int warmups = rounds / 3;
        long[] nanos = new long[rounds];
        for (int i = -warmups; i < rounds; i++) {
            Transaction transaction = client.newTransaction();
            send(producer, transaction, payload, sends);
            long begin = System.nanoTime();
            CompletableFuture<Void> committed = transaction.async().commit();
            for (int k = 0; k < sends; k++) {
                Message<byte[]> message = consumer.receive(PATIENCE);
                if (message == null) {
                    throw new IllegalStateException("only " + k + " of " + sends + " messages came");
                }
                consumer.acknowledge(message.id());
            }
            if (i >= 0) {
                nanos[i] = System.nanoTime() - begin;
            }
            committed.get();
        }
        Arrays.sort(nanos);
        run.fact("visible_p50_ms", nanos[rounds / 2] / 1e6);
        run.fact("visible_p99_ms", nanos[rounds * 99 / 100] / 1e6);
    }

    /** Milliseconds of commit for a transaction of {@code operations} sends, nothing else under way: each run's. */
    private static void endCost(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 4));
        PulsarClient client = run.transactionalClient(TIMEOUT);
        Producer<byte[]> producer = producer(run, client, topic);
        byte[] payload = new byte[run.intArg("sizeBytes", 100)];
        List<Double> took = new ArrayList<>();
        int warmups = run.intArg("warmups", 1);
        for (int i = 0; i < warmups + run.intArg("runs", 5); i++) {
            Transaction transaction = client.newTransaction();
            send(producer, transaction, payload, run.intArg("operations", 100));
            long begin = System.nanoTime();
            transaction.commit();
            if (i >= warmups) {
                took.add((System.nanoTime() - begin) / 1e6);
            }
        }
        run.fact("end_ms", took);
    }
}
