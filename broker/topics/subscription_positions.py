"""What brokers tell each other of the subscriptions that a scalable topic has in two clusters.

Values and their JSON, between the leader of a topic and the owners of its segments, and the frames
between clusters.  All positions are of the log of a source segment, in the cluster that its
messages are from (rules F1 to F11 of
`../../docs/decisions/replicated-subscriptions-of-segments.md`).  Pure.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

from config.bounds import MAX_SEGMENTS, SUBSCRIPTION_POSITIONS, SUBSCRIPTIONS_OF_QUESTION
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import CommandSubscriptionPositions, SegmentPosition
from magnetar.protocol.pulsar_pb2 import SubscriptionPositions as WirePositions
from magnetar.protocol.server_error import PeerError, ServerError

Members = dict[str, object]
Positions = Mapping[str, Mapping[int, Position]]
"""By subscription: positions in source segments, by their ids."""


class TooManyPositions(PeerError):
    """Another cluster tells more at once than a question may have."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class MalformedPositions(ValueError):
    """The JSON is not what brokers tell each other of subscriptions."""


@dataclass(frozen=True, slots=True)
class SubscriptionState:
    """What the owner of a source segment tells its leader, for one other cluster.

    `answered` is how far that cluster has answered what it was sent (F1, F3), None without a
    replicator to it.  `below` has each replicated subscription that the segment has: its entries
    below that position are acknowledged.  `settled`: nothing is to be asked until the owner says
    otherwise, as no entry for that cluster is left, and it has been told all this.  `made_for` are
    the subscriptions that were made here for those of that cluster (F11).  That cluster may lack
    what is up to `began` (F3).
    """

    answered: Position | None
    below: Mapping[str, Position]
    settled: bool
    made_for: frozenset[str] = frozenset()
    began: Position = EARLIEST

    def to_json(self) -> Members:
        """The JSON that brokers send each other."""
        return {
            "answered": None if self.answered is None else list(self.answered),
            "below": _by_name_json(self.below),
            "settled": self.settled,
            "madeFor": sorted(self.made_for),
            "began": list(self.began),
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises `MalformedPositions`."""
        found = _object(members)
        try:
            answered = found["answered"]
            return cls(
                None if answered is None else _position(answered),
                _by_name(found["below"]),
                found["settled"] is True,
                _names(found["madeFor"]),
                _position(found["began"]),
            )
        except KeyError as error:
            raise MalformedPositions(f"{members!r} lacks {error}") from error


@dataclass(frozen=True, slots=True)
class PositionsTold:
    """What a source cluster tells of a topic's subscriptions, for one segment of another cluster.

    `segments` are the ids of all source segments at `layout_epoch`.  `below` has by subscription
    the positions of source segments, by their ids: entries below are acknowledged there (F1).
    `made_for` are those that were made there for the subscriptions of this cluster (F11).
    """

    cluster: str
    incarnation: int
    layout_epoch: int
    segments: frozenset[int]
    below: Positions
    made_for: frozenset[str] = frozenset()

    def to_json(self) -> Members:
        """The JSON that brokers send each other."""
        return {
            "cluster": self.cluster,
            "incarnation": _hexadecimal(self.incarnation),
            "layoutEpoch": self.layout_epoch,
            "segments": sorted(self.segments),
            "below": _by_segment_json(self.below),
            "madeFor": sorted(self.made_for),
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises `MalformedPositions`."""
        found = _object(members)
        try:
            return cls(
                str(found["cluster"]),
                int(str(found["incarnation"]), 16),
                _number(found["layoutEpoch"]),
                frozenset(map(_number, _list(found["segments"]))),
                _by_segment(found["below"]),
                _names(found["madeFor"]),
            )
        except KeyError as error:
            raise MalformedPositions(f"{members!r} lacks {error}") from error


@dataclass(frozen=True, slots=True)
class CopiesLeft:
    """What one segment answers to that, after it has acknowledged what it was told.

    `terminated`: its log has ended, so that copies may be in its children (F4).  `first` has by
    subscription, for each source segment that was told of, the position of the first copy that is
    not acknowledged (F2).  A subscription that the segment does not have, or that is not
    replicated there, is not in `first` (F10).  `missing` are those that it does not have.
    `late` are those that may lack copies; of these `first` says no more than what was told.
    `from_start` are those that were made at the first entry, when none had been dropped (F11).
    """

    terminated: bool
    first: Positions
    missing: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    from_start: frozenset[str] = frozenset()

    def to_json(self) -> Members:
        """The JSON that brokers send each other."""
        return {
            "terminated": self.terminated,
            "first": _by_segment_json(self.first),
            "missing": sorted(self.missing),
            "late": sorted(self.late),
            "fromStart": sorted(self.from_start),
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises `MalformedPositions`."""
        found = _object(members)
        try:
            return cls(
                found["terminated"] is True,
                _by_segment(found["first"]),
                _names(found["missing"]),
                _names(found["late"]),
                _names(found["fromStart"]),
            )
        except KeyError as error:
            raise MalformedPositions(f"{members!r} lacks {error}") from error


@dataclass(frozen=True, slots=True)
class CopiesAnswered:
    """The answer of a cluster to a question, for one source segment.

    `answered`, `below` and `began` are those of the `SubscriptionState` with which it was asked.
    `first` has by subscription the first copy that is not acknowledged in any segment there;
    a subscription of which nothing is known is left out.  `late` are those that may lack copies
    there (F11).  `incarnation` is that of the topic there.
    """

    cluster: str
    answered: Position
    below: Mapping[str, Position]
    first: Mapping[str, Position]
    incarnation: int
    late: frozenset[str] = frozenset()
    began: Position = EARLIEST

    def to_json(self) -> Members:
        """The JSON that brokers send each other."""
        return {
            "cluster": self.cluster,
            "answered": list(self.answered),
            "below": _by_name_json(self.below),
            "first": _by_name_json(self.first),
            "incarnation": _hexadecimal(self.incarnation),
            "late": sorted(self.late),
            "began": list(self.began),
        }

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Decode the JSON of another broker.  Raises `MalformedPositions`."""
        found = _object(members)
        try:
            return cls(
                str(found["cluster"]),
                _position(found["answered"]),
                _by_name(found["below"]),
                _by_name(found["first"]),
                int(str(found["incarnation"]), 16),
                _names(found["late"]),
                _position(found["began"]),
            )
        except KeyError as error:
            raise MalformedPositions(f"{members!r} lacks {error}") from error


class FirstCopy(NamedTuple):
    """What one segment answers for one source segment and subscription."""

    position: Position
    """None is left before it, as far as the owner has read."""
    is_terminated: bool
    """Whether its log has ended, so that copies may be in its children."""


def first_left(
    active: Collection[int], segments: Collection[int], answers: Mapping[int, FirstCopy]
) -> Position | None:
    """The first copy that is left in any segment of a layout; None if that is not known (F4).

    `answers` has one for each segment that answered and has the subscription.  A segment that is
    ACTIVE in the layout and has ended shows that the layout is not the newest one.
    """
    if answers.keys() != set(segments):
        return None
    if any(answers[segment_id].is_terminated for segment_id in active):
        return None
    return min((each.position for each in answers.values()), default=None)


class SubscriptionsLeft(NamedTuple):
    """The answer of a cluster: what is left there, and which subscriptions it says nothing of."""

    incarnation: int
    """Of the topic there."""
    first: Positions
    """The first copies that are not acknowledged; what is not known is left out."""
    not_replicated: frozenset[str] = frozenset()
    """Subscriptions that are there without being replicated."""
    late: frozenset[str] = frozenset()
    """Subscriptions that may lack copies there: nothing follows from what they have consumed."""


class OtherClusters(Protocol):
    """The clusters that have the same topics."""

    async def tell_positions(
        self, cluster: str, topic: TopicName, told: PositionsTold
    ) -> SubscriptionsLeft:
        """Tell a cluster how far subscriptions have come here.  Raises `MagnetarError`."""
        ...


def require_few(command: CommandSubscriptionPositions) -> None:
    """Raise `TooManyPositions` for a question that is larger than any of this broker."""
    names = len(command.subscriptions)
    count = sum(len(each.positions) for each in command.subscriptions)
    if (
        len(command.segments) > MAX_SEGMENTS
        or max(names, len(command.made_for)) > SUBSCRIPTIONS_OF_QUESTION
        or count > SUBSCRIPTION_POSITIONS
    ):
        raise TooManyPositions(
            f"One question has {len(command.segments)} segments, {names} subscriptions and {count} "
            f"positions: ask for {MAX_SEGMENTS}, {SUBSCRIPTIONS_OF_QUESTION} and "
            f"{SUBSCRIPTION_POSITIONS} at most."
        )


def told_in(command: CommandSubscriptionPositions) -> PositionsTold:
    """What SUBSCRIPTION_POSITIONS tells."""
    return PositionsTold(
        command.cluster,
        command.incarnation,
        command.layout_epoch,
        frozenset(command.segments),
        positions_in(command.subscriptions),
        frozenset(command.made_for),
    )


def positions_in(found: Iterable[WirePositions]) -> Positions:
    """The positions by subscription and segment."""
    return {
        each.subscription: {
            one.segment_id: Position(one.ledger_id, one.entry_id) for one in each.positions
        }
        for each in found
    }


def to_wire(told: Positions) -> list[WirePositions]:
    """The positions as they are sent."""
    return [
        WirePositions(
            subscription=name,
            positions=[
                SegmentPosition(
                    segment_id=segment_id, ledger_id=each.ledger_id, entry_id=each.entry_id
                )
                for segment_id, each in positions.items()
            ],
        )
        for name, positions in told.items()
    ]


def in_questions(below: Positions) -> Iterator[Positions]:
    """The same positions, in as many parts as one question takes."""
    part: dict[str, Mapping[int, Position]] = {}
    count = 0
    for name, positions in below.items():
        is_full = len(part) == SUBSCRIPTIONS_OF_QUESTION
        if part and (is_full or count + len(positions) > SUBSCRIPTION_POSITIONS):
            yield part
            part, count = {}, 0
        part[name] = positions
        count += len(positions)
    if part:
        yield part


def _by_name_json(found: Mapping[str, Position]) -> Members:
    return {name: list(each) for name, each in found.items()}


def _by_name(members: object) -> dict[str, Position]:
    return {name: _position(each) for name, each in _object(members).items()}


def _by_segment_json(found: Positions) -> Members:
    return {
        name: _by_name_json({str(segment_id): each for segment_id, each in positions.items()})
        for name, positions in found.items()
    }


def _by_segment(members: object) -> dict[str, dict[int, Position]]:
    return {
        name: {_number_in(key): each for key, each in _by_name(positions).items()}
        for name, positions in _object(members).items()
    }


def _hexadecimal(incarnation: int) -> str:
    # JSON of other languages has 53 bits.
    return f"{incarnation:016x}"


def _names(value: object) -> frozenset[str]:
    return frozenset(map(str, _list(value)))


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise MalformedPositions(f"{value!r} is no list")
    return value


def _object(value: object) -> Members:
    if not isinstance(value, dict):
        raise MalformedPositions(f"{value!r} is no object")
    return {str(key): each for key, each in value.items()}


def _position(value: object) -> Position:
    if not isinstance(value, list) or len(value) != 2:
        raise MalformedPositions(f"{value!r} is no position")
    return Position(_number(value[0]), _number(value[1]))


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise MalformedPositions(f"{value!r} is no number")
    return value


def _number_in(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise MalformedPositions(f"{text!r} is no number") from error
