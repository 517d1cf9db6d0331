"""V3, V4: holes, views, and producers that are suspects."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.message import build_batch, build_entry
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.reads import StoredEntry, Visibility
from magnetar.spark.audit.order_checks import check_entries, check_views, suspects
from magnetar.spark.audit.transaction_checks import attempt_id, check_counts, expected_of_groups
from magnetar.spark.audit.violations import Findings, Rule
from magnetar.spark.range_facts import SeenProducer, Stamp, join_ranges
from magnetar.spark.range_observer import Observer
from tests.unit.magnetar.spark.audit.topic_facts import (
    T0_MS,
    encrypted,
    entry,
    group,
    seen,
    segment,
    snapshot,
    tally,
)

ROWS = [("a", b"1"), ("b", b"2")]


def missing(entries: list[StoredEntry], **of_segment: object) -> list[str]:
    findings = Findings()
    check_entries(seen(0, entries), snapshot(segments=[segment(0, **of_segment)]), findings)
    return [each.what for each in findings.violations]


def test_consecutive_entries_are_clean() -> None:
    entries = [entry((10, i), ROWS, first=2 * i) for i in range(3)] + [entry((11, 0), ROWS)]
    assert not missing(entries, entries_of={10: 3})


def test_missing_entry_is_a_violation_within_and_between_ledgers() -> None:
    entries = [entry((10, i), ROWS) for i in (1, 3)] + [entry((11, 0), ROWS)]
    told = missing([entry((10, 0), ROWS), *entries], entries_of={10: 5})
    assert told == [
        "1 entries of ledger 10 are missing, 2 to 2.",
        "1 entries of ledger 10 are missing, 4 to 4.",
    ]
    assert missing(entries[-1:], earliest=Position(10, 0), entries_of={10: 5}) == []


def test_trimmed_entries_are_not_missing() -> None:
    entries = [entry((10, i), ROWS) for i in (3, 4)]
    assert not missing(entries, earliest=Position(10, 3), entries_of={10: 5})


@pytest.mark.parametrize(
    ("taken", "violations", "unchecked"),
    [
        (Position(10, -1), 1, 0),
        (Position(10, 2), 1, 2),
        (Position(10, 3), 0, 3),
        (Position(11, 0), 0, 3),
        (LATEST, 0, 3),
        (None, 1, 0),
    ],
)
def test_entries_trimmed_during_the_audit_are_not_missing(
    taken: Position | None, violations: int, unchecked: int
) -> None:
    observer = Observer(0, Position(10, 0), Position(10, 5))
    observer.take([entry((10, i), ROWS) for i in (3, 4)])
    findings = Findings()
    records = snapshot(segments=[segment(0, entries_of={10: 5}, trimmed_to=taken)])
    check_entries(observer.result(), records, findings)
    assert findings.counts[Rule.V3] == violations
    assert sum(findings.unchecked.values()) == unchecked
    if unchecked == 2:
        assert "1 entries of ledger 10 are missing, 2 to 2." in findings.violations[0].what


def test_damaged_entry_is_a_violation() -> None:
    bad = entry((10, 1), ROWS)
    told = missing([entry((10, 0), ROWS), bad._replace(data=bad.data[:-1] + b"\xff")])
    assert told == ["The entry 10:1 cannot be taken apart."]


@pytest.mark.parametrize("by_attempt", [True, False])
def test_encrypted_entry_is_left_unchecked(by_attempt: bool) -> None:
    txn = attempt_id("1_7", 1)
    known, locked = entry((10, 0), ROWS, txn=txn), encrypted(entry((10, 1), ROWS, txn=txn))
    told = tally(ROWS).plus(tally(ROWS))
    scanned, findings = seen(0, [known, locked]), Findings()
    counts = {segment(0).topic: told}
    committed = group(7, 0, {1: counts if by_attempt else {}})
    if not by_attempt:
        assert committed.commit is not None
        committed = replace(committed, commit=replace(committed.commit, totals=counts))
    records = snapshot(committed)
    check_entries(scanned, records, findings)
    check_counts(expected_of_groups(records), scanned.transactions.values(), records, findings)
    assert findings.is_clean, findings.violations
    assert sorted(findings.unchecked.values()) == [1, 1]
    assert any("segment 0" in why for why in findings.unchecked)
    assert (scanned.entries, scanned.rows, scanned.encrypted) == (2, 2, 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=2),
    st.data(),
)
def test_joined_parts_of_a_segment_equal_the_whole(
    made: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    entries = []
    number = at = 0
    for skipped, producer, is_new in made:
        at += 1 + skipped
        number = 0 if is_new else number + 2
        entries.append(
            entry((10, at), ROWS, first=number, sent_ms=T0_MS + at, producer=f"p{producer}")
        )
    split = data.draw(st.integers(1, len(entries) - 1))
    whole = seen(0, entries)
    parts = []
    for some, start, end in (
        (entries[:split], whole.start, entries[split].position),
        (entries[split:], entries[split].position, whole.end),
    ):
        observer = Observer(0, start, end)
        observer.take(some)
        parts.append(observer.result())
    together = join_ranges(parts)
    assert together.transactions == whole.transactions
    assert together.holes == whole.holes
    assert (together.rows, together.bytes, together.entries) == (
        whole.rows,
        whole.bytes,
        whole.entries,
    )
    assert {n: p.suspect is None for n, p in together.producers.items()} == {
        n: p.suspect is None for n, p in whole.producers.items()
    }


def test_producer_is_suspect_if_its_numbers_go_back_but_not_if_it_restarts() -> None:
    anew = [entry((10, 0), ROWS, first=8), entry((10, 1), ROWS, sent_ms=T0_MS + 1)]
    back = [entry((10, 0), ROWS, first=8), entry((10, 1), ROWS, first=0)]
    findings = Findings()
    assert suspects(seen(0, anew).producers.values(), snapshot(), findings) == {}
    assert suspects(seen(0, back).producers.values(), snapshot(), findings) == {"p": frozenset({0})}


def test_producer_is_suspect_after_a_copy_from_before_its_restart() -> None:
    before, anew = entry((10, 0), ROWS, first=8), entry((10, 1), ROWS, sent_ms=T0_MS + 1)
    copied = before._replace(entry_id=2)
    scanned = seen(0, [before, anew, copied]).producers.values()
    assert suspects(scanned, snapshot(), Findings()) == {"p": frozenset({0})}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(0, 7),
    st.integers(0, 8),
)
def test_producer_with_an_entry_stored_twice_is_suspect(
    stamps: list[tuple[int, int]], copied: int, where: int
) -> None:
    """Whatever its other messages are: the copy may be stored anywhere behind them."""
    copied = min(copied, len(stamps) - 1)
    stamps.insert(max(where, copied + 1), stamps[copied])
    entries = [
        entry((10, at), ROWS, first=2 * number, sent_ms=T0_MS + ms)
        for at, (ms, number) in enumerate(stamps)
    ]
    scanned = seen(0, entries).producers.values()
    assert suspects(scanned, snapshot(), Findings()) == {"p": frozenset({0})}


def test_child_with_older_messages_than_its_parent_is_a_violation() -> None:
    def of(segment_id: int, first_ms: int, last_ms: int) -> SeenProducer:
        return SeenProducer(segment_id, "p", Stamp(first_ms, 0), Stamp(last_ms, 9), 10)

    records, findings = snapshot(), Findings()
    fine = [of(0, 1, 5), of(1, 6, 6), of(2, 7, 8)]
    assert suspects(fine, records, findings) == {}
    for first_ms in (4, 5):
        late = [of(0, 1, 5), of(1, first_ms, 6), of(2, 7, 8)]
        assert suspects(late, records, findings) == {"p": frozenset({0, 1})}


def test_views_that_differ_are_violations_unless_trimmed() -> None:
    findings = Findings()
    records = snapshot()
    check_views({"raw": {0: (2, 7), 1: (1, 1)}, "table": {0: (2, 7), 1: (1, 1)}}, records, findings)
    assert findings.is_clean
    different = {"raw": {0: (2, 7)}, "more": {0: (3, 7)}, "other": {0: (2, 8)}}
    trimmed = snapshot(segments=[segment(0, trimmed_to=Position(10, 1))])
    check_views(different, trimmed, findings)
    assert findings.is_clean
    assert sum(findings.unchecked.values()) == 2
    check_views(different, records, findings)
    assert [each.rule for each in findings.violations] == [Rule.V2, Rule.V3]


def unnumbered(at: tuple[int, int], first: int, rows: int = 3) -> StoredEntry:
    """A batch of equal rows as clients send it that number batches only."""
    singles = [(SingleMessageMetadata(payload_size=0, partition_key="a"), b"1")] * rows
    about = MessageMetadata(
        producer_name="p", sequence_id=first, publish_time=T0_MS, num_messages_in_batch=rows
    )
    return StoredEntry(*at, build_entry(about, build_batch(singles)), Visibility.READABLE)


def test_unnumbered_batches_are_in_order() -> None:
    rising = seen(0, [unnumbered((10, at), 3 * at) for at in range(3)])
    assert suspects(rising.producers.values(), snapshot(), Findings()) == {}
    back = seen(0, [unnumbered((10, at), 9 - at) for at in range(3)])
    assert suspects(back.producers.values(), snapshot(), Findings()) == {"p": frozenset({0})}
