package magnetar.stock;

import java.util.Map;

/** Placeholder. */
final class BenchCases {
    static void addTo(Map<String, Case> cases) {
    }
}
