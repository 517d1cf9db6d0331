"""Which replica is asked for what, and when an answer is enough."""

from dataclasses import replace

import pytest

from config import bounds
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import OpenedEntry
from storage.ledger.bookkeeper.ledger_metadata import BookieId, Ensemble, LedgerMetadata
from storage.ledger.bookkeeper.reads import (
    LastConfirmedRead,
    RangeRead,
    ReadBatch,
    ReadEffect,
    ReadFailure,
    ReadOne,
    ReadState,
)
from tests.unit.storage.ledger.bookkeeper.test_adds import ledger

OK, NONE, GONE = ReplyCode.OK, ReplyCode.NO_SUCH_ENTRY, ReplyCode.DISCONNECTED
STRIPED = ledger(3, 2, 2)
WHOLE = ledger(2, 2, 2)


def data(entry_id: int, size: int = 10) -> bytes:
    return b"%d" % (entry_id % 10) * size


def entry(entry_id: int, size: int = 10) -> OpenedEntry:
    return OpenedEntry(entry_id, entry_id - 1, size * (entry_id + 1), data(entry_id, size))


def read(
    metadata: LedgerMetadata,
    first: int,
    last: int,
    max_bytes: int = 1 << 20,
    *,
    mean: int = 10,
    batches: bool = True,
) -> RangeRead:
    return RangeRead(
        metadata, first, last, max_bytes, mean_bytes=mean, overhead_bytes=40, batches=batches
    )


def ones(effects: list[ReadEffect]) -> list[tuple[str, int]]:
    assert all(isinstance(effect, ReadOne) for effect in effects)
    return [(each.bookie, each.entry_id) for each in effects if isinstance(each, ReadOne)]


def batch(effects: list[ReadEffect]) -> ReadBatch:
    (effect,) = effects
    assert isinstance(effect, ReadBatch)
    return effect


def test_striped_entries_are_asked_for_one_by_one_and_at_once() -> None:
    machine = read(STRIPED, 1, 4)
    effects = machine.start()
    assert ones(effects) == [("b1", 1), ("b2", 2), ("b0", 3), ("b1", 4)]
    for effect in reversed(effects):
        assert machine.state is ReadState.READING
        assert isinstance(effect, ReadOne)
        assert machine.entry_replied(effect, OK, entry(effect.entry_id)) == []
    assert machine.state is ReadState.DONE
    assert machine.entries == [data(n) for n in range(1, 5)]


@pytest.mark.parametrize("code", [NONE, GONE, ReplyCode.NO_SUCH_LEDGER, ReplyCode.IO_ERROR, OK])
def test_the_next_replica_after_an_error(code: ReplyCode) -> None:
    """OK without an entry: its copy is damaged."""
    machine = read(STRIPED, 2, 2)
    (first,) = machine.start()
    assert isinstance(first, ReadOne)
    (second,) = machine.entry_replied(first, code, None)
    assert ones([first, second]) == [("b2", 2), ("b0", 2)]
    assert isinstance(second, ReadOne)
    assert machine.entry_replied(second, OK, entry(2)) == []
    assert (machine.entries, machine.retries) == ([data(2)], 1)


@pytest.mark.parametrize(
    ("codes", "failure"),
    [
        ((NONE, NONE), ReadFailure.MISSING),
        ((ReplyCode.NO_SUCH_LEDGER, NONE), ReadFailure.MISSING),
        ((NONE, GONE), ReadFailure.UNAVAILABLE),
        ((ReplyCode.STATE_UNKNOWN, NONE), ReadFailure.UNAVAILABLE),
        ((OK, GONE), ReadFailure.UNAVAILABLE),
        ((GONE, OK), ReadFailure.UNAVAILABLE),
        ((NONE, OK), ReadFailure.DAMAGED),
        ((OK, OK), ReadFailure.DAMAGED),
    ],
)
def test_no_replica_gives_it(codes: tuple[ReplyCode, ...], failure: ReadFailure) -> None:
    machine = read(STRIPED, 0, 0)
    effects = machine.start()
    for code in codes:
        (effect,) = effects
        assert isinstance(effect, ReadOne)
        effects = machine.entry_replied(effect, code, None)
    assert (machine.state, machine.failure) == (ReadState.FAILED, failure)
    assert machine.failed_entry_id == 0


def test_read_returns_the_entries_before_a_lost_one() -> None:
    machine = read(STRIPED, 0, 2)
    zero, one, two = machine.start()
    assert isinstance(zero, ReadOne)
    assert isinstance(one, ReadOne)
    assert isinstance(two, ReadOne)
    machine.entry_replied(two, OK, entry(2))
    (again,) = machine.entry_replied(one, NONE, None)
    assert isinstance(again, ReadOne)
    machine.entry_replied(again, NONE, None)
    assert machine.state is ReadState.READING
    machine.entry_replied(zero, OK, entry(0))
    assert (machine.state, machine.entries) == (ReadState.DONE, [data(0)])


def answered(machine: RangeRead, effects: list[ReadEffect], size: int = 10) -> int:
    """Answer everything one by one; how many requests there were."""
    count = 0
    while effects:
        effect = effects.pop(0)
        count += 1
        if isinstance(effect, ReadOne):
            effects += machine.entry_replied(effect, OK, entry(effect.entry_id, size))
        else:
            room, found = effect.max_bytes, list[OpenedEntry]()
            for entry_id in range(effect.first, effect.first + effect.max_entries):
                room -= size + 40
                if found and room < 0:
                    break
                found.append(entry(entry_id, size))
            effects += machine.batch_replied(effect, OK, found)
    return count


