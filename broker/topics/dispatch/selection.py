"""Who gets the next entry: pure code, without entries, connections or time.

Rules:

- Failover: the consumers of the best priority level (the lowest number), ordered by name; the
  partition's index picks one, so that partitions spread; without partition the first.
- Shared: round robin within the best priority level that has room; lower levels get what the
  better ones cannot take.
- Key_Shared AUTO_SPLIT: consistent hashing over the names of the consumers, so that a consumer
  that comes or goes moves only the keys it takes or leaves.
- Key_Shared STICKY: each consumer owns the ranges it asked for; they may not overlap.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from broker.topics.dispatch.errors import ConsumerAssignError
from magnetar.protocol.key_hash import KEY_SPACE, HashRange, key_hash

POINTS_PER_CONSUMER: Final = 100


class Candidate(Protocol):
    """What selection must know of a consumer."""

    @property
    def name(self) -> str:
        """The consumer's name; need not be unique."""
        ...

    @property
    def priority_level(self) -> int:
        """0 is served first."""
        ...


C = TypeVar("C", bound=Candidate)


def choose_active(consumers: Sequence[C], partition_index: int) -> C:
    """The one of a Failover subscription's consumers (at least one) that gets the messages."""
    best = min(consumer.priority_level for consumer in consumers)
    ranked = sorted(
        (consumer for consumer in consumers if consumer.priority_level == best),
        key=lambda consumer: consumer.name,
    )
    return ranked[partition_index % len(ranked) if partition_index >= 0 else 0]


class Rotation(Generic[C]):
    """The turn order of a Shared subscription."""

    def __init__(self) -> None:
        self._levels: dict[int, list[C]] = {}
        self._turns: dict[int, int] = {}
        self._order: list[int] = []

    def add(self, consumer: C) -> None:
        """Give `consumer` a turn, after those of its level."""
        self._levels.setdefault(consumer.priority_level, []).append(consumer)
        self._turns.setdefault(consumer.priority_level, 0)
        self._order = sorted(self._levels)

    def remove(self, consumer: C) -> None:
        """Take `consumer` out; whose turn it is otherwise does not change."""
        level = consumer.priority_level
        members = self._levels[level]
        index = members.index(consumer)
        del members[index]
        if index < self._turns[level]:
            self._turns[level] -= 1
        if not members:
            del self._levels[level], self._turns[level]
            self._order = sorted(self._levels)

    def next(self, has_room: Callable[[C], bool]) -> C | None:
        """Whose turn it is among those with room."""
        for level in self._order:
            members = self._levels[level]
            size = len(members)
            turn = self._turns[level]
            for step in range(size):
                index = (turn + step) % size
                if has_room(members[index]):
                    self._turns[level] = index + 1
                    return members[index]
        return None

    def give_back(self, consumer: C) -> None:
        """`consumer` got nothing on the turn it was just given: it is still its turn."""
        level = consumer.priority_level
        self._turns[level] = self._levels[level].index(consumer)


class KeyAssignment(ABC, Generic[C]):
    """Which consumer of a Key_Shared subscription owns a hash."""

    @abstractmethod
    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """Let `consumer` own hashes.  Raises `ConsumerAssignError`, and then changes nothing."""

    @abstractmethod
    def remove(self, consumer: C) -> None:
        """Take the consumer's hashes away."""

    @abstractmethod
    def owner(self, key_hash: int) -> C | None:
        """Who owns the hash, if anybody does."""


class AutoSplit(KeyAssignment[C]):
    """AUTO_SPLIT: every consumer owns the arcs before its points on a ring."""

    def __init__(self) -> None:
        self._consumers: list[C] = []
        self._points: list[int] = []
        self._owners: list[C] = []

    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """`ranges` do not matter here."""
        self._consumers.append(consumer)
        self._rebuild()

    def remove(self, consumer: C) -> None:
        """Its arcs go to whose points follow."""
        self._consumers.remove(consumer)
        self._rebuild()

    def owner(self, key_hash: int) -> C | None:
        """None only without consumers."""
        if not self._owners:
            return None
        index = bisect_left(self._points, key_hash)
        return self._owners[index if index < len(self._owners) else 0]

    def _rebuild(self) -> None:
        """One owner for each point; of two on one point the first by name, then the older."""
        points: dict[int, C] = {}
        seen: dict[str, int] = {}
        for consumer in sorted(self._consumers, key=lambda each: each.name):
            twin = seen.get(consumer.name, 0)
            seen[consumer.name] = twin + 1
            for index in range(POINTS_PER_CONSUMER):
                point = key_hash(f"{consumer.name}\0{twin}\0{index}".encode()) % KEY_SPACE
                points.setdefault(point, consumer)
        self._points = sorted(points)
        self._owners = [points[point] for point in self._points]


class StickyRanges(KeyAssignment[C]):
    """STICKY: every consumer owns the ranges it brought."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, C]] = []
        self._starts: list[int] = []

    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """Raises `ConsumerAssignError` for ranges that are none, too wide, or overlap any."""
        if not ranges:
            raise ConsumerAssignError(
                f"Consumer {consumer.name!r} asks for STICKY hash ranges and names none: "
                "set at least one range within 0 to 65535."
            )
        taken = list(self._ranges)
        for start, end in ranges:
            if not 0 <= start <= end < KEY_SPACE:
                raise ConsumerAssignError(
                    f"The hash range {start} to {end} of consumer {consumer.name!r} is not "
                    "ascending within 0 to 65535: correct it."
                )
            for other_start, other_end, other in taken:
                if start <= other_end and other_start <= end:
                    raise ConsumerAssignError(
                        f"The hash range {start} to {end} of consumer {consumer.name!r} overlaps "
                        f"{other_start} to {other_end} of {other.name!r}: choose ranges apart."
                    )
            taken.append((start, end, consumer))
        self._set(taken)

    def remove(self, consumer: C) -> None:
        """Its ranges are nobody's until another consumer asks for them."""
        self._set([item for item in self._ranges if item[2] is not consumer])

    def owner(self, key_hash: int) -> C | None:
        """None where no range is."""
        index = bisect_left(self._starts, key_hash + 1) - 1
        if index < 0:
            return None
        _, end, consumer = self._ranges[index]
        return consumer if key_hash <= end else None

    def _set(self, ranges: list[tuple[int, int, C]]) -> None:
        self._ranges = sorted(ranges, key=lambda item: item[0])
        self._starts = [item[0] for item in self._ranges]
