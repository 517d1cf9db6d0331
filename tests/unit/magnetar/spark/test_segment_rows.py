"""Rows of ranges: inside of batches, in pieces, damaged, lost; cut anywhere, each row once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.compression import CompressionType
from magnetar.errors import InvalidMessage, NotSupported
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.reads.messages import message_ids
from magnetar.reads.plan import RangePlan
from magnetar.spark import segment_rows
from magnetar.spark.cut import BEGINNING, END, Place
from magnetar.spark.errors import DataLost
from magnetar.spark.row_ids import row_ids
from magnetar.spark.segment_rows import RowLimits, SegmentRows
from magnetar.spark.tasks import SegmentRange
from tests.unit.magnetar.spark.stored import LEDGER, StoredSegment, batch, pieces, single

FEW = RowLimits(rows=4, bytes=1000)


def values(segment: StoredSegment, start: Place, end: Place, **how: bool) -> list[bytes | None]:
    rows = SegmentRows(segment, SegmentRange(3, "s", start, end), limits=FEW, **how)
    return [value for columns in rows for value in columns.values]


def interleaved(messages: Sequence[Sequence[bytes]], turns: Sequence[int]) -> list[bytes]:
    """The entries of all messages, those of each in their order; `turns` choose whose is next."""
    waiting = [list(entries) for entries in messages]
    found: list[bytes] = []
    for turn in turns:
        live = [entries for entries in waiting if entries]
        if live:
            found.append(live[turn % len(live)].pop(0))
    for entries in waiting:
        found += entries
    return found


@st.composite
def segments(draw: st.DrawFn) -> list[bytes]:
    messages: list[list[bytes]] = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["single", "batch", "pieces"]))
        sequence_id = number * 100
        if kind == "single":
            messages.append([single(sequence_id, b"%d" % sequence_id)])
        elif kind == "batch":
            size = draw(st.integers(1, 5))
            how = draw(st.sampled_from(list(CompressionType)))
            messages.append(
                [batch(sequence_id, [b"%d" % (sequence_id + i) for i in range(size)], how)]
            )
        else:
            value = b"%d " % sequence_id * 10
            messages.append(pieces(sequence_id, value, draw(st.integers(2, 4))))
    return interleaved(messages, draw(st.lists(st.integers(0, 7), max_size=20)))


@given(
    entries=segments(),
    cuts=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=6),
)
def test_adjacent_ranges_have_each_row_once(
    entries: list[bytes], cuts: list[tuple[int, int]]
) -> None:
    segment = StoredSegment(entries)
    whole = values(segment, BEGINNING, END)
    inner = sorted({Place(LEDGER, entry, index) for entry, index in cuts if entry < len(entries)})
    places = [BEGINNING, *inner, END]
    parts = [value for start, end in pairwise(places) for value in values(segment, start, end)]
    assert parts == whole
    assert len({value for value in whole if value is not None}) == len(whole)


def test_chunks_before_the_range_are_found_by_publish_time() -> None:
    one = pieces(50, b"x" * 100, 4)
    before = [single(number, b"%d" % number) for number in range(50)]
    segment = StoredSegment([*before, *one[:3], single(60, b"between"), one[3]])
    assert values(segment, Place(LEDGER, 53), END) == [b"between", b"x" * 100]
    assert segment.looked_at < 10


def test_chunks_with_different_publish_times_are_found() -> None:
    first = pieces(1, b"x" * 100, 2, publish_time=1000)[0]
    second = pieces(1, b"x" * 100, 2, publish_time=9000)[1]
    segment = StoredSegment([first, single(2, b"between", publish_time=5000), second])
    assert values(segment, Place(LEDGER, 2), END) == [b"x" * 100]


def test_chunks_with_an_extreme_publish_time_are_found() -> None:
    """Brokers store what a producer says, and no bound is as late as that."""
    one, two = (pieces(number, b"x" * 100, 2, publish_time=2**64 - 1) for number in (1, 2))
    segment = StoredSegment([one[0], single(3, b"between"), one[1], two[1]])
    assert values(segment, Place(LEDGER, 1), END) == [b"between", b"x" * 100]


class WithoutTimes(StoredSegment):
    """At a broker that chooses no range by publish time."""

    def plan(self, segment_topic: str, start: Position | None, **bounds: object) -> RangePlan:
        if bounds.get("from_publish_time_ms") is not None:
            raise NotSupported("The broker of this topic chooses no range by publish time.")
        return super().plan(segment_topic, start, **bounds)  # type: ignore[arg-type]


def test_chunks_before_the_range_are_found_without_publish_times() -> None:
    one = pieces(50, b"x" * 100, 4)
    segment = WithoutTimes([single(1, b"first"), *one[:3], single(60, b"between"), one[3]])
    assert values(segment, Place(LEDGER, 4), END) == [b"between", b"x" * 100]


def test_message_without_its_first_chunk_is_left_out() -> None:
    one, two = pieces(1, b"x" * 100, 3), pieces(2, b"y" * 100, 3)
    segment = StoredSegment([*one[1:], *two[:1], two[2], single(9, b"end")])
    assert values(segment, BEGINNING, END) == [b"end"]


def test_chunks_sent_twice_make_one_row() -> None:
    one = pieces(1, b"x" * 100, 3)
    segment = StoredSegment([one[0], one[1], one[0], one[1], one[1], one[2]])
    assert values(segment, BEGINNING, END) == [b"x" * 100]
    [whole] = SegmentRows(segment, SegmentRange(3, "s", BEGINNING, END))
    [part] = SegmentRows(segment, SegmentRange(3, "s", Place(LEDGER, 5), END))
    assert part.runs == whole.runs, "the message has another id"


def test_bytes_of_incomplete_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_rows, "MAX_OPEN_BYTES", 150)
    messages = [pieces(number, bytes((65 + number,)) * 100, 2) for number in range(8)]
    firsts, lasts = [each[0] for each in messages], [each[1] for each in messages]
    segment = StoredSegment(firsts + lasts)
    expected = [bytes((65 + number,)) * 100 for number in range(8)]
    assert values(segment, BEGINNING, END) == expected
    assert segment.looked_at > len(segment.stored), "none was given up, and looked for again"


def test_rows_come_in_bounded_columns() -> None:
    segment = StoredSegment([batch(i * 10, [b"a", b"b"]) for i in range(10)])
    sizes = [
        len(each) for each in SegmentRows(segment, SegmentRange(0, "s", BEGINNING, END), limits=FEW)
    ]
    assert sizes == [4] * 5
    large = StoredSegment([single(i, b"x" * 900) for i in range(4)])
    sizes = [
        len(each) for each in SegmentRows(large, SegmentRange(0, "s", BEGINNING, END), limits=FEW)
    ]
    assert sizes == [2, 2]


def test_damaged_entry_fails_or_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    entries = [single(1, b"a"), single(2, b"b")[:-1], single(3, b"c")]
    segment = StoredSegment(entries)
    with pytest.raises(InvalidMessage, match="7:1"):
        values(segment, BEGINNING, END)
    assert not caplog.messages
    assert values(segment, BEGINNING, END, skip_damaged=True) == [b"a", b"c"]
    (warning,) = caplog.messages
    assert "from its beginning on" in warning
    assert warning.endswith(": 1")


def test_entries_trimmed_or_hidden_meanwhile_fail_the_task() -> None:
    segment = StoredSegment([single(i, b"%d" % i) for i in range(5)])
    segment.trimmed = 2
    for start in (Place(LEDGER, 1), BEGINNING):
        with pytest.raises(DataLost, match=f"from {start} on is not retained"):
            values(segment, start, END)
    assert values(segment, Place(LEDGER, 1), END, skip_lost=True) == [b"2", b"3", b"4"]
    segment.trimmed, segment.horizon = 0, 4
    with pytest.raises(DataLost, match="just now"):
        values(segment, BEGINNING, END)
    assert values(segment, BEGINNING, Place(LEDGER, 4)) == [b"0", b"1", b"2", b"3"]


def test_hidden_entries_are_not_skipped_like_lost_ones() -> None:
    segment = StoredSegment([single(i, b"%d" % i) for i in range(5)])
    for trimmed in (0, 2):
        segment.trimmed, segment.horizon = trimmed, 4
        with pytest.raises(DataLost):
            values(segment, Place(LEDGER, 1), Place(LEDGER, 5), skip_lost=True)
        rows = SegmentRows(
            segment,
            SegmentRange(3, "s", Place(LEDGER, 1), Place(LEDGER, 4)),
            skip_lost=True,
        )
        assert [len(columns) for columns in rows] == [3 if trimmed == 0 else 2]
        assert rows.gaps == (trimmed > 1)


class Emptied(StoredSegment):
    """At a stock broker, which tells no end of a segment of which nothing is retained."""

    def plan(self, segment_topic: str, start: Position | None, **bounds: object) -> RangePlan:
        told = super().plan(segment_topic, start, **bounds)  # type: ignore[arg-type]
        return replace(told, earliest=EARLIEST, horizon=EARLIEST, raw_end=EARLIEST, lost=False)


def test_fully_trimmed_segment_is_lost_and_not_hidden() -> None:
    segment = Emptied([])
    assert values(segment, Place(LEDGER, 0), Place(LEDGER, 3), skip_lost=True) == []
    with pytest.raises(DataLost, match="not retained"):
        values(segment, Place(LEDGER, 0), Place(LEDGER, 3))


def test_rows_have_tombstones_and_message_ids() -> None:
    many = [b"%d" % i for i in range(300)]
    entries = [
        single(1, b"", null_value=True),
        batch(10, many),
        *pieces(5, b"abc", 2),
        batch(900, [b"a"]),
    ]
    rows = SegmentRows(StoredSegment(entries), SegmentRange(5, "s", BEGINNING, END))
    [columns] = list(rows)
    assert columns.values[0] is None
    assert row_ids(columns, 5).to_pylist() == message_ids(columns, 5)
    huge = SegmentRows(
        StoredSegment([batch(1, [b""] * 17_000)]), SegmentRange(5, "s", BEGINNING, END)
    )
    for columns in huge:
        assert row_ids(columns, 2**40).to_pylist() == message_ids(columns, 2**40)
