"""The checkers find every anomaly that is put into a good history, and nothing in the good one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from tests.cluster.histories.checker import bank_anomalies, relay_anomalies, topic_anomalies
from tests.cluster.histories.history import (
    Operation,
    Outcome,
    Read,
    Reading,
    TopicHistory,
    Write,
)

KEYS: Final = ("k0", "k1", "k2")
SEEDS: Final = range(20)
TRANSFERS: Final = 30
LONG_AFTER: Final = 10_000.0


@dataclass
class Story:
    """A bank, of which each message is relayed to another topic."""

    source: TopicHistory
    output: TopicHistory

    def anomalies(self) -> list[str]:
        return [
            *topic_anomalies(self.source),
            *bank_anomalies(self.source),
            *topic_anomalies(self.output),
            *relay_anomalies(self.source.readings[-1], self.output, ordered=True),
        ]

    def reading(self) -> Reading:
        """The one that is spoilt."""
        return self.source.readings[0]

    def of(self, outcome: Outcome, *, seen: bool) -> Operation:
        """A transfer that ended so, and was read or not."""
        got = {read.value for read in self.reading().reads}
        return next(
            each
            for each in self.source.operations
            if not each.is_cut and each.outcome is outcome and (each.writes[0].value in got) is seen
        )

    def drop(self, *values: str) -> None:
        reads = self.reading().reads
        reads[:] = [read for read in reads if read.value not in values]

    def place(self, value: str) -> int:
        return next(n for n, read in enumerate(self.reading().reads) if read.value == value)


def good_story(seed: int) -> Story:
    """Transfers one after the other, each with any outcome; a cut after every tenth."""
    luck = random.Random(seed)
    source, output = TopicHistory("in", KEYS), TopicHistory("out", KEYS)
    shown: list[tuple[TopicHistory, Operation]] = []
    for number in range(1, TRANSFERS + 1):
        outcome = list(Outcome)[number % 3]
        transfer = source.begin("teller", number * 10, transfer_of(luck))
        end(transfer, outcome)
        if outcome is Outcome.OK or (outcome is Outcome.UNKNOWN and number % 2):
            shown.append((source, transfer))
        if number % 10 == 0:
            cut = source.begin("cut", number * 10 + 5, cut_of, cut=True)
            end(cut, Outcome.OK)
            shown.append((source, cut))
    copies = [
        copy_of(output, write, operation) for _, operation in shown for write in operation.writes
    ]
    for history, operations in ((source, [each for _, each in shown]), (output, copies)):
        reads = [
            Read(write.key, write.value, operation.ended_at + 1)
            for operation in operations
            for write in operation.writes
        ]
        history.readings = [Reading(name, True, list(reads)) for name in ("live", "last")]
    return Story(source, output)


def transfer_of(luck: random.Random) -> Callable[[str], list[Write]]:
    one, other = luck.sample(KEYS, 2)
    return lambda name: [
        Write(one, f"{name}-debit", amount=-5),
        Write(one, f"{name}-note"),
        Write(other, f"{name}-credit", amount=5),
    ]


def cut_of(name: str) -> list[Write]:
    return [Write(key, f"{name}-{key}") for key in KEYS]


def copy_of(output: TopicHistory, write: Write, operation: Operation) -> Operation:
    copy = output.begin(
        "relay",
        operation.begun_at,
        lambda name: [Write(write.key, f"{name}-copy", source=write.value)],
    )
    end(copy, Outcome.OK)
    return copy


def end(operation: Operation, outcome: Outcome) -> None:
    operation.commit_at = operation.begun_at + 1
    operation.ended_at = operation.begun_at + 2
    operation.outcome = outcome


# What is put in.  Each spoils what the first reader got, or what it knows of an operation.


def lose_a_committed_transaction(story: Story) -> None:
    lost = story.of(Outcome.OK, seen=True)
    story.drop(*(write.value for write in lost.writes))


def lose_one_message_of_a_committed_transaction(story: Story) -> None:
    story.drop(story.of(Outcome.OK, seen=True).writes[-1].value)


def tear_one_of_unknown_end(story: Story) -> None:
    story.drop(story.of(Outcome.UNKNOWN, seen=True).writes[-1].value)


def show_an_aborted_transaction(story: Story) -> None:
    for write in story.of(Outcome.FAILED, seen=False).writes:
        story.reading().reads.append(Read(write.key, write.value, LONG_AFTER))


def show_half_of_an_aborted_transaction(story: Story) -> None:
    write = story.of(Outcome.FAILED, seen=False).writes[0]
    story.reading().reads.append(Read(write.key, write.value, LONG_AFTER))


def show_what_is_not_committed_yet(story: Story) -> None:
    early = story.of(Outcome.OK, seen=True)
    place = story.place(early.writes[0].value)
    read = story.reading().reads[place]
    story.reading().reads[place] = replace(read, at=early.commit_at - 0.5)


def store_a_message_twice(story: Story) -> None:
    for reading in story.source.readings:
        reading.reads.insert(1, reading.reads[0])


def read_back(story: Story) -> None:
    story.reading().reads.append(story.reading().reads[0])


def show_what_nobody_wrote(story: Story) -> None:
    story.reading().reads.append(Read("k0", "nobody's", LONG_AFTER))


def show_a_message_under_another_key(story: Story) -> None:
    read = story.reading().reads[0]
    other = next(key for key in KEYS if key != read.key)
    story.reading().reads[0] = replace(read, key=other)


def swap_two_transactions(story: Story) -> None:
    """All readers have them so."""
    for reading in story.source.readings:
        reading.reads.append(reading.reads.pop(0))


def swap_two_messages_of_a_transaction(story: Story) -> None:
    debit, note, _ = (write.value for write in story.of(Outcome.OK, seen=True).writes)
    for reading in story.source.readings:
        values = [read.value for read in reading.reads]
        one, other = values.index(debit), values.index(note)
        reading.reads[one], reading.reads[other] = reading.reads[other], reading.reads[one]


def let_readers_disagree(story: Story) -> None:
    """Of two transfers that overlap either may be first, but for everybody."""
    for operation in story.source.operations:
        operation.begun_at = 0.0
    story.reading().reads.append(story.reading().reads.pop(0))


def make_money(story: Story) -> None:
    transfer = story.of(Outcome.OK, seen=True)
    transfer.writes = [replace(write, amount=abs(write.amount)) for write in transfer.writes]


def put_a_cut_into_a_transfer(story: Story) -> None:
    """Of three transfers each half but one is before the first cut; the sum is right."""
    cut = next(each for each in story.source.operations if each.is_cut)
    transfer = story.of(Outcome.OK, seen=True)
    transfer.writes = [replace(write, amount=0) for write in transfer.writes]
    reads = story.reading().reads
    late = reads.pop(story.place(transfer.writes[-1].value))
    reads.insert(story.place(cut.writes[-1].value) + 1, late)


def relay_nothing_of_a_message(story: Story) -> None:
    for reading in story.output.readings:
        reading.reads.pop()
    story.output.operations.pop()


def relay_a_message_twice(story: Story) -> None:
    operation = story.output.operations[-1]
    copy = copy_of(story.output, Write("k2", operation.writes[0].source), operation)
    for reading in story.output.readings:
        reading.reads.append(Read("k2", copy.writes[0].value, LONG_AFTER))


def relay_what_was_aborted(story: Story) -> None:
    aborted = story.of(Outcome.FAILED, seen=False)
    copy = copy_of(story.output, aborted.writes[0], aborted)
    for reading in story.output.readings:
        reading.reads.append(Read(aborted.writes[0].key, copy.writes[0].value, LONG_AFTER))


def relay_out_of_order(story: Story) -> None:
    """The relayed transactions overlap, so their order is the source's alone."""
    for operation in story.output.operations:
        operation.begun_at = 0.0
    for reading in story.output.readings:
        reading.reads.append(reading.reads.pop(0))


