package magnetar.stock;

import java.time.Duration;
import java.util.concurrent.Semaphore;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.schema.Schema;

/**
 * Keyed messages from one producer: awaited one by one, or in flight up to a window, batched or not; as fast as they
 * go, or so many {@code perSecond}: then what was not sent while nothing could be is made up for.
 */
final class Load implements AutoCloseable {
    private static final Duration SEND_TIMEOUT = Duration.ofSeconds(120);

    /** How messages leave: each awaited, or in flight and each alone, or in flight and batched. */
    enum Mode { AWAITED, ASYNC_UNBATCHED, ASYNC_BATCHED }

    private final Producer<String> producer;
    private final Tally tally;
    private final Mode mode;
    private final int keys;
    private final int paddingBytes;
    private final int window;
    private final int perSecond;
    private final Semaphore inFlight;
    private Thread thread;
    private volatile boolean stopping;

    Load(CaseRun run, PulsarClient client, String topic, Tally tally) throws Exception {
        this.mode = Mode.valueOf(run.arg("mode", Mode.ASYNC_BATCHED.name()));
        this.keys = run.intArg("keys", 40);
        this.paddingBytes = run.intArg("paddingBytes", 100);
        this.window = run.intArg("window", 200);
        this.perSecond = run.intArg("perSecond", Integer.MAX_VALUE);
        this.inFlight = new Semaphore(window);
        this.tally = tally;
        this.producer = run.closing(client.newProducer(Schema.string())
                .topic(topic)
                .sendTimeout(SEND_TIMEOUT)
                .batchingPolicy(mode == Mode.ASYNC_BATCHED ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled())
                .create());
    }

    /** Sends that many messages, keys in turn, and waits until each is acknowledged or failed. */
    void send(int count) throws InterruptedException {
        for (int i = 0; i < count; i++) {
            sendOne("k" + i % keys);
        }
        settle();
    }

    /** Sends in a thread of its own until {@link #stop}. */
    void start() {
        thread = new Thread(() -> {
            try {
                long begin = System.nanoTime();
                for (int i = 0; !stopping; i++) {
                    while (i / (double) perSecond > (System.nanoTime() - begin) / 1e9) {
                        Thread.sleep(1);
                    }
                    sendOne("k" + i % keys);
                }
                settle();
            } catch (InterruptedException interrupted) {
                Thread.currentThread().interrupt();
            }
        }, Thread.currentThread().getName() + "-load");
        thread.setDaemon(true);
        thread.start();
    }

    /** No further sends; returns when every one in flight is acknowledged or failed. */
    void stop() throws InterruptedException {
        stopping = true;
        thread.join();
    }

    @Override
    public void close() throws Exception {
        producer.close();
    }

    private void settle() throws InterruptedException {
        inFlight.acquire(window);
        inFlight.release(window);
    }

    private void sendOne(String key) throws InterruptedException {
        inFlight.acquire();
        String value = tally.next(key, paddingBytes);
        if (mode == Mode.AWAITED) {
            try {
                producer.newMessage().key(key).value(value).send();
                settle(value, null, null);
            } catch (Exception failure) {
                settle(value, null, failure);
            }
            return;
        }
        producer.async().newMessage().key(key).value(value).send()
                .whenComplete((id, failure) -> settle(value, id, failure));
    }

    private void settle(String value, MessageId id, Throwable failure) {
        if (failure == null) {
            tally.acknowledged(value);
        } else {
            tally.failed(failure);
        }
        inFlight.release();
    }
}
