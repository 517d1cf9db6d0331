package magnetar.stock;

import java.util.Map;
import java.util.TreeMap;

/** The cases of the v4 API and of the admin library. The class path says of which version they are: none of v5. */
public final class V4Driver {
    private V4Driver() {
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, Case> cases = new TreeMap<>();
        V4Cases.addTo(cases);
        V4TransactionCases.addTo(cases);
        AdminCases.addTo(cases);
        V4Compaction.addTo(cases);
        V4Access.addTo(cases);
        V4Features.addTo(cases);
        V4Schemas.addTo(cases);
        V4BacklogQuotas.addTo(cases);
        V4Lifecycle.addTo(cases);
        V4Limits.addTo(cases);
        V4Messages.addTo(cases);
        V4TopicOperations.addTo(cases);
        V4NonPersistent.addTo(cases);
        V4Policies.addTo(cases);
        V4Rates.addTo(cases);
        ClusterCases.addTo(cases);
        ReplicationCases.addEncryptedTo(cases);
        Driver.run(cases, arguments);
    }
}
