package magnetar.stock;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Book-keeping of numbered messages per key: what was sent, what the broker acknowledged, what arrived, in which order.
 *
 * <p>A message is {@code key|number|padding}; the numbers of a key count from 0 in the order of sending.
 */
final class Tally {
    private static final int EXAMPLES = 5;
    /**
     * The M1 client picks a segment, applies a new layout in another thread, and then does not find what it picked. It
     * hands that error out instead of routing again; nothing of the message has left the client.
     */
    private static final String LOST_BY_CLIENT = "not found in active segments";

    private final Map<String, Integer> nextNumber = new HashMap<>();
    private final Set<String> sent = new HashSet<>();
    private final Set<String> acknowledged = new HashSet<>();
    private final List<String> failures = new ArrayList<>();
    private int lostByClient;
    private final Stall acknowledging = new Stall();

    /** The next message for that key. */
    synchronized String next(String key, int paddingBytes) {
        int number = nextNumber.merge(key, 1, Integer::sum) - 1;
        sent.add(key + "|" + number);
        return key + "|" + number + "|" + "x".repeat(paddingBytes);
    }

    synchronized void acknowledged(String value) {
        acknowledging.step();
        acknowledged.add(identity(value));
        notifyAll();
    }

    synchronized void failed(Throwable failure) {
        String text = String.valueOf(failure);
        if (text.contains(LOST_BY_CLIENT)) {
            lostByClient++;
        } else {
            failures.add(text);
        }
        notifyAll();
    }

    synchronized int sentCount() {
        return sent.size();
    }

    synchronized int acknowledgedCount() {
        return acknowledged.size();
    }

    /** Messages of which the outcome is known, one way or another. */
    synchronized int settledCount() {
        return acknowledged.size() + lostByClient + failures.size();
    }

    synchronized Set<String> acknowledgedNow() {
        return new HashSet<>(acknowledged);
    }

    synchronized void awaitAcknowledged(int count) throws InterruptedException {
        while (acknowledged.size() < count) {
            wait();
        }
    }

    synchronized void report(CaseRun run) {
        run.fact("sent", sent.size());
        run.fact("acknowledged", acknowledged.size());
        run.fact("send_failures", failures.size());
        run.fact("lost_by_client", lostByClient);
        run.fact("longest_stall_ms", acknowledging.longestMillis());
        if (!failures.isEmpty()) {
            run.fact("send_failure_examples", failures.subList(0, Math.min(EXAMPLES, failures.size())));
        }
    }

    static String identity(String value) {
        int first = value.indexOf('|');
        int second = value.indexOf('|', first + 1);
        return value.substring(0, second);
    }

    /** One reader's (or one group of readers') view of the same messages. */
    final class Received {
        private final Map<String, Integer> times = new HashMap<>();
        private final Map<String, Integer> highest = new HashMap<>();
        private final List<String> orderBreaks = new ArrayList<>();
        private final Stall arriving = new Stall();
        private int total;

        /** Counts one delivery; order is judged on first deliveries only. */
        synchronized void add(String value) {
            String identity = identity(value);
            arriving.step();
            total++;
            notifyAll();
            if (times.merge(identity, 1, Integer::sum) > 1) {
                return;
            }
            int bar = identity.indexOf('|');
            String key = identity.substring(0, bar);
            int number = Integer.parseInt(identity.substring(bar + 1));
            Integer before = highest.get(key);
            if (before != null && number < before) {
                orderBreaks.add(identity + " after " + before);
            }
            highest.merge(key, number, Math::max);
        }

        synchronized int distinct() {
            return times.size();
        }

        synchronized int total() {
            return total;
        }

        synchronized Set<String> repeated() {
            Set<String> repeated = new HashSet<>();
            times.forEach((identity, count) -> {
                if (count > 1) {
                    repeated.add(identity);
                }
            });
            return repeated;
        }

        synchronized boolean has(String identity) {
            return times.containsKey(identity);
        }

        /** Everything that the broker has acknowledged so far has been received. Asked after each message, so cheap. */
        boolean complete() {
            synchronized (Tally.this) {
                synchronized (this) {
                    return times.size() >= acknowledged.size() && times.keySet().containsAll(acknowledged);
                }
            }
        }

        /** Facts {@code <prefix>received, _missing, _unexpected, _duplicates, _order_breaks}. */
        void report(CaseRun run, String prefix) {
            Set<String> expected = acknowledgedNow();
            Set<String> everSent;
            synchronized (Tally.this) {
                everSent = new HashSet<>(sent);
            }
            synchronized (this) {
                Set<String> missing = new HashSet<>(expected);
                missing.removeAll(times.keySet());
                Set<String> unexpected = new HashSet<>(times.keySet());
                unexpected.removeAll(everSent);
                run.fact(prefix + "received", times.size());
                run.fact(prefix + "missing", missing.size());
                run.fact(prefix + "unexpected", unexpected.size());
                run.fact(prefix + "duplicates", total - times.size());
                run.fact(prefix + "order_breaks", orderBreaks.size());
                run.fact(prefix + "longest_stall_ms", arriving.longestMillis());
                examples(run, prefix + "missing_examples", missing.stream().sorted().toList());
                examples(run, prefix + "duplicate_examples", repeated().stream().sorted().toList());
                examples(run, prefix + "order_break_examples", orderBreaks);
            }
        }

        private void examples(CaseRun run, String name, List<String> all) {
            if (!all.isEmpty()) {
                run.fact(name, List.copyOf(all.subList(0, Math.min(EXAMPLES, all.size()))));
            }
        }
    }
}
