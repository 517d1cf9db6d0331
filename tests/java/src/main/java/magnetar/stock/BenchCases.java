package magnetar.stock;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Measurements: each warms up first, then repeats and hands every run's figure over. */
final class BenchCases {
    private static final Duration PATIENCE = Duration.ofSeconds(20);

    private BenchCases() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("bench_throughput", BenchCases::throughput);
        cases.put("bench_latency", BenchCases::latency);
    }

    private static Producer<byte[]> producer(CaseRun run, PulsarClient client, ScalableTopic topic) throws Exception {
        return run.closing(client.newProducer(Schema.bytes())
                .topic(topic.name())
                .sendTimeout(Duration.ofSeconds(60))
                .batchingPolicy(run.flag("batching") ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled())
                .create());
    }

    /**
     * Messages per second from the first send to the last acknowledged delivery, or with {@code publishOnly} to the
     * last receipt, in each of {@code runs} runs.
     */
    private static void throughput(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(run.intArg("segments", 1));
        Producer<byte[]> producer = producer(run, run.client(), topic);
        QueueConsumer<byte[]> consumer = run.flag("publishOnly") ? null : run.closing(run.client()
                .newQueueConsumer(Schema.bytes())
                .topic(topic.name())
                .subscriptionName("bench")
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST)
                .subscribe());
        byte[] payload = new byte[run.intArg("sizeBytes", 1024)];
        int messages = run.intArg("messages", 50_000);
        for (int i = 0; i < run.intArg("warmups", 1); i++) {
            oneRun(run, producer, consumer, payload, messages);
        }
        List<Double> rates = new ArrayList<>();
        for (int i = 0; i < run.intArg("runs", 3); i++) {
            rates.add(messages / oneRun(run, producer, consumer, payload, messages));
        }
        run.fact("messages_per_s", rates);
        run.fact("messages", messages * (run.intArg("warmups", 1) + rates.size()));
    }

    private static double oneRun(
            CaseRun run, Producer<byte[]> producer, QueueConsumer<byte[]> consumer, byte[] payload, int messages)
            throws Exception {
        int window = run.intArg("window", 1000);
        Semaphore inFlight = new Semaphore(window);
        AtomicReference<Throwable> failure = new AtomicReference<>();
        long begin = System.nanoTime();
        Readers.Background consuming = Readers.background("bench-consumer", () -> {
            for (int i = 0; consumer != null && i < messages; i++) {
                Message<byte[]> message = consumer.receive(PATIENCE);
                if (message == null) {
                    throw new IllegalStateException("only " + i + " of " + messages + " messages came");
                }
                consumer.acknowledge(message.id());
            }
        });
        for (int i = 0; i < messages; i++) {
            inFlight.acquire();
            producer.async().newMessage().value(payload).send().whenComplete((id, thrown) -> {
                if (thrown != null) {
                    failure.set(thrown);
                }
                inFlight.release();
            });
        }
        inFlight.acquire(window);
        consuming.join();
        if (failure.get() != null) {
            throw new IllegalStateException("a send failed", failure.get());
        }
        return (System.nanoTime() - begin) / 1e9;
    }

    /** Microseconds from the call of an awaited send to its return: p50 and p99 of each of {@code runs} runs. */
    private static void latency(CaseRun run) throws Exception {
        ScalableTopic topic = run.scalableTopic(1);
        Producer<byte[]> producer = producer(run, run.client(), topic);
        byte[] payload = new byte[run.intArg("sizeBytes", 1024)];
        int sends = run.intArg("sends", 1000);
        List<Double> p50 = new ArrayList<>();
        List<Double> p99 = new ArrayList<>();
        int warmups = run.intArg("warmups", 1);
        for (int i = 0; i < warmups + run.intArg("runs", 3); i++) {
            long[] nanos = new long[sends];
            for (int k = 0; k < sends; k++) {
                long begin = System.nanoTime();
                producer.newMessage().value(payload).send();
                nanos[k] = System.nanoTime() - begin;
            }
            if (i >= warmups) {
                Arrays.sort(nanos);
                p50.add(nanos[sends / 2] / 1e3);
                p99.add(nanos[sends * 99 / 100] / 1e3);
            }
        }
        run.fact("p50_us", p50);
        run.fact("p99_us", p99);
        run.fact("sends", sends * (warmups + p50.size()));
    }
}
