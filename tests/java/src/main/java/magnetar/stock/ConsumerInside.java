package magnetar.stock;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Collection;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import org.apache.pulsar.client.api.v5.MessageId;

/** A look into the client's queue or stream consumer: what it holds back, and to which segments it is attached. */
final class ConsumerInside {
    private final Object consumer;

    ConsumerInside(Object consumer) {
        this.consumer = consumer;
    }

    /** How many messages have come that nobody has taken; copies count too. */
    int waiting() {
        return ((Collection<?>) field("messageQueue")).size();
    }

    /** Whether an acknowledgement of a message of that segment goes anywhere. */
    boolean attached(long segment) {
        Object attaching = ((Map<?, ?>) field("segmentConsumers")).get(segment);
        return attaching != null && !((CompletableFuture<?>) attaching).isCompletedExceptionally();
    }

    /** Whether it does so before the call that acknowledges has returned. */
    boolean attachedNow(long segment) {
        Object attaching = ((Map<?, ?>) field("segmentConsumers")).get(segment);
        return attaching != null && ((CompletableFuture<?>) attaching).isDone()
                && !((CompletableFuture<?>) attaching).isCompletedExceptionally();
    }

    /** How many messages nobody has taken, and how attaching to each segment stands. */
    String describe() {
        Map<Object, Object> segments = new TreeMap<>();
        ((Map<?, ?>) field("segmentConsumers")).forEach((segment, attaching) ->
                segments.put(segment, state((CompletableFuture<?>) attaching)));
        return waiting() + " messages wait, segments " + segments;
    }

    private static String state(CompletableFuture<?> attaching) {
        if (!attaching.isDone()) {
            return "attaching";
        }
        return attaching.isCompletedExceptionally() ? "failed" : "attached";
    }

    static long segmentOf(MessageId id) {
        try {
            Method method = id.getClass().getDeclaredMethod("segmentId");
            method.setAccessible(true);
            return (long) method.invoke(id);
        } catch (ReflectiveOperationException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private Object field(String name) {
        try {
            Field field = consumer.getClass().getDeclaredField(name);
            field.setAccessible(true);
            return field.get(consumer);
        } catch (ReflectiveOperationException failure) {
            throw new IllegalStateException(failure);
        }
    }
}
