"""The load of this broker, computed from samples of its counters.  Pure."""

from dataclasses import dataclass

from broker.placement.members import Load

SMOOTHING = 0.5
"""The weight of the newest sample, between 0 and 1, so that one peak decides nothing."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters of one process at one moment.  `cpu_s` is the processor time it has used."""

    cpu_s: float = 0.0
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    topics: int = 0


class LoadMeter:
    """Turns samples of the counters into the smoothed rates that members report.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._before: tuple[Totals, float] | None = None
        self._load = Load()

    def sample(self, totals: Totals, now_s: float) -> Load:
        """Take a sample; return the load by now.  The first one has no rates yet."""
        before, self._before = self._before, (totals, now_s)
        if before is None or now_s <= before[1]:
            self._load = Load(topics=totals.topics)
            return self._load
        then, seconds = before[0], now_s - before[1]

        def rate(now: float, past: float, known: float) -> float:
            # A counter falls when its topic is unloaded: then its rate counts as 0.
            return known + SMOOTHING * (max(0.0, now - past) / seconds - known)

        known = self._load
        self._load = Load(
            cpu=rate(totals.cpu_s, then.cpu_s, known.cpu),
            messages_in=rate(totals.messages_in, then.messages_in, known.messages_in),
            bytes_in=rate(totals.bytes_in, then.bytes_in, known.bytes_in),
            messages_out=rate(totals.messages_out, then.messages_out, known.messages_out),
            bytes_out=rate(totals.bytes_out, then.bytes_out, known.bytes_out),
            topics=totals.topics,
        )
        return self._load
