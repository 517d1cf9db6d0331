"""The requests PLAN_RANGE and READ_ENTRIES to the owner of a segment, and their answers.  Pure.

A position is that of the next entry to read, so a range has its start and not its end.
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
    """A range of a segment to read, with the facts that the broker knows about it.

    Fields are None where the broker does not know them; brokers without segment reads count
    nothing.
    """

    start: Position
    end: Position
    entries: int | None
    """Entries from `start` to `end`; the next four fields are of the same entries."""
    messages: int | None
    bytes: int | None
    first_publish_time_ms: int | None
    """The lowest publish time of the entries."""
    last_publish_time_ms: int | None
    """The highest publish time of the entries."""
    earliest: Position
    """The first entry that is retained."""
    horizon: Position
    """The max read position: entries before it can be read."""
    raw_end: Position
    """The end of the stored entries."""
    sealed: bool | None
    """Whether `raw_end` will not move any more."""
    lost: bool | None
    """Whether entries at or after the requested start were trimmed."""
    backlog_messages: int | None
    """Messages from `start` to `horizon`."""
    backlog_bytes: int | None
    """Bytes from `start` to `horizon`."""
    hidden_messages: int | None
    """Messages from `horizon` to `raw_end`."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """The bounds of a range, those that are not None.  A range has at least one entry.

    Raises `InvalidArgument` for a negative or fractional number.
    """

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
    """The answer to a READ_ENTRIES; `next` is where reading goes on."""

    entries: list[StoredEntry]
    next: Position
    at_end: bool


def plan_request(
    topic: str, start: Position | None, end: Position | None, limits: PlanLimits
) -> pb.BaseCommand:
    """The command PLAN_RANGE."""
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


def plan_of(response: pb.CommandPlanRangeResponse) -> RangePlan:
    """The plan in an answer.  Raises `BrokerFailed` if a required position is missing."""
    for name in ("start", "end", "earliest", "horizon", "raw_end"):
        if not response.HasField(name):
            raise BrokerFailed(
                f"The broker planned a range without its {name}; it is asked again. If this goes "
                "on, read the broker's log."
            )

    def count(name: str) -> int | None:
        return int(getattr(response, name)) if response.HasField(name) else None

    return RangePlan(
        start=_from_wire(response.start),
        end=_from_wire(response.end),
        entries=count("entries"),
        messages=count("messages"),
        bytes=count("bytes"),
        first_publish_time_ms=count("first_publish_time_ms"),
        last_publish_time_ms=count("last_publish_time_ms"),
        earliest=_from_wire(response.earliest),
        horizon=_from_wire(response.horizon),
        raw_end=_from_wire(response.raw_end),
        sealed=response.sealed,
        lost=response.lost,
        backlog_messages=count("backlog_messages"),
        backlog_bytes=count("backlog_bytes"),
        hidden_messages=count("hidden_messages"),
    )


def read_request(
    topic: str, start: Position, end: Position, max_bytes: int, *, raw: bool
) -> pb.BaseCommand:
    """The command READ_ENTRIES."""
    request = pb.CommandReadEntries(
        request_id=0,
        topic=topic,
        start=_to_wire(start),
        end=_to_wire(end),
        max_bytes=max_bytes,
        raw=raw,
    )
    return pb.BaseCommand(type=pb.BaseCommand.READ_ENTRIES, read_entries=request)


def answer_of(response: pb.CommandReadEntriesResponse, start: Position) -> Answer:
    """The answer to a READ_ENTRIES from `start`.

    Raises `BrokerFailed` if it neither makes progress nor says that it is at the end.
    """
    entries = [
        StoredEntry(each.ledger_id, each.entry_id, each.data, _VISIBILITIES[each.visibility])
        for each in response.entries
    ]
    if response.HasField("next"):
        following = _from_wire(response.next)
    else:
        following = entries[-1].next_position if entries else start
    if following <= start and not response.at_end:
        raise BrokerFailed(
            f"The broker read nothing at {start}, and says that there is more; it is asked again."
        )
    return Answer(entries, following, response.at_end)


def _to_wire(position: Position) -> pb.MessageIdData:
    return pb.MessageIdData(
        ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id)
    )


def _from_wire(data: pb.MessageIdData) -> Position:
    return Position(from_wire(data.ledger_id), from_wire(data.entry_id))
