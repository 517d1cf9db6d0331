"""Load reports: when the owner of a segment writes one, and what a leader concludes.  Pure.

A report is Pulsar's record `/topics/<tenant>/<namespace>/<topic>/segments/<id>/load`, written only
when a rate has moved by a share of its last written value.  So the time of the record is since when
the load is so, and a load that does not change costs nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from broker.scalable.auto_scale_policy import RATE_NAMES, Rates
from config.bounds import LOAD_BACKLOG_FLOOR, LOAD_RATE_FLOOR_BYTES, LOAD_RATE_FLOOR_MESSAGES

_FLOORS: Final = Rates(
    LOAD_RATE_FLOOR_MESSAGES,
    LOAD_RATE_FLOOR_BYTES,
    LOAD_RATE_FLOOR_MESSAGES,
    LOAD_RATE_FLOOR_BYTES,
)


@dataclass(frozen=True, slots=True)
class Load:
    """The traffic of a segment, and the entries that its slowest attached subscription lacks."""

    rates: Rates
    backlog: int = 0

    def differs(self, written: "Load | None", change: float) -> bool:
        """Whether it is to be written: `change` is the share by which a value has to move."""
        if written is None:
            return True
        pairs = zip(self.rates, written.rates, _FLOORS, strict=True)
        return any(_moved(now, before, floor, change) for now, before, floor in pairs) or _moved(
            self.backlog, written.backlog, LOAD_BACKLOG_FLOOR, change
        )

    @property
    def idle(self) -> bool:
        """Whether there is no traffic."""
        return self.rates == Rates()


def _moved(now: float, before: float, floor: float, change: float) -> bool:
    return abs(now - before) > change * max(before, floor)


class SegmentMeter:
    """The counters of one loaded segment from sample to sample, and the report written last."""

    __slots__ = ("_counts", "_read_s", "written")

    def __init__(self, before_s: float) -> None:
        """`before_s` is the time of the last sample before the segment was loaded."""
        self._counts: tuple[int, ...] = (0, 0, 0, 0)
        self._read_s = before_s
        self.written: Load | None = None

    def sample(self, now_s: float, counts: tuple[int, ...], backlog: int) -> Load:
        """The load since the last sample, from counters that only grow: Pulsar's four, in order."""
        took_s = max(now_s - self._read_s, 1.0)
        grown = [max(0, now - before) for now, before in zip(counts, self._counts, strict=True)]
        self._counts, self._read_s = counts, now_s
        return Load(Rates(*(each / took_s for each in grown)), backlog)

    def rates_now(self, now_s: float, counts: tuple[int, ...]) -> Rates:
        """The rates since the last sample, which stays the last one."""
        took_s = max(now_s - self._read_s, 1.0)
        grown = (max(0, now - before) for now, before in zip(counts, self._counts, strict=True))
        return Rates(*(each / took_s for each in grown))


class EarlierReport(NamedTuple):
    """The part of an earlier report that a later one repeats."""

    number: int
    since_ms: int
    rates: Rates


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A report as it was written.  `number` counts the writes of its record.

    `earlier` are the reports before it, oldest first: the leader of the topic reads the record less
    often than the owner of the segment writes it.
    """

    load: Load
    since_ms: int
    number: int = 0
    earlier: tuple[EarlierReport, ...] = ()

    def and_earlier(self, most: int) -> tuple[EarlierReport, ...]:
        """The newest `most` of this report and those before it: `earlier` of the next report."""
        return (*self.earlier, EarlierReport(self.number, self.since_ms, self.load.rates))[-most:]


@dataclass(frozen=True, slots=True)
class SegmentLoad:
    """The load of a segment as its leader knows it.

    `quiet_since_ms`: since when all of its rates have been below the limits of merges, as far as
    the reports show; None if they are not.
    """

    rates: Rates
    backlog: int = 0
    quiet_since_ms: int | None = None


class LoadBoard:
    """The newest report of each segment of one topic, at its leader.

    Apache Pulsar merges segments whose reports were not written anew for the merge window.  Here
    the window begins when the rates fell below the limits: a load that moves below them is quiet
    all the same, and a report repeats the ones before it.  If reports between the known one and the
    new ones are missing, the load of that time is not known: the window begins after them.
    """

    def __init__(self) -> None:
        self._limits: Rates | None = None
        self._reports: dict[int, LoadReport] = {}
        self._quiet_since_ms: dict[int, int] = {}

    def copy(self) -> "LoadBoard":
        """A board of its own with the same reports."""
        board = LoadBoard()
        board._limits = self._limits
        board._reports = dict(self._reports)
        board._quiet_since_ms = dict(self._quiet_since_ms)
        return board

    def take(self, segment_id: int, report: LoadReport) -> None:
        """Take in the newest report of a segment; it may be known already."""
        known = self._reports.get(segment_id)
        self._reports[segment_id] = report
        if known is not None and known.number == report.number:
            return
        number = None if known is None else known.number
        for each in report.and_earlier(len(report.earlier) + 1):
            if number is not None and each.number <= number and each.number != report.number:
                continue
            follows = number is not None and each.number == number + 1
            if self._limits is None or not each.rates.below(self._limits):
                self._quiet_since_ms.pop(segment_id, None)
            elif not follows or segment_id not in self._quiet_since_ms:
                self._quiet_since_ms[segment_id] = each.since_ms
            number = each.number

    def use_limits(self, limits: Rates) -> None:
        """Set the limits of merges.  After a change the quiet times begin with the last reports."""
        if limits != self._limits:
            self._limits = limits
            self._quiet_since_ms = {
                segment_id: report.since_ms
                for segment_id, report in self._reports.items()
                if report.load.rates.below(limits)
            }

    def keep(self, segment_ids: Iterable[int]) -> None:
        """Forget all other segments."""
        kept = set(segment_ids)
        for gone in self._reports.keys() - kept:
            del self._reports[gone]
            self._quiet_since_ms.pop(gone, None)

    def known(self) -> Mapping[int, LoadReport]:
        """The newest reports, by segment."""
        return self._reports

    def loads(self) -> dict[int, SegmentLoad]:
        """The loads of all segments that have a report."""
        return {
            segment_id: SegmentLoad(
                report.load.rates, report.load.backlog, self._quiet_since_ms.get(segment_id)
            )
            for segment_id, report in self._reports.items()
        }


def encode_report(load: Load, earlier: Iterable[EarlierReport] = ()) -> bytes:
    """Encode the record of a load: Pulsar's four rates, the backlog, and earlier reports."""
    members: dict[str, object] = {**load.rates.to_json(), "backlog": load.backlog}
    past = [[each.number, each.since_ms, *each.rates.to_json().values()] for each in earlier]
    if past:
        members["earlier"] = past
    return json.dumps(members, separators=(",", ":")).encode()


def decode_report(value: bytes) -> tuple[Load, tuple[EarlierReport, ...]]:
    """Decode the record of a load, with earlier ones.  Raises ValueError, KeyError, TypeError."""
    members = json.loads(value)
    load = Load(
        Rates(*(float(members[name]) for name in RATE_NAMES)), int(members.get("backlog", 0))
    )
    return load, tuple(
        EarlierReport(int(number), int(since_ms), Rates(*map(float, rates)))
        for number, since_ms, *rates in members.get("earlier", ())
    )
