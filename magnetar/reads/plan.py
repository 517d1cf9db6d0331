"""What is asked of a segment's owner, and what it answers: plans of ranges, and stored entries.
Pure.

Pure.  Rules: positions are of the next entry to be read, so a range goes from its start up to, and
without, its end; what a broker does not say is None.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from magnetar.errors import BrokerFailed, InvalidArgument
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import LONG_MAX, Position, from_wire, to_wire
from magnetar.reads.entries import StoredEntry, Visibility

__all__ = [
    "Answer",
    "PlanLimits",
    "RangePlan",
    "answer_of",
    "plan_of",
    "plan_request",
    "read_request",
]

_VISIBILITIES: Final = tuple(Visibility)


@dataclass(frozen=True, slots=True)
class RangePlan:
    """How far a segment may be read, and how far a budget goes.

    None where a broker does not tell: those without segment reads count nothing.
    """

    start: Position
    end: Position
    entries: int | None
    """From start to end, and so are the next four."""
    messages: int | None
    bytes: int | None
    first_publish_time_ms: int | None
    """The lowest, of whichever entry; and the next one the highest."""
    last_publish_time_ms: int | None
    earliest: Position
    """The first entry that is retained."""
    horizon: Position
    """What comes before it may be read."""
    raw_end: Position
    """What comes before it is stored."""
    sealed: bool | None
    """Whether `raw_end` will not move any more."""
    lost: bool | None
    """Whether entries at or after the start that was asked for are gone."""
    backlog_messages: int | None
    """From start to the horizon, and so is the next one."""
    backlog_bytes: int | None
    hidden_messages: int | None
    """From the horizon to `raw_end`."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What bounds a range, each if it is not None; one entry it has at least."""

    max_messages: int | None = None
    max_bytes: int | None = None
    from_publish_time_ms: int | None = None
    before_publish_time_ms: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 0 <= value <= LONG_MAX):
                raise InvalidArgument(f"{name} is {value!r}; give it a whole number of 0 or more.")


class Answer(NamedTuple):
    """Of READ_ENTRIES."""

    entries: list[StoredEntry]
    next: Position
    at_end: bool


def plan_request(
    topic: str, start: Position | None, end: Position | None, limits: PlanLimits
) -> pb.BaseCommand:
    """PLAN_RANGE."""
    request = pb.CommandPlanRange(request_id=0, topic=topic)
    if start is not None:
        request.start.CopyFrom(_to_wire(start))
    if end is not None:
        request.end.CopyFrom(_to_wire(end))
    for name in limits.__slots__:
        value = getattr(limits, name)
        if value is not None:
            setattr(request, name, value)
    return pb.BaseCommand(type=pb.BaseCommand.PLAN_RANGE, plan_range=request)


def plan_of(told: pb.CommandPlanRangeResponse) -> RangePlan:
    """What it answers.  Raises `BrokerFailed` if that lacks what it must have."""
    for name in ("start", "end", "earliest", "horizon", "raw_end"):
        if not told.HasField(name):
            raise BrokerFailed(
                f"The broker planned a range without its {name}; it is asked again, and if that "
                "goes on, look into its log."
            )

    def count(name: str) -> int | None:
        return int(getattr(told, name)) if told.HasField(name) else None

    return RangePlan(
        start=_from_wire(told.start),
        end=_from_wire(told.end),
        entries=count("entries"),
        messages=count("messages"),
        bytes=count("bytes"),
        first_publish_time_ms=count("first_publish_time_ms"),
        last_publish_time_ms=count("last_publish_time_ms"),
        earliest=_from_wire(told.earliest),
        horizon=_from_wire(told.horizon),
        raw_end=_from_wire(told.raw_end),
        sealed=told.sealed,
        lost=told.lost,
        backlog_messages=count("backlog_messages"),
        backlog_bytes=count("backlog_bytes"),
        hidden_messages=count("hidden_messages"),
    )


def read_request(
    topic: str, start: Position, end: Position, max_bytes: int, *, raw: bool
) -> pb.BaseCommand:
    """READ_ENTRIES."""
    request = pb.CommandReadEntries(
        request_id=0,
        topic=topic,
        start=_to_wire(start),
        end=_to_wire(end),
        max_bytes=max_bytes,
        raw=raw,
    )
    return pb.BaseCommand(type=pb.BaseCommand.READ_ENTRIES, read_entries=request)


def answer_of(told: pb.CommandReadEntriesResponse, start: Position) -> Answer:
    """What it answers to a reading from `start`.  Raises `BrokerFailed` if that leads nowhere."""
    entries = [
        StoredEntry(each.ledger_id, each.entry_id, each.data, _VISIBILITIES[each.visibility])
        for each in told.entries
    ]
    if told.HasField("next"):
        following = _from_wire(told.next)
    else:
        following = entries[-1].next_position if entries else start
    if following <= start and not told.at_end:
        raise BrokerFailed(
            f"The broker read nothing at {start}, and says that there is more; it is asked again."
        )
    return Answer(entries, following, told.at_end)


def _to_wire(position: Position) -> pb.MessageIdData:
    return pb.MessageIdData(
        ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id)
    )


def _from_wire(told: pb.MessageIdData) -> Position:
    return Position(from_wire(told.ledger_id), from_wire(told.entry_id))
