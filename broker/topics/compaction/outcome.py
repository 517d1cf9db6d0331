"""Pure: the compactions of one topic since it was loaded."""

import enum


class CompactionState(enum.Enum):
    """State of the last compaction of a topic (names are Pulsar's)."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


class CompactionHistory:
    """Counts the compactions of one topic; times are wall-clock milliseconds."""

    __slots__ = (
        "duration_ms",
        "error",
        "failed_ms",
        "failed_total",
        "failures",
        "removed",
        "removed_total",
        "started_ms",
        "state",
        "succeeded_ms",
        "succeeded_total",
    )

    def __init__(self) -> None:
        self.state = CompactionState.NOT_RUN
        self.error = ""
        self.started_ms = 0
        self.succeeded_ms = self.failed_ms = self.duration_ms = 0
        self.removed = self.removed_total = 0
        """Messages that the last run, and all runs, removed."""
        self.succeeded_total = self.failed_total = 0
        self.failures = 0
        """Failures since the last success."""

    @property
    def running(self) -> bool:
        """Whether a run is in progress, or waits for its turn."""
        return self.state is CompactionState.RUNNING

    def started(self, now_ms: int) -> None:
        """Note that a run begins."""
        self.state, self.error, self.started_ms = CompactionState.RUNNING, "", now_ms

    def succeeded(self, now_ms: int, removed: int) -> None:
        """Note the end of a run that removed so many messages."""
        self.state = CompactionState.SUCCESS
        self.succeeded_ms, self.duration_ms = now_ms, now_ms - self.started_ms
        self.removed = removed
        self.removed_total += removed
        self.succeeded_total += 1
        self.failures = 0

    def failed(self, now_ms: int, error: str) -> None:
        """Note the end of a run that failed."""
        self.state, self.error = CompactionState.ERROR, error
        self.failed_ms, self.duration_ms = now_ms, now_ms - self.started_ms
        self.failed_total += 1
        self.failures += 1

    def as_status(self) -> dict[str, object]:
        """LongRunningProcessStatus."""
        return {"status": self.state.value, "lastError": self.error}

    def as_members(self) -> dict[str, object]:
        """CompactionStats."""
        return {
            "lastCompactionRemovedEventCount": self.removed,
            "lastCompactionSucceedTimestamp": self.succeeded_ms,
            "lastCompactionFailedTimestamp": self.failed_ms,
            "lastCompactionDurationTimeInMills": self.duration_ms,
        }
