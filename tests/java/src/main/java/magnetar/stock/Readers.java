package magnetar.stock;

import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.HashSet;
import java.util.Set;
import java.util.function.BooleanSupplier;
import java.util.function.Consumer;
import org.apache.pulsar.client.api.v5.Message;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.QueueConsumerBuilder;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumerBuilder;
import org.apache.pulsar.client.api.v5.config.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.v5.schema.Schema;

/** Ways to read until something holds, or until nothing more comes. */
final class Readers {
    /** How long nothing must come before a subscription counts as empty. */
    static final Duration QUIET = Duration.ofMillis(1000);

    private static final Duration STEP = Duration.ofMillis(100);

    private Readers() {
    }

    /** One way of receiving, whatever the kind of consumer. */
    @FunctionalInterface
    interface Receive<T> {
        Message<T> next(Duration timeout) throws Exception;
    }

    static QueueConsumerBuilder<String> queue(PulsarClient client, String topic, String subscription) {
        return client.newQueueConsumer(Schema.string())
                .topic(topic)
                .subscriptionName(subscription)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    /** Acks leave at once: what a case acknowledged must not come again because the client was still grouping. */
    static StreamConsumerBuilder<String> stream(PulsarClient client, String topic, String subscription) {
        return client.newStreamConsumer(Schema.string())
                .topic(topic)
                .subscriptionName(subscription)
                .acknowledgmentGroupTime(Duration.ZERO)
                .subscriptionInitialPosition(SubscriptionInitialPosition.EARLIEST);
    }

    static <T> void readUntil(Receive<T> receive, BooleanSupplier done, Consumer<Message<T>> each) throws Exception {
        while (!done.getAsBoolean()) {
            Message<T> message = receive.next(STEP);
            if (message != null) {
                each.accept(message);
            }
        }
    }

    /** Reads until {@link #QUIET} passes without a message; returns how many came. */
    static <T> int readUntilQuiet(Receive<T> receive, Consumer<Message<T>> each) throws Exception {
        int count = 0;
        for (Message<T> message = receive.next(QUIET); message != null; message = receive.next(QUIET)) {
            each.accept(message);
            count++;
        }
        return count;
    }

    /** Passes each stored message on once: a segment that changes its owner delivers the unacknowledged again. */
    static <T> Consumer<Message<T>> oncePerId(Consumer<Message<T>> each) {
        Set<ByteBuffer> seen = new HashSet<>();
        return message -> {
            if (seen.add(ByteBuffer.wrap(message.id().toByteArray()))) {
                each.accept(message);
            }
        };
    }

    static void drainQueue(QueueConsumer<String> consumer, Tally.Received received, BooleanSupplier done) throws Exception {
        readUntil(consumer::receive, done, message -> {
            received.add(message.value());
            consumer.acknowledge(message.id());
        });
    }

    static void drainStream(StreamConsumer<String> consumer, Tally.Received received, BooleanSupplier done) throws Exception {
        readUntil(consumer::receive, done, message -> {
            received.add(message.value());
            consumer.acknowledgeCumulative(message.id());
        });
    }

    /** Runs a reading loop in a thread of its own; {@link Background#join} hands its failure on. */
    static Background background(String name, Loop loop) {
        return new Background(name, loop);
    }

    /** A loop that may throw. */
    @FunctionalInterface
    interface Loop {
        void run() throws Exception;
    }

    /** A running loop. */
    static final class Background {
        private final Thread thread;
        private volatile Exception failure;

        private Background(String name, Loop loop) {
            thread = new Thread(() -> {
                try {
                    loop.run();
                } catch (Exception thrown) {
                    failure = thrown;
                }
            }, name);
            thread.setDaemon(true);
            thread.start();
        }

        void join() throws Exception {
            thread.join();
            if (failure != null) {
                throw failure;
            }
        }

        /** False when the loop is still running after that time. */
        boolean join(Duration limit) throws Exception {
            thread.join(limit.toMillis());
            if (failure != null) {
                throw failure;
            }
            return !thread.isAlive();
        }
    }
}
