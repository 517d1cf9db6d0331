"""Messages in pieces, as a scan sees them."""

import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from magnetar.protocol.ids import Position
from magnetar.reads import StoredEntry
from magnetar.spark import message_pieces as kept
from magnetar.spark.audit.transaction_checks import attempt_id, check_counts, expected_of_groups
from magnetar.spark.audit.violations import Findings, Rule
from magnetar.spark.range_facts import SeenTransaction, Tally
from magnetar.spark.range_observer import Observer
from magnetar.spark.row_hash import row_hash
from tests.unit.magnetar.spark.audit.topic_facts import group, segment, snapshot
from tests.unit.magnetar.spark.stored import pieces

MIB = 1024 * 1024
VALUE = b"0123456789"
TXN = attempt_id("1_7", 1)


def scanned(numbers: Sequence[int], start: int = 0) -> SeenTransaction:
    """The attempt, of pieces stored in this order; the range begins behind the first ones."""
    most, _, least = TXN.partition("_")
    ids = {"txnid_most_bits": int(most), "txnid_least_bits": int(least)}
    parts = pieces(5, VALUE, 3, **ids)
    observer = Observer(0, Position(10, start), Position(10, len(numbers)))
    stored = [StoredEntry(10, at, parts[number]) for at, number in enumerate(numbers)]
    observer.take(stored[start:])
    return observer.result().transactions[TXN]


def broken(seen: SeenTransaction, told: Tally) -> tuple[set[Rule], int]:
    findings = Findings()
    records = snapshot(group(7, 0, {1: {segment(0).topic: told}}))
    check_counts(expected_of_groups(records), [seen], records, findings)
    return {rule for rule, count in findings.counts.items() if count}, len(findings.unchecked)


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 1, 1, 2), (0, 0, 1, 2), (0, 1, 0, 1, 2)])
def test_chunks_sent_again_make_one_message(numbers: Sequence[int]) -> None:
    whole = Tally(1, row_hash(None, VALUE))
    assert scanned(numbers).readable == whole
    assert broken(scanned(numbers), whole) == (set(), 0)


def test_message_with_first_chunks_in_another_range_is_not_missing() -> None:
    seen = scanned((0, 1, 2), start=1)
    assert (seen.readable.messages, seen.incomplete) == (0, 1)
    assert broken(seen, Tally(1, row_hash(None, VALUE))) == (set(), 1)
    assert broken(seen, Tally(2, 9))[0] == {Rule.V1}


def test_message_with_a_lost_chunk_is_reported_and_makes_no_row() -> None:
    assert scanned((0, 2)).readable == Tally()


def first_pieces(messages: int, size: int, count: int = 2) -> Iterator[StoredEntry]:
    """All pieces of messages but the last one of each."""
    for number in range(messages):
        *parts, _ = pieces(number, bytes(size) * count, count)
        for at, part in enumerate(parts):
            yield StoredEntry(10, number * count + at, part)


def most_held(entries: Iterator[StoredEntry]) -> int:
    """Bytes that an observer of these holds at most, and what is at hand meanwhile."""
    observer = Observer(0, Position(10, 0), Position(11, 0))
    tracemalloc.start()
    try:
        observer.take(entries)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_observer_bounds_the_bytes_of_incomplete_messages() -> None:
    at_hand = 16 * MIB
    assert most_held(first_pieces(96, MIB)) < kept.PIECE_BYTES_KEPT + at_hand


def test_observer_bounds_the_number_of_incomplete_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "PIECES_KEPT", 20)
    observer = Observer(0, Position(10, 0), Position(11, 0))
    short = pieces(9, VALUE, 10)
    observer.take(StoredEntry(10, at, part) for at, part in enumerate(short[:-1]))
    observer.take(first_pieces(2, 10, count=7))
    observer.take([StoredEntry(10, 99, short[-1])])
    assert observer.result().incomplete == 1, "it began first, and was given up"


def test_message_larger_than_the_bound_is_not_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "PIECE_BYTES_KEPT", 50)
    seen = scanned((0, 1, 2))
    assert (seen.readable.messages, seen.incomplete) == (0, 1)
    assert broken(seen, Tally(1, row_hash(None, VALUE))) == (set(), 1)
