package magnetar.stock;

/** One thing done with the stock client; what it saw goes into {@link CaseRun#fact}. */
@FunctionalInterface
interface Case {
    void run(CaseRun run) throws Exception;
}
