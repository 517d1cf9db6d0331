"""The counts of `magnetar perf` and their summary.  Pure: callers pass the time."""

from collections.abc import Mapping
from typing import Final

from magnetar.cli.histogram import Histogram

PERCENTILES: Final = (50.0, 95.0, 99.0, 99.9)
MB: Final = 1_000_000


class Tally:
    """Messages, their bytes and how long each took, since `started_s`."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.ended_s = started_s
        self.messages = 0
        self.failed = 0
        self._first_failure: str | None = None
        self.payload_bytes = 0
        self.latencies = Histogram()
        self._shown_s = started_s
        self._shown_messages = 0

    def done(self, size: int, latency_us: int, now_s: float) -> None:
        """Count one message that went through."""
        self.messages += 1
        self.payload_bytes += size
        self.ended_s = now_s
        self.latencies.record(latency_us)

    def fail(self, error: BaseException | None) -> None:
        """Count one message that failed; with None it was cancelled."""
        self.failed += 1
        if self._first_failure is None and error is not None:
            self._first_failure = " ".join(str(error).split())

    def why_failed(self) -> str | None:
        """A sentence on the failures, or None without any."""
        if not self.failed:
            return None
        why = self._first_failure or "it was cancelled."
        return f"{self.failed:,} messages failed; the first: {why}"

    @property
    def elapsed_s(self) -> float:
        """Seconds from the start to the last message."""
        return max(self.ended_s - self.started_s, 0.0)

    def lately(self, now_s: float) -> float:
        """Messages a second since the last call."""
        passed_s, self._shown_s = now_s - self._shown_s, now_s
        more, self._shown_messages = self.messages - self._shown_messages, self.messages
        return more / passed_s if passed_s > 0 else 0.0

    def line(self, now_s: float) -> str:
        """The state of a run in one line."""
        p50, p99 = (self.latencies.percentile_us(percent) / 1000 for percent in (50.0, 99.0))
        failed = f"  {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.messages:,} messages  {self.lately(now_s):,.0f}/s  "
            f"p50 {p50:.1f} ms  p99 {p99:.1f} ms{failed}"
        )

    def summary(self, verb: str) -> list[str]:
        """The lines that are printed at the end of a run."""
        if not self.messages:
            return [f"{verb} no messages."]
        per_s, mb_per_s = self._rates()
        latencies = "  ".join(
            f"{name} {value_ms:,.2f} ms" for name, value_ms in self._latencies_ms().items()
        )
        return [
            f"{verb} {self.messages:,} messages in {self.elapsed_s:.2f} s: "
            f"{per_s:,.0f} messages/s, {mb_per_s:,.2f} MB/s",
            f"latency  {latencies}",
        ]

    def as_mapping(self) -> Mapping[str, object]:
        """The summary for programs."""
        per_s, mb_per_s = self._rates()
        return {
            "messages": self.messages,
            "failed": self.failed,
            "bytes": self.payload_bytes,
            "seconds": round(self.elapsed_s, 3),
            "messages_per_s": round(per_s, 1),
            "mb_per_s": round(mb_per_s, 3),
            "latency_ms": self._latencies_ms(),
        }

    def _rates(self) -> tuple[float, float]:
        """Messages and MB a second."""
        if self.elapsed_s <= 0:
            return 0.0, 0.0
        return self.messages / self.elapsed_s, self.payload_bytes / MB / self.elapsed_s

    def _latencies_ms(self) -> dict[str, float]:
        found = {
            f"p{percent:g}": self.latencies.percentile_us(percent) / 1000 for percent in PERCENTILES
        }
        return found | {"max": self.latencies.max_us / 1000}
