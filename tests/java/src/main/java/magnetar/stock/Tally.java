package magnetar.stock;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
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

    /** A message of some key, by its number, at one of the readers. */
    private record Delivery(int number, String reader) { }

    /** One reader's (or one group of readers') view of the same messages. */
    final class Received {
        private static final String ALONE = "";

        private final Map<String, Integer> times = new HashMap<>();
        private final Map<String, List<Delivery>> ofKey = new LinkedHashMap<>();
        private final Stall arriving = new Stall();
        private int total;

        /** Counts one delivery to the only reader. */
        void add(String value) {
            add(value, ALONE);
        }

        /** Counts one delivery to that reader of the group. */
        synchronized void add(String value, String reader) {
            String identity = identity(value);
            arriving.step();
            total++;
            times.merge(identity, 1, Integer::sum);
            int bar = identity.indexOf('|');
            ofKey.computeIfAbsent(identity.substring(0, bar), key -> new ArrayList<>())
                    .add(new Delivery(Integer.parseInt(identity.substring(bar + 1)), reader));
            notifyAll();
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
                List<String> orderBreaks = new ArrayList<>();
                int handedOutWhileClosing = 0;
                for (Map.Entry<String, List<Delivery>> each : ofKey.entrySet()) {
                    List<Delivery> judged = withoutHandedOutWhileClosing(each.getValue());
                    handedOutWhileClosing += each.getValue().size() - judged.size();
                    orderBreaks.addAll(orderBreaks(each.getKey(), judged));
                }
                Set<String> missing = new HashSet<>(expected);
                missing.removeAll(times.keySet());
                Set<String> unexpected = new HashSet<>(times.keySet());
                unexpected.removeAll(everSent);
                run.fact(prefix + "received", times.size());
                run.fact(prefix + "missing", missing.size());
                run.fact(prefix + "unexpected", unexpected.size());
                run.fact(prefix + "duplicates", total - times.size());
                run.fact(prefix + "order_breaks", orderBreaks.size());
                run.fact(prefix + "handed_out_while_closing", handedOutWhileClosing);
                run.fact(prefix + "longest_stall_ms", arriving.longestMillis());
                examples(run, prefix + "missing_examples", missing.stream().sorted().toList());
                examples(run, prefix + "duplicate_examples", repeated().stream().sorted().toList());
                examples(run, prefix + "order_break_examples", orderBreaks);
            }
        }

        /**
         * Leaves out what a reader got of a key behind messages that nobody had yet, if it was the last that this
         * reader got of the key, and the next reader got it again. While the M1 client closes a segment's consumer it
         * drops what waits, and may still hand out the one message that arrives next. It does not acknowledge that.
         */
        private List<Delivery> withoutHandedOutWhileClosing(List<Delivery> deliveries) {
            List<Delivery> judged = new ArrayList<>();
            Set<Integer> numbers = new HashSet<>();
            int highest = -1;
            for (int i = 0; i < deliveries.size(); i++) {
                Delivery each = deliveries.get(i);
                List<Delivery> later = deliveries.subList(i + 1, deliveries.size());
                boolean skips = each.number > highest + 1 && !numbers.contains(each.number - 1);
                boolean leaves = later.stream().noneMatch(other -> other.reader.equals(each.reader));
                if (skips && leaves && later.stream().anyMatch(other -> other.number == each.number)) {
                    continue;
                }
                judged.add(each);
                numbers.add(each.number);
                highest = Math.max(highest, each.number);
            }
            return judged;
        }

        /** Order is judged on first deliveries only. */
        private List<String> orderBreaks(String key, List<Delivery> deliveries) {
            List<String> breaks = new ArrayList<>();
            Set<Integer> numbers = new HashSet<>();
            int highest = -1;
            for (Delivery each : deliveries) {
                if (numbers.add(each.number) && each.number < highest) {
                    breaks.add(key + "|" + each.number + " after " + highest);
                }
                highest = Math.max(highest, each.number);
            }
            return breaks;
        }

        private void examples(CaseRun run, String name, List<String> all) {
            if (!all.isEmpty()) {
                run.fact(name, List.copyOf(all.subList(0, Math.min(EXAMPLES, all.size()))));
            }
        }
    }
}
