"""What an audit keeps of segments that were right for good, and how it knows them again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.protocol.ids import Position
from magnetar.spark.audit.audited import (
    PRODUCERS_KEPT,
    AuditState,
    InvalidState,
    decode,
    encode,
    load,
    state_after_audit,
    store,
    unchanged_segments,
)
from magnetar.spark.audit.order_checks import suspects
from magnetar.spark.audit.transaction_checks import check_counts
from magnetar.spark.audit.violations import Findings
from magnetar.spark.range_facts import SeenProducer, Stamp
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
OF_PARENT = entry((10, 0), ROWS, first=7, sent_ms=T0_MS + 50)


def kept() -> AuditState:
    """After an audit of one entry in the segment that was split."""
    scanned = {0: seen(0, [OF_PARENT])}
    return state_after_audit(snapshot(), {}, scanned, {0: tuple(tally(ROWS))})  # type: ignore[dict-item]


def test_only_sealed_segments_are_kept_and_come_back_from_json() -> None:
    audited = decode(encode(kept()))
    assert audited == kept()
    assert set(audited.segments) == {0}
    assert audited.segments[0].readable == tally(ROWS)
    assert audited.segments[0].last_of_producer == {"p": Stamp(T0_MS + 50, 8)}
    assert set(unchanged_segments(audited, snapshot())) == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"raw_end": Position(10, 101)},
        {"raw_end": Position(99, 100), "horizon": Position(99, 100)},
        {"topic": "segment://public/default/t/other"},
        {"sealed": False},
    ],
)
def test_changed_segment_is_read_again(changes: Mapping[str, object]) -> None:
    assert unchanged_segments(kept(), snapshot(segments=[segment(0, **changes)])) == {}


def test_segment_with_an_open_transaction_is_not_kept() -> None:
    held = snapshot(segments=[segment(0, horizon=Position(10, 50))])
    assert state_after_audit(held, {}, {0: seen(0, [OF_PARENT])}, {}).segments == {}


@pytest.mark.parametrize("incomplete", [False, True])
def test_segment_is_not_kept_if_later_ones_cannot_be_compared(*, incomplete: bool) -> None:
    scanned = seen(0, [OF_PARENT])
    producer = scanned.producers["p"]
    if incomplete:
        scanned = replace(scanned, incomplete=1)
    else:
        many = {f"p{number}": producer for number in range(PRODUCERS_KEPT + 1)}
        scanned = replace(scanned, producers=many)
    assert state_after_audit(snapshot(), {}, {0: scanned}, {}).segments == {}


def test_kept_segments_stay_in_the_state() -> None:
    before = unchanged_segments(kept(), snapshot())
    assert state_after_audit(snapshot(), before, {}, {}) == kept()


def test_counts_of_a_kept_segment_are_not_missing() -> None:
    told = {1: {segment(0).topic: tuple(tally(ROWS))}}
    records = snapshot(group(5, 0, told))  # type: ignore[arg-type]
    findings = Findings()
    expected = {("1_5", segment(0).topic): tally(ROWS)}
    check_counts(expected, [], records, findings, unchanged_segments(kept(), records))
    assert findings.is_clean
    check_counts(expected, [], records, findings)
    assert not findings.is_clean


def test_producer_order_is_compared_with_kept_segments() -> None:
    before = unchanged_segments(kept(), snapshot())
    late = SeenProducer(1, "p", Stamp(T0_MS + 49, 0), Stamp(T0_MS + 60, 1), 2)
    producers = [*before[0].producers(0), late]
    assert suspects(producers, snapshot(), Findings()) == {"p": frozenset({0, 1})}
    fine = replace(late, first=Stamp(T0_MS + 51, 0))
    assert suspects([*before[0].producers(0), fine], snapshot(), Findings()) == {}


def test_a_state_of_another_topic_is_refused() -> None:
    with pytest.raises(InvalidState, match="is of an audit of"):
        unchanged_segments(replace(kept(), topic="topic://public/default/other"), snapshot())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"v": 1}', '{"v":1,"topic":"t","segments":[]}'])
def test_invalid_state_is_refused(text: str) -> None:
    with pytest.raises(InvalidState, match="not what an audit wrote"):
        decode(text)


def test_a_state_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidState, match="of version 2"):
        decode('{"v": 2}')


def test_state_is_stored_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load(path) is None
    store(path, kept())
    assert load(path) == kept()
    with pytest.raises(InvalidState, match="cannot be written"):
        store(tmp_path / "none" / "state.json", kept())
    with pytest.raises(InvalidState, match="cannot be read"):
        load(tmp_path)


def test_partly_checked_segment_is_not_kept() -> None:
    whole = {0: seen(0, [OF_PARENT])}
    locked = {0: seen(0, [OF_PARENT, encrypted(entry((10, 1), ROWS))])}
    trimmed = snapshot(segments=[segment(0, trimmed_to=Position(10, 1))])
    rows = {0: tuple(tally(ROWS))}
    for records, scanned in ((snapshot(), locked), (trimmed, whole)):
        assert not state_after_audit(records, {}, scanned, rows).segments  # type: ignore[arg-type]
