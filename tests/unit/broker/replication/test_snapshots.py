"""Snapshots of replicated subscriptions: their rounds, their time, and that none is ahead."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.replication.snapshots import CompleteSnapshot, NextRound, Snapshots
from broker.topics.subscription_markers import Snapshot
from magnetar.protocol.ids import EARLIEST, Position

EAST, WEST, NORTH = "east", "west", "north"
WEST_ALONE = frozenset({WEST})
BOTH = frozenset({WEST, NORTH})


def numbered() -> Callable[[], str]:
    """Ids 1, 2, ..."""
    numbers = itertools.count(1)
    return lambda: str(next(numbers))


def made(*, timeout_s: float = 30, max_pending: int = 10) -> Snapshots:
    """Snapshots with the ids 1, 2, ..."""
    return Snapshots(numbered(), timeout_s=timeout_s, max_pending=max_pending)


def at(entry: int) -> Position:
    """A position."""
    return Position(1, entry)


def test_one_round_is_enough_with_one_other_cluster() -> None:
    snapshots = made()
    assert snapshots.begin(0, at(5), WEST_ALONE) == "1"
    completed = snapshots.answer("1", WEST, at(70), at(8), 0.5)
    assert completed == CompleteSnapshot(Snapshot("1", at(8), {WEST: at(70)}), 0.5)
    assert len(snapshots) == 0


def test_two_rounds_give_positions_of_the_first_and_a_place_of_the_second() -> None:
    snapshots = made()
    assert snapshots.begin(0, at(5), BOTH) == "1"
    assert snapshots.answer("1", WEST, at(70), at(8), 1) is None
    assert snapshots.answer("1", NORTH, at(90), at(9), 2) == NextRound("2")
    assert snapshots.answer("2", NORTH, at(91), at(12), 3) is None
    completed = snapshots.answer("2", WEST, at(75), at(13), 4)
    assert completed == CompleteSnapshot(Snapshot("2", at(13), {WEST: at(70), NORTH: at(90)}), 4)


def test_answer_that_comes_again_counts_once() -> None:
    snapshots = made()
    snapshots.begin(0, at(5), BOTH)
    assert snapshots.answer("1", WEST, at(70), at(8), 0) is None
    assert snapshots.answer("1", WEST, at(72), at(9), 0) is None
    assert snapshots.answer("1", NORTH, at(90), at(10), 0) == NextRound("2")
    assert snapshots.answer("1", WEST, at(73), at(11), 0) is None
    assert snapshots.answer("1", NORTH, at(91), at(12), 0) is None
    assert snapshots.answer("2", WEST, at(74), at(13), 0) is None
    assert isinstance(snapshots.answer("2", NORTH, at(92), at(14), 0), CompleteSnapshot)
    assert snapshots.answer("2", NORTH, at(92), at(15), 0) is None


def test_snapshot_is_dropped_at_its_timeout_and_late_answers_are_not_taken() -> None:
    snapshots = made(timeout_s=30)
    snapshots.begin(0, at(5), WEST_ALONE)
    assert snapshots.drop_late(29.9) == 0
    assert snapshots.drop_late(30) == 1
    assert snapshots.answer("1", WEST, at(70), at(8), 31) is None
    assert not snapshots.includes(at(5))
    assert snapshots.begin(31, at(5), WEST_ALONE) == "2"


def test_no_snapshot_begins_without_a_message_since_the_last_one() -> None:
    snapshots = made()
    assert snapshots.begin(0, EARLIEST, WEST_ALONE) is None
    snapshots.begin(0, at(5), WEST_ALONE)
    snapshots.answer("1", WEST, at(70), at(8), 0)
    assert snapshots.includes(at(5))
    assert snapshots.begin(1, at(5), WEST_ALONE) is None
    assert snapshots.begin(2, at(9), WEST_ALONE) == "2"
    # One that is under way includes it already.
    assert snapshots.begin(3, at(9), WEST_ALONE) is None
    snapshots.renew()
    snapshots.answer("2", WEST, at(71), at(11), 4)
    snapshots.renew()
    assert snapshots.begin(5, at(9), WEST_ALONE) == "3"


def test_no_snapshot_begins_without_another_cluster() -> None:
    assert made().begin(0, at(5), frozenset()) is None


def test_cluster_that_never_answered_gets_one_request_in_a_timeout() -> None:
    snapshots = made(timeout_s=30)
    assert snapshots.begin(0, at(5), WEST_ALONE) == "1"
    assert snapshots.begin(1, at(6), WEST_ALONE) is None
    snapshots.drop_late(30)
    assert snapshots.begin(30, at(6), WEST_ALONE) == "2"


def test_pending_snapshots_have_a_bound() -> None:
    snapshots = made(max_pending=3)
    snapshots.begin(0, at(0), WEST_ALONE)
    snapshots.answer("1", WEST, at(70), at(1), 0)
    begun = [snapshots.begin(1, at(2 + number), WEST_ALONE) for number in range(5)]
    assert begun == ["2", "3", "4", None, None]
    assert len(snapshots) == 3


def test_change_of_the_clusters_drops_what_is_pending() -> None:
    snapshots = made()
    snapshots.begin(0, at(5), WEST_ALONE)
    assert snapshots.begin(1, at(5), BOTH) == "2"
    assert snapshots.answer("1", WEST, at(70), at(8), 2) is None
    assert len(snapshots) == 1


# Logs of several clusters


class Item(NamedTuple):
    """An entry: a message, or a marker of a request or a response."""

    origin: str
    number: int
    request_id: str = ""
    answer: Position | None = None
    only_to: str = ""


class Log:
    """The topic in one cluster: its entries, and what its replicators have read and sent."""

    def __init__(self, name: str, others: list[str], new_id: Callable[[], str]) -> None:
        self.name = name
        self.items: list[Item] = []
        self.snapshots = Snapshots(new_id, timeout_s=1_000_000, max_pending=3)
        self.read = dict.fromkeys(others, 0)
        self.acknowledged = dict.fromkeys(others, 0)
        self.sent: dict[str, deque[tuple[int, Item]]] = {each: deque() for each in others}

    def place(self, number: int) -> Position:
        """The position of an item: each log has positions of its own."""
        return Position(len(self.name), number)

    def messages_up_to(self, position: Position) -> set[tuple[str, int]]:
        """The messages at or before a position."""
        before = self.items[: position.entry_id + 1]
        return {(each.origin, each.number) for each in before if not each.request_id}


class Clusters:
    """Clusters that replicate to each other, one step of any of them at a time.

    `broken` is a rule that does not hold: S3 takes the answers of the first round for a snapshot,
    S4 gives the second round the id of the first one.
    """

    def __init__(self, names: list[str], seed: int, broken: str | None = None) -> None:
        new_id = numbered()
        self.logs = {
            name: Log(name, [each for each in names if each != name], new_id) for name in names
        }
        self.rng = Random(seed)
        self.broken = broken
        self.second_ids: dict[str, str] = {}
        """Ids of second rounds, by the one of the first round that is used for both."""
        self.numbers = itertools.count()
        self.answers: dict[tuple[str, str], dict[str, Position]] = {}
        self.completed: list[tuple[str, Snapshot]] = []

    def step(self) -> None:
        """Anything that may happen next."""
        log = self.rng.choice(list(self.logs.values()))
        other = self.rng.choice(list(log.sent))
        actions = [self.publish, self.request, self.send, self.arrive, self.reconnect]
        (action,) = self.rng.choices(actions, (2, 1, 28, 16, 0.5))
        action(log, other)

    def publish(self, log: Log, _: str) -> None:
        log.items.append(Item(log.name, next(self.numbers)))

    def request(self, log: Log, _: str) -> None:
        if log.items:
            newest = log.place(len(log.items) - 1)
            request_id = log.snapshots.begin(0, newest, frozenset(log.sent))
            if request_id is not None:
                log.items.append(Item(log.name, -1, request_id))

    def send(self, log: Log, other: str) -> None:
        """The replicator to the other cluster reads its next entry."""
        number = log.read[other]
        if number >= len(log.items):
            return
        log.read[other] += 1
        item = log.items[number]
        if item.origin == log.name:
            if item.only_to in ("", other):
                log.sent[other].append((number, item))
        elif item.origin == other and item.request_id:
            if item.answer is None:
                last = log.place(len(log.items) - 1)
                log.items.append(Item(log.name, -1, item.request_id, last, only_to=other))
            else:
                self.answer(log, item, item.answer, log.place(number))

    def answer(self, log: Log, item: Item, there: Position, here: Position) -> None:
        known = self.answers.setdefault((log.name, item.request_id), {})
        known.setdefault(item.origin, there)
        request_id = self.second_ids.get(item.request_id, item.request_id)
        answer = log.snapshots.answer(request_id, item.origin, there, here, 0)
        if isinstance(answer, CompleteSnapshot):
            self.completed.append((log.name, answer.snapshot))
        elif isinstance(answer, NextRound) and self.broken == "S3":
            self.completed.append((log.name, Snapshot(item.request_id, here, dict(known))))
        elif isinstance(answer, NextRound) and self.broken == "S4":
            self.second_ids[item.request_id] = answer.request_id
            log.items.append(Item(log.name, -1, item.request_id))
        elif isinstance(answer, NextRound):
            log.items.append(Item(log.name, -1, answer.request_id))

    def arrive(self, log: Log, other: str) -> None:
        """The oldest entry in flight to the other cluster is stored there."""
        if log.sent[other]:
            number, item = log.sent[other].popleft()
            self.logs[other].items.append(item)
            if self.rng.random() < 0.7:
                log.acknowledged[other] = number + 1

    def reconnect(self, log: Log, other: str) -> None:
        """What has no receipt is read and sent again."""
        log.sent[other].clear()
        log.read[other] = log.acknowledged[other]

    def ahead(self) -> Iterator[tuple[str, str]]:
        """Who says of whom that messages are consumed which it has not."""
        for name, snapshot in self.completed:
            here = self.logs[name].messages_up_to(snapshot.position)
            for other, position in snapshot.remote.items():
                if not self.logs[other].messages_up_to(position) <= here:
                    yield name, other


def after_steps(clusters: Clusters, steps: int = 1500) -> Clusters:
    """The clusters after so many steps."""
    for _ in range(steps):
        clusters.step()
    return clusters


@given(seed=st.integers(0, 2**32), names=st.sampled_from([[EAST, WEST], [EAST, WEST, NORTH]]))
def test_snapshot_is_never_ahead_of_what_its_cluster_has(seed: int, names: list[str]) -> None:
    clusters = after_steps(Clusters(names, seed))
    assert not list(clusters.ahead())


@pytest.mark.parametrize("names", [[EAST, WEST], [EAST, WEST, NORTH]])
def test_steps_lead_to_snapshots_of_all_clusters(names: list[str]) -> None:
    clusters = [after_steps(Clusters(names, seed)) for seed in range(20)]
    assert {name for each in clusters for name, _ in each.completed} == set(names)


@pytest.mark.parametrize("rule", ["S3", "S4"])
def test_snapshot_among_three_clusters_would_be_ahead_without_a_rule(rule: str) -> None:
    def is_ahead(seed: int) -> bool:
        clusters = Clusters([EAST, WEST, NORTH], seed, broken=rule)
        return any(after_steps(clusters).ahead())

    assert any(is_ahead(seed) for seed in range(1000))
