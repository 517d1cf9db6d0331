package magnetar.stock;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Semaphore;
import java.util.function.Supplier;
import org.apache.pulsar.client.api.v5.MessageId;
import org.apache.pulsar.client.api.v5.Producer;
import org.apache.pulsar.client.api.v5.PulsarClient;
import org.apache.pulsar.client.api.v5.QueueConsumer;
import org.apache.pulsar.client.api.v5.StreamConsumer;
import org.apache.pulsar.client.api.v5.Transaction;
import org.apache.pulsar.client.api.v5.config.BatchingPolicy;
import org.apache.pulsar.client.api.v5.schema.Schema;
import org.apache.pulsar.client.impl.transaction.TransactionImpl;

/** What the transaction cases share: values, sends, ends, and a look behind the client's own checks. */
final class Transactions {
    private static final int KEYS = 40;
    private static final int WINDOW = 1000;

    private Transactions() {
    }

    static Producer<String> producer(CaseRun run, PulsarClient client, String topic) throws Exception {
        return run.closing(client.newProducer(Schema.string())
                .topic(topic)
                .batchingPolicy(run.flag("batching") ? BatchingPolicy.builder().build() : BatchingPolicy.ofDisabled())
                .create());
    }

    /** {@code <name>|0 ... <name>|count-1}. */
    static List<String> values(String name, int count) {
        List<String> values = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            values.add(name + "|" + i);
        }
        return values;
    }

    /** Sends with keys in turn, in the transaction unless it is null, and waits for all receipts. */
    static void send(Producer<String> producer, Transaction transaction, List<String> values) throws Exception {
        Semaphore inFlight = new Semaphore(WINDOW);
        List<CompletableFuture<MessageId>> sends = new ArrayList<>();
        for (int i = 0; i < values.size(); i++) {
            inFlight.acquire();
            var message = producer.async().newMessage().key("k" + i % KEYS).value(values.get(i));
            if (transaction != null) {
                message.transaction(transaction);
            }
            CompletableFuture<MessageId> sent = message.send();
            sent.whenComplete((id, failure) -> inFlight.release());
            sends.add(sent);
        }
        for (CompletableFuture<MessageId> sent : sends) {
            sent.get();
        }
    }

    /** Commits or aborts, as the argument {@code end} says. */
    static void end(Transaction transaction, boolean commit) throws Exception {
        if (commit) {
            transaction.commit();
        } else {
            transaction.abort();
        }
    }

    /**
     * Acknowledges in the transaction; false if the client dropped that. It does so without a word, and goes on to
     * commit, when the segment of the message has left the layout: to be used is then a copy of a message that was
     * acknowledged before, which the client has kept since it connected again.
     */
    static boolean acknowledge(QueueConsumer<?> consumer, MessageId message, Transaction transaction) {
        consumer.acknowledge(message, transaction);
        return new ConsumerInside(consumer).attached(ConsumerInside.segmentOf(message));
    }

    /**
     * Acknowledges cumulatively in the transaction what was received last of a batch; the places in the batch of
     * messages that this is not for. The client leaves out, without a word, segments that were taken from the consumer;
     * and it acknowledges too late for the transaction where one is still being attached to.
     */
    static Set<Integer> acknowledge(StreamConsumer<?> consumer, List<MessageId> batch, Transaction transaction) {
        ConsumerInside inside = new ConsumerInside(consumer);
        Set<Integer> dropped = new TreeSet<>();
        for (int place = 0; place < batch.size(); place++) {
            if (!inside.attachedNow(ConsumerInside.segmentOf(batch.get(place)))) {
                dropped.add(place);
            }
        }
        consumer.acknowledgeCumulative(batch.get(batch.size() - 1), transaction);
        return dropped;
    }

    static boolean commits(CaseRun run) {
        return run.arg("end", "commit").equals("commit");
    }

    /** The class and the sentence of what the call throws, or "none". */
    static String refusal(Call call) {
        try {
            call.run();
            return "none";
        } catch (Exception failure) {
            StringBuilder text = new StringBuilder();
            for (Throwable cause = failure; cause != null; cause = cause.getCause()) {
                text.append(cause.getClass().getSimpleName()).append(": ").append(cause.getMessage()).append("; ");
            }
            return text.toString();
        }
    }

    /** Something that may throw. */
    @FunctionalInterface
    interface Call {
        void run() throws Exception;
    }

    /** Returns when the broker has answered every send and acknowledgement of the transaction so far. */
    static void awaitAnswered(Transaction transaction) throws Exception {
        TransactionImpl inner = inner(transaction);
        while (inner.getOpCount() > 0) {
            Thread.sleep(1);
        }
    }

    static String id(Transaction transaction) throws Exception {
        TransactionImpl inner = inner(transaction);
        return inner.getTxnIdMostBits() + "_" + inner.getTxnIdLeastBits();
    }

    /**
     * Makes the client believe that the transaction is still open, so that what follows reaches the broker: what a
     * client with a slow clock, or one that lost the answer to its END_TXN, would send.
     */
    static void pretendOpen(Transaction transaction) throws Exception {
        Field state = TransactionImpl.class.getDeclaredField("state");
        state.setAccessible(true);
        state.set(inner(transaction), org.apache.pulsar.client.api.transaction.Transaction.State.OPEN);
    }

    /** Whether one of the transaction's sends or acknowledgements failed. The client tells of that at a commit only. */
    static boolean anyFailed(Transaction transaction) throws Exception {
        Field failed = TransactionImpl.class.getDeclaredField("hasOpsFailed");
        failed.setAccessible(true);
        return failed.getBoolean(inner(transaction));
    }

    private static TransactionImpl inner(Transaction transaction) throws Exception {
        Method method = transaction.getClass().getDeclaredMethod("v4Transaction");
        method.setAccessible(true);
        return (TransactionImpl) method.invoke(transaction);
    }

    /** Looks every few milliseconds until it holds; the case's deadline ends a wait in vain. */
    static void until(Supplier<Boolean> holds) throws InterruptedException {
        while (!holds.get()) {
            Thread.sleep(2);
        }
    }
}
