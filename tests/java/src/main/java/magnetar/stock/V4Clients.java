package magnetar.stock;

import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;

/** What v4 cases share: clients, a namespace and the name of a topic, and waiting for a condition. */
final class V4Clients {
    private static final int LIMIT_MS = 15_000;

    private V4Clients() {
    }

    static PulsarClient client(CaseRun run) throws PulsarClientException {
        return run.closing(PulsarClient.builder().serviceUrl(run.url()).build());
    }

    /** A client whose operations fail after a time. */
    static PulsarClient client(CaseRun run, int operationTimeoutS) throws PulsarClientException {
        return run.closing(PulsarClient.builder()
                .serviceUrl(run.url())
                .operationTimeout(operationTimeoutS, TimeUnit.SECONDS)
                .build());
    }

    static PulsarAdmin admin(CaseRun run) throws PulsarClientException {
        return run.closing(PulsarAdmin.builder().serviceHttpUrl(run.arg("web", "")).build());
    }

    /** A new namespace, which is deleted when the case ends. */
    static String namespace(CaseRun run, PulsarAdmin admin) throws Exception {
        String name = "public/" + run.localName();
        admin.namespaces().createNamespace(name);
        run.closing(() -> admin.namespaces().deleteNamespace(name, true));
        return name;
    }

    /** Whether a condition becomes true within {@link #LIMIT_MS}. */
    static boolean until(BooleanSupplier condition) throws InterruptedException {
        for (long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(LIMIT_MS); System.nanoTime() < end;) {
            if (condition.getAsBoolean()) {
                return true;
            }
            Thread.sleep(20);
        }
        return false;
    }

    /** The topic of the case, in the namespace public/default. */
    static String topic(CaseRun run) {
        return "persistent://public/default/" + run.localName();
    }
}
