package magnetar.stock;

import static magnetar.stock.V4Clients.client;

import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerAccessMode;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;

/** Access modes and names of producers: who is admitted, refused, queued or fenced. */
final class V4Access {
    private static final int LIMIT_S = 15;
    private static final int QUIET_MS = 300;

    private V4Access() {
    }

    static void addTo(Map<String, Case> cases) {
        cases.put("v4_access_modes", V4Access::modes);
        cases.put("v4_access_waiting", V4Access::waiting);
        cases.put("v4_access_fencing", V4Access::fencing);
        cases.put("v4_producer_names", V4Access::names);
    }

    private static CompletableFuture<Producer<String>> create(
            CaseRun run, PulsarClient client, ProducerAccessMode mode, String name) {
        var builder = client.newProducer(Schema.STRING)
                .topic("persistent://public/default/" + run.localName())
                .accessMode(mode);
        return (name == null ? builder : builder.producerName(name)).createAsync();
    }

    /** "ok", or the simple name of the exception. */
    private static String outcome(CompletableFuture<?> future) throws Exception {
        try {
            future.get(LIMIT_S, TimeUnit.SECONDS);
            return "ok";
        } catch (ExecutionException failure) {
            return failure.getCause().getClass().getSimpleName();
        } catch (TimeoutException none) {
            return "no answer";
        }
    }

    private static String send(Producer<String> producer) {
        try {
            producer.send("x");
            return "ok";
        } catch (PulsarClientException failure) {
            return failure.getClass().getSimpleName();
        }
    }

    private static boolean waits(CompletableFuture<?> future) throws Exception {
        Thread.sleep(QUIET_MS);
        return !future.isDone();
    }

    /** Each mode against a shared and against an exclusive producer. */
    private static void modes(CaseRun run) throws Exception {
        PulsarClient client = client(run, LIMIT_S);
        Producer<String> shared = create(run, client, ProducerAccessMode.Shared, null).get();
        run.fact("shared_epoch", String.valueOf(topicEpoch(shared)));
        run.fact("exclusive_beside_shared", outcome(create(run, client, ProducerAccessMode.Exclusive, null)));
        run.fact("shared_beside_shared", outcome(create(run, client, ProducerAccessMode.Shared, "second")));
        shared.close();
        PulsarClient other = client(run, LIMIT_S);
        Producer<String> again = create(run, other, ProducerAccessMode.Shared, null).get();
        again.close();
        client.close();
        client = client(run, LIMIT_S);
        Producer<String> exclusive = create(run, client, ProducerAccessMode.Exclusive, null).get();
        run.fact("shared_beside_exclusive", outcome(create(run, client, ProducerAccessMode.Shared, null)));
        run.fact("exclusive_beside_exclusive", outcome(create(run, client, ProducerAccessMode.Exclusive, null)));
        run.fact("send", send(exclusive));
        run.fact("epoch", String.valueOf(topicEpoch(exclusive)));
        exclusive.close();
        Producer<String> next = create(run, client, ProducerAccessMode.Exclusive, null).get();
        run.fact("next_epoch", String.valueOf(topicEpoch(next)));
        next.close();
        run.fact("shared_after_exclusive", outcome(create(run, client, ProducerAccessMode.Shared, null)));
    }

    private static Object topicEpoch(Producer<?> producer) throws Exception {
        var field = producer.getClass().getDeclaredField("topicEpoch");
        field.setAccessible(true);
        return ((java.util.Optional<?>) field.get(producer)).orElse(null);
    }

    /** Producers that wait for the topic get it one after the other. */
    private static void waiting(CaseRun run) throws Exception {
        PulsarClient client = client(run, LIMIT_S);
        Producer<String> first = create(run, client, ProducerAccessMode.WaitForExclusive, "first").get();
        CompletableFuture<Producer<String>> second = create(run, client, ProducerAccessMode.WaitForExclusive, "second");
        run.fact("second_waits", waits(second));
        CompletableFuture<Producer<String>> third = create(run, client, ProducerAccessMode.WaitForExclusive, "third");
        run.fact("third_waits", waits(third));
        run.fact("exclusive_meanwhile", outcome(create(run, client, ProducerAccessMode.Exclusive, null)));
        run.fact("shared_meanwhile", outcome(create(run, client, ProducerAccessMode.Shared, null)));
        first.close();
        run.fact("second", outcome(second));
        run.fact("third_still_waits", waits(third));
        run.fact("send", send(second.get()));
        second.get().close();
        run.fact("third", outcome(third));
        run.fact("send_of_third", send(third.get()));
    }

    /** A producer that fences closes those that are there, and those that wait. */
    private static void fencing(CaseRun run) throws Exception {
        PulsarClient client = client(run, LIMIT_S);
        Producer<String> holder = create(run, client, ProducerAccessMode.Exclusive, null).get();
        CompletableFuture<Producer<String>> waiting = create(run, client, ProducerAccessMode.WaitForExclusive, null);
        run.fact("waits", waits(waiting));
        PulsarClient other = client(run, LIMIT_S);
        Producer<String> fencing = create(run, other, ProducerAccessMode.ExclusiveWithFencing, null).get();
        run.fact("waiting", outcome(waiting));
        run.fact("send_of_fencing", send(fencing));
        run.fact("send_of_fenced", send(holder));
        run.fact("shared_beside_fencing", outcome(create(run, client, ProducerAccessMode.Shared, null)));
        // It fences itself the same way.
        Producer<String> again = create(run, client, ProducerAccessMode.ExclusiveWithFencing, null).get();
        run.fact("send_of_second_fencing", send(again));
        run.fact("send_of_first_fencing", send(fencing));
        again.close();
        Producer<String> waited = create(run, client, ProducerAccessMode.WaitForExclusive, null).get();
        create(run, other, ProducerAccessMode.ExclusiveWithFencing, null).get();
        run.fact("send_of_fenced_that_waited", send(waited));
    }

    /** A name belongs to one producer at a time. */
    private static void names(CaseRun run) throws Exception {
        PulsarClient client = client(run, LIMIT_S);
        Producer<String> first = create(run, client, ProducerAccessMode.Shared, "name").get();
        run.fact("same_client", outcome(create(run, client, ProducerAccessMode.Shared, "name")));
        run.fact("other_client", outcome(create(run, client(run, LIMIT_S), ProducerAccessMode.Shared, "name")));
        run.fact("send", send(first));
        first.close();
        Producer<String> second = create(run, client, ProducerAccessMode.Shared, "name").get();
        run.fact("last_sequence_id", second.getLastSequenceId());
        run.fact("send_of_second", send(second));
    }
}
