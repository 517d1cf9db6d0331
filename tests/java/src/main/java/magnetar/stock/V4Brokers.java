package magnetar.stock;

import java.util.ArrayList;
import java.util.List;
import org.apache.pulsar.client.admin.PulsarAdmin;

/** The brokers of a cluster one by one, for requests that are about the broker that gets them. */
final class V4Brokers {
    private V4Brokers() {
    }

    /** An admin client for each broker. */
    static List<PulsarAdmin> each(CaseRun run, PulsarAdmin admin) throws Exception {
        List<String> brokers = admin.brokers().getActiveBrokers();
        if (brokers.size() == 1) {
            return List.of(admin);
        }
        List<PulsarAdmin> found = new ArrayList<>();
        for (String broker : brokers) {
            found.add(run.closing(PulsarAdmin.builder().serviceHttpUrl("http://" + broker).build()));
        }
        return found;
    }

    /** Has each broker check the backlogs of its topics. */
    static void checkBacklogs(CaseRun run, PulsarAdmin admin) throws Exception {
        for (PulsarAdmin broker : each(run, admin)) {
            broker.brokers().backlogQuotaCheck();
        }
    }
}
