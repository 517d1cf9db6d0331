"""Choice of the consumer of an entry: pure code, without entries, connections or time."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Generic, Protocol, TypeVar

from broker.topics.dispatch.errors import ConsumerAssignError
from config.bounds import RING_DISTANCES
from magnetar.protocol.key_hash import KEY_SPACE, HashRange, key_hash
from magnetar.protocol.names import TopicName

POINTS_PER_CONSUMER: Final = 100
_RING: Final = 2**31
"""Pulsar leaves out the highest bit of the hashes of topics and consumers."""


class Candidate(Protocol):
    """A consumer, as selection sees it."""

    @property
    def name(self) -> str:
        """The consumer's name; need not be unique."""
        ...

    @property
    def priority_level(self) -> int:
        """0 is served first."""
        ...


C = TypeVar("C", bound=Candidate)


def choose_active(consumers: Sequence[C], topic: TopicName) -> C:
    """The active one of a Failover subscription's consumers, of which there is at least one.

    Only consumers of the best priority level (the lowest number) count.  The index of the partition
    picks one of them, ordered by name, so that partitions spread.  Of a topic that is no partition
    it is the one that follows the topic on a ring of their names, so that topics spread.
    """
    best = min(consumer.priority_level for consumer in consumers)
    ranked = sorted(
        (consumer for consumer in consumers if consumer.priority_level == best),
        key=lambda consumer: consumer.name,
    )
    if topic.partition_index is not None:
        return ranked[topic.partition_index % len(ranked)]
    name = str(topic)
    # Of several at one point the last one counts: of two with one name the newer one.
    return min(reversed(ranked), key=lambda consumer: _ring_distance(consumer.name, name))


@lru_cache(RING_DISTANCES)
def _ring_distance(consumer: str, topic: str) -> int:
    """How far the first of a consumer's points on Pulsar's ring is behind that of a topic."""
    place = key_hash(topic.encode())
    return min(
        (key_hash(f"{consumer}{index}".encode()) - place) % _RING
        for index in range(POINTS_PER_CONSUMER)
    )


class Rotation(Generic[C]):
    """The turn order of a Shared subscription.

    It is round robin within the best priority level that can receive; lower levels get what the
    better ones cannot take.
    """

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
        """Remove `consumer`; the turn of another one does not change."""
        level = consumer.priority_level
        members = self._levels[level]
        index = members.index(consumer)
        del members[index]
        if index < self._turns[level]:
            self._turns[level] -= 1
        if not members:
            del self._levels[level], self._turns[level]
            self._order = sorted(self._levels)

    def next(self, can_receive: Callable[[C], bool]) -> C | None:
        """The next consumer that can receive."""
        for level in self._order:
            members = self._levels[level]
            size = len(members)
            turn = self._turns[level]
            for step in range(size):
                index = (turn + step) % size
                if can_receive(members[index]):
                    self._turns[level] = index + 1
                    return members[index]
        return None

    def give_back(self, consumer: C) -> None:
        """Give the turn back to `consumer`, which got nothing on it."""
        level = consumer.priority_level
        self._turns[level] = self._levels[level].index(consumer)


class KeyAssignment(ABC, Generic[C]):
    """Assignment of the key hashes of a Key_Shared subscription to its consumers."""

    @abstractmethod
    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """Let `consumer` own hashes.  Raises `ConsumerAssignError`, and then changes nothing."""

    @abstractmethod
    def remove(self, consumer: C) -> None:
        """Take the consumer's hashes away."""

    @abstractmethod
    def owner(self, key_hash: int) -> C | None:
        """The owner of the hash, if it has one."""

    @abstractmethod
    def ranges(self) -> Iterable[tuple[HashRange, C]]:
        """The hashes that have an owner, in ascending order, with it."""

    def ranges_by_owner(self) -> dict[C, list[HashRange]]:
        """The hashes of each owner, in ascending order; ranges that touch are one."""
        found: dict[C, list[HashRange]] = {}
        for (first, last), owner in self.ranges():
            own = found.setdefault(owner, [])
            if own and own[-1][1] + 1 == first:
                own[-1] = (own[-1][0], last)
            else:
                own.append((first, last))
        return found


class AutoSplit(KeyAssignment[C]):
    """AUTO_SPLIT: consistent hashing; every consumer owns the arcs before its points on a ring.

    Points come from the consumers' names, so a consumer that joins or leaves moves only the keys
    that it takes or leaves.
    """

    def __init__(self) -> None:
        self._consumers: list[C] = []
        self._points: list[int] = []
        self._owners: list[C] = []

    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """See the base class; `ranges` do not matter here."""
        self._consumers.append(consumer)
        self._rebuild()

    def remove(self, consumer: C) -> None:
        """See the base class.  Its arcs go to the owners of the points that follow them."""
        self._consumers.remove(consumer)
        self._rebuild()

    def owner(self, key_hash: int) -> C | None:
        """See the base class; None only without consumers."""
        if not self._owners:
            return None
        index = bisect_left(self._points, key_hash)
        return self._owners[index if index < len(self._owners) else 0]

    def ranges(self) -> Iterable[tuple[HashRange, C]]:
        """See the base class."""
        first = 0
        for point, owner in zip(self._points, self._owners, strict=True):
            yield (first, point), owner
            first = point + 1
        if self._owners and first < KEY_SPACE:
            yield (first, KEY_SPACE - 1), self._owners[0]

    def _rebuild(self) -> None:
        """Compute the points; of two on one point the first by name counts, then the older."""
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
    """STICKY: every consumer owns the ranges that it named; they may not overlap."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, C]] = []
        self._starts: list[int] = []

    def add(self, consumer: C, ranges: Sequence[HashRange]) -> None:
        """See the base class.

        Raises `ConsumerAssignError` if there is no range, or for ranges that are not ascending,
        leave 0 to 65535 or overlap others.
        """
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
        """See the base class.  Its ranges have no owner until another consumer names them."""
        self._set([item for item in self._ranges if item[2] is not consumer])

    def owner(self, key_hash: int) -> C | None:
        """See the base class; None where no range is."""
        index = bisect_left(self._starts, key_hash + 1) - 1
        if index < 0:
            return None
        _, end, consumer = self._ranges[index]
        return consumer if key_hash <= end else None

    def ranges(self) -> Iterable[tuple[HashRange, C]]:
        """See the base class."""
        return (((start, end), consumer) for start, end, consumer in self._ranges)

    def _set(self, ranges: list[tuple[int, int, C]]) -> None:
        self._ranges = sorted(ranges, key=lambda item: item[0])
        self._starts = [item[0] for item in self._ranges]