ANOMALIES: Final[dict[Callable[[Story], None], set[str]]] = {
    lose_a_committed_transaction: {"lost"},
    lose_one_message_of_a_committed_transaction: {"lost", "torn", "sum"},
    tear_one_of_unknown_end: {"torn", "sum", "half"},
    show_an_aborted_transaction: {"aborted"},
    show_half_of_an_aborted_transaction: {"aborted", "torn"},
    show_what_is_not_committed_yet: {"early"},
    store_a_message_twice: {"twice"},
    read_back: {"twice", "order"},
    show_what_nobody_wrote: {"unwritten"},
    show_a_message_under_another_key: {"unwritten"},
    swap_two_transactions: {"order"},
    swap_two_messages_of_a_transaction: {"order"},
    let_readers_disagree: {"disagreement"},
    make_money: {"sum"},
    put_a_cut_into_a_transfer: {"half"},
    relay_nothing_of_a_message: {"not relayed"},
    relay_a_message_twice: {"relayed twice"},
    relay_what_was_aborted: {"invented"},
    relay_out_of_order: {"relayed out of order"},
}
"""What is put in, and how the sentences begin by which it is found."""


@pytest.mark.parametrize("seed", SEEDS)
def test_checker_finds_nothing_in_a_good_history(seed: int) -> None:
    assert good_story(seed).anomalies() == []


@pytest.mark.parametrize("spoil", ANOMALIES, ids=lambda spoil: spoil.__name__)
def test_checker_finds_each_planted_anomaly(spoil: Callable[[Story], None]) -> None:
    for seed in SEEDS:
        story = good_story(seed)
        spoil(story)
        found = {sentence.partition(":")[0] for sentence in story.anomalies()}
        assert ANOMALIES[spoil] <= found, (seed, found)


def test_transaction_of_unknown_outcome_may_be_visible_or_not() -> None:
    story = good_story(1)
    assert story.of(Outcome.UNKNOWN, seen=True) is not story.of(Outcome.UNKNOWN, seen=False)


def test_unordered_reader_may_have_any_order() -> None:
    story = good_story(1)
    for reading in (story.reading(), story.output.readings[0]):
        reading.ordered = False
        reading.reads.reverse()
    assert story.anomalies() == []
    story.drop(story.of(Outcome.OK, seen=True).writes[0].value)
    assert story.anomalies()