@pytest.mark.parametrize("metadata", [STRIPED, WHOLE])
@pytest.mark.parametrize(("max_bytes", "expected"), [(35, 3), (1, 1), (0, 1), (100, 10), (99, 9)])
def test_bounded_in_bytes_but_at_least_one(
    metadata: LedgerMetadata, max_bytes: int, expected: int
) -> None:
    machine = read(metadata, 0, 9, max_bytes)
    answered(machine, machine.start())
    assert machine.entries == [data(n) for n in range(expected)]


def test_reads_in_flight_are_bounded() -> None:
    assert len(read(STRIPED, 0, 9999).start()) == bounds.LEDGER_READS_IN_FLIGHT
    assert len(read(STRIPED, 0, 9999, 100, mean=30).start()) == 3
    assert len(read(STRIPED, 0, 9999, 100, mean=1000).start()) == 1
    machine = read(STRIPED, 0, 199)
    answered(machine, machine.start())
    assert len(machine.entries) == 200


def test_a_batch_where_every_bookie_has_everything() -> None:
    machine = read(WHOLE, 5, 9)
    first = batch(machine.start())
    assert (first.bookie, first.first, first.max_entries) == ("b1", 5, 5)
    assert first.max_bytes >= 5 * 50
    second = batch(machine.batch_replied(first, OK, [entry(5), entry(6)]))
    assert (second.bookie, second.first, second.max_entries) == ("b1", 7, 3)
    assert machine.batch_replied(second, OK, [entry(n) for n in (7, 8, 9)]) == []
    assert machine.entries == [data(n) for n in range(5, 10)]


def test_a_batch_ends_with_its_ensemble() -> None:
    moved = replace(
        WHOLE, ensembles=(*WHOLE.ensembles, Ensemble(3, (BookieId("x"), BookieId("y"))))
    )
    machine = read(moved, 0, 5)
    first = batch(machine.start())
    assert (first.bookie, first.max_entries) == ("b0", 3)
    second = batch(machine.batch_replied(first, OK, [entry(n) for n in range(3)]))
    assert (second.bookie, second.first, second.max_entries) == ("y", 3, 3)


@pytest.mark.parametrize("code", [GONE, ReplyCode.BAD_REQUEST, NONE, OK])
def test_the_next_replica_then_one_by_one(code: ReplyCode) -> None:
    machine = read(WHOLE, 0, 2)
    first = batch(machine.start())
    second = batch(machine.batch_replied(first, code, []))
    assert (first.bookie, second.bookie) == ("b0", "b1")
    effects = machine.batch_replied(second, code, [])
    assert ones(effects) == [("b0", 0), ("b1", 1), ("b0", 2)]
    answered(machine, effects)
    assert machine.entries == [data(n) for n in range(3)]
    assert machine.batches_refused is (code is ReplyCode.BAD_REQUEST)


def test_no_batch_for_one_entry_or_where_they_are_not_wanted() -> None:
    assert ones(read(WHOLE, 3, 3).start()) == [("b1", 3)]
    assert len(ones(read(WHOLE, 0, 4, batches=False).start())) == 5


def test_late_answers_change_nothing() -> None:
    machine = read(STRIPED, 0, 2, 10)
    effects = machine.start()
    zero = effects[0]
    assert isinstance(zero, ReadOne)
    machine.entry_replied(zero, OK, entry(0))
    assert machine.state is ReadState.DONE
    assert machine.entry_replied(zero, OK, entry(0)) == []
    assert machine.entries == [data(0)]


def last_confirmed(metadata: LedgerMetadata) -> tuple[LastConfirmedRead, list[ReadOne]]:
    machine = LastConfirmedRead(metadata)
    return machine, machine.start()


def test_the_highest_of_those_who_answered() -> None:
    machine, requests = last_confirmed(ledger(3, 3, 2))
    assert [(each.bookie, each.entry_id) for each in requests] == [
        ("b0", -1),
        ("b1", -1),
        ("b2", -1),
    ]
    machine.replied(requests[0], OK, entry(4))
    assert machine.state is ReadState.READING
    machine.replied(requests[2], OK, entry(9))
    assert (machine.state, machine.last_confirmed) == (ReadState.DONE, 8)
    machine.replied(requests[1], OK, entry(20))
    assert machine.last_confirmed == 8


def test_one_bookie_does_not_count_twice() -> None:
    machine, requests = last_confirmed(ledger(3, 3, 2))
    machine.replied(requests[0], NONE, None)
    machine.replied(requests[0], NONE, None)
    machine.replied(ReadOne(BookieId("b0"), -1), NONE, None)
    assert machine.state is ReadState.READING


def test_five_bookies_in_pairs() -> None:
    """5/2/2: one of each neighbouring pair."""
    machine, requests = last_confirmed(ledger(5, 2, 2))
    for place in (0, 2):
        machine.replied(requests[place], NONE, None)
        assert machine.state is ReadState.READING
    machine.replied(requests[1], GONE, None)
    before = machine.state
    machine.replied(requests[3], NONE, None)
    assert (before, machine.state) == (ReadState.READING, ReadState.DONE)


def test_out_of_reach() -> None:
    machine, requests = last_confirmed(ledger(5, 2, 2))
    machine.replied(requests[0], NONE, None)
    machine.replied(requests[2], ReplyCode.STATE_UNKNOWN, None)
    before = machine.state
    machine.replied(requests[3], OK, None)
    assert (before, machine.state) == (ReadState.READING, ReadState.FAILED)
