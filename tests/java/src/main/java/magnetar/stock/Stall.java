package magnetar.stock;

/** The longest time between two steps of one kind; whoever uses it takes care of threads. */
final class Stall {
    private long last;
    private boolean begun;
    private long longest;

    void step() {
        long now = System.nanoTime();
        if (begun) {
            longest = Math.max(longest, now - last);
        }
        begun = true;
        last = now;
    }

    long longestMillis() {
        return longest / 1_000_000;
    }
}
