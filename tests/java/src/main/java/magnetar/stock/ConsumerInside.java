package magnetar.stock;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Collection;
import java.util.Map;
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
