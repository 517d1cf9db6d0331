"""V3, V4: rows of suspect producers that are there twice, or in the wrong order."""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

from magnetar.spark.audit.row_checks import RowPlace, Sent, SuspectRow
from magnetar.spark.audit.suspect_job import check_keys, rows_by_place
from magnetar.spark.audit.violations import Findings, Rule
from magnetar.spark.range_facts import Stamp

MANY = 1_000_000
BLOCKS = 20_000
"""Of memory that may be held while many rows are looked at: no row is held in as few."""


class Row(NamedTuple):
    """A row of the producer p."""

    segment_id: int
    entry_id: int
    ms: int
    number: int
    content: int = 0
    index: int = 0  # type: ignore[assignment]

    def of(self, key: str | None) -> SuspectRow:
        ledger_id = 10 + self.segment_id
        place = RowPlace(self.segment_id, self.segment_id, ledger_id, self.entry_id, self.index)
        where = self.segment_id if key is None else -1
        stamp = Stamp(self.ms, self.number)
        return (Sent("p", stamp, self.content or self.number, where), place), key


def looked_at(rows: Iterable[SuspectRow]) -> Findings:
    """All of them, sorted as Spark does between the steps."""
    (findings,) = check_keys(sorted(rows_by_place(sorted(rows))))
    return findings


def found(rows: Iterable[Row], key: str | None = "a") -> list[Rule]:
    return [each.rule for each in looked_at(row.of(key) for row in rows).violations]


def test_rows_of_one_key_out_of_order_are_found() -> None:
    assert found([Row(0, 0, 1, 0), Row(0, 1, 1, 4), Row(1, 0, 1, 0, 9)]) == []
    assert found([Row(0, 0, 1, 0), Row(0, 1, 1, 4), Row(0, 2, 1, 0)]) == [Rule.V3]
    assert found([Row(0, 0, 1, 5), Row(0, 1, 1, 4)]) == [Rule.V4]
    assert found([Row(0, 0, 5, 5), Row(1, 0, 4, 0, 9)]) == [Rule.V4]
    assert found([Row(0, 0, 1, 5), Row(0, 1, 2, 0)]) == []


def test_rows_of_different_keys_have_no_order() -> None:
    rows = [Row(0, 0, 1, 5).of("a"), Row(0, 1, 1, 4).of("b")]
    assert looked_at(rows).is_clean


@pytest.mark.parametrize("key", ["a", None])
def test_each_further_copy_of_a_row_is_one_violation(key: str | None) -> None:
    rows = [Row(0, 0, 1, 7), Row(0, 1, 1, 8), Row(0, 2, 1, 7), Row(0, 3, 1, 7)]
    assert found(rows, key) == [Rule.V3, Rule.V3]
    told = looked_at(row.of(key) for row in rows).violations
    with_key = "without key" if key is None else "with key 'a'"
    assert told[0].what == (
        f"Message 7 of producer 'p' {with_key} is there twice: in segment 0 at 10:0, and here."
    )
    assert [each.position for each in told] == [(10, 2), (10, 3)]


def test_keyless_rows_have_no_order() -> None:
    assert found([Row(0, 0, 1, 5), Row(0, 1, 1, 4), Row(0, 2, 1, 4, 9)], key=None) == []


def test_equal_keyless_rows_of_two_segments_are_no_copies() -> None:
    rows = [Row(1, 0, 1, 5), Row(2, 0, 1, 5)]
    assert found(rows, key=None) == []
    assert found(rows) == [Rule.V3]


def test_empty_key_counts_as_a_key() -> None:
    rows = [Row(0, 0, 1, 5).of(""), Row(0, 1, 1, 4).of("")]
    assert [each.rule for each in looked_at(rows).violations] == [Rule.V4]
    mixed = [Row(0, 0, 1, 5, 1).of(""), Row(0, 1, 1, 5, 2).of(None), Row(0, 1, 1, 5, 2, 1).of(None)]
    assert looked_at(mixed).is_clean


@pytest.mark.parametrize("key", ["a", None])
def test_equal_rows_of_an_unnumbered_batch_are_no_copies(
    key: str | None,
) -> None:
    rows = [Row(0, 0, 1, 4, 77, index) for index in range(3)]
    assert found(rows, key) == []
    again = Row(0, 1, 1, 4, 77)
    assert found([*rows, again], key) == [Rule.V3]


def watched(rows: Iterable[SuspectRow], most: list[int]) -> Iterator[SuspectRow]:
    """The same rows; `most` has the blocks of memory that were held beside them at most."""
    before = sys.getallocatedblocks()
    for at, row in enumerate(rows):
        yield row
        if at % (MANY // 100) == 0:
            most[0] = max(most[0], sys.getallocatedblocks() - before)


@pytest.mark.parametrize("key", ["hot", None])
def test_check_of_one_key_runs_in_bounded_memory(key: str | None) -> None:
    """By what they are and by place they come in the same order here: nothing has to be sorted."""
    rows = (Row(0, number, number, number).of(key) for number in range(MANY))
    most = [0]
    (findings,) = check_keys(rows_by_place(watched(rows, most)))
    assert findings.is_clean
    assert findings.checked[Rule.V4] == (0 if key is None else MANY)
    assert most[0] < BLOCKS


def test_copies_are_found_however_far_behind_they_are() -> None:
    far = 120_000
    rows = [Row(0, number, number, number) for number in range(far)]
    assert found([*rows, rows[-1]._replace(entry_id=far)]) == [Rule.V3]
