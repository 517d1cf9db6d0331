"""The pure parts: position arithmetic, trimming, the cache, record encoding."""

import zlib

import lz4.block
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import EARLIEST, LATEST, Position
from storage.ledger.store import LedgerAssertion
from storage.managed_ledger import managed_ledger_pb2 as pb
from storage.managed_ledger.ack_ranges import AckRanges, BatchBits
from storage.managed_ledger.entry_cache import ENTRY_OVERHEAD_BYTES, EntryCache
from storage.managed_ledger.ledger_map import LedgerInfo, LedgerMap
from storage.managed_ledger.records import (
    CursorSnapshot,
    StreamRecord,
    cursor_key,
    cursor_name,
    decode_cursor,
    decode_position,
    decode_stream,
    encode_cursor,
    encode_position,
    encode_stream,
)
from storage.managed_ledger.trimming import ReaderPositions, TrimDecision, decide
from storage.managed_ledger.types import MOVES, CorruptRecord, Entry, ManagedLedgerState, Retention

# Position arithmetic against a plain list of the positions

SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=5)
ANYWHERE = st.builds(Position, st.integers(-1, 16), st.integers(-1, 6))


def map_of(shape: list[tuple[int, int]]) -> tuple[LedgerMap, list[Position]]:
    ledgers, positions, ledger_id = LedgerMap(), [], 0
    for gap, entries in shape:
        ledger_id += gap
        ledgers.add(LedgerInfo(ledger_id, entries, 10 * entries))
        positions += [Position(ledger_id, entry) for entry in range(entries)]
    return ledgers, positions


@given(SHAPES, ANYWHERE)
def test_positions_are_found_by_rank_and_neighbour(
    shape: list[tuple[int, int]], at: Position
) -> None:
    ledgers, positions = map_of(shape)
    later = [position for position in positions if position >= at]
    earlier = [position for position in positions if position < at]
    assert ledgers.at_or_after(at) == (later[0] if later else ledgers.end)
    assert ledgers.contains(at) == (at in positions)
    assert ledgers.rank(at) == len([position for position in positions if position <= at])
    if earlier:
        assert ledgers.before(at) == earlier[-1]
    else:
        assert ledgers.before(at) < (positions[0] if positions else ledgers.end)
    assert ledgers.total == ledgers.entry_count == len(positions)
    assert all(ledgers.at(rank) == position for rank, position in enumerate(positions))
    assert ledgers.at(len(positions)) == ledgers.end
    assert not positions or ledgers.end > positions[-1]


@given(SHAPES, ANYWHERE, st.integers(0, 250))
def test_sizes_and_positions_are_found_from_the_end(
    shape: list[tuple[int, int]], at: Position, size_bytes: int
) -> None:
    ledgers, positions = map_of(shape)
    assert ledgers.size_after(at) == 10 * len([each for each in positions if each > at])
    newest = positions[max(0, len(positions) - size_bytes // 10) :]
    assert ledgers.with_size_after(size_bytes) == (newest[0] if newest else ledgers.end)


def test_entries_of_one_ledger_count_as_equally_large() -> None:
    ledgers = LedgerMap([LedgerInfo(1, 4, 1000), LedgerInfo(2, 3, 100)])
    assert ledgers.size_after(Position(1, 0)) == 850
    assert ledgers.with_size_after(849) == Position(1, 2)
    assert ledgers.size_after(Position(2, 0)) == 66
    assert ledgers.with_size_after(99) == Position(2, 1)
    assert ledgers.with_size_after(0) == ledgers.end


@given(SHAPES, st.integers(0, 5), ANYWHERE)
def test_dropping_from_the_front_keeps_ranks(
    shape: list[tuple[int, int]], count: int, at: Position
) -> None:
    ledgers, positions = map_of(shape)
    total = ledgers.total
    gone = {info.ledger_id for info in ledgers.infos[:count]}
    ranks = {position: ledgers.rank(position) for position in positions}
    ledgers.drop(gone)
    left = [position for position in positions if position.ledger_id not in gone]
    assert [ledgers.rank(position) for position in left] == [ranks[each] for each in left]
    assert ledgers.total == total
    assert ledgers.entry_count == len(left)
    assert ledgers.total_size_bytes == 10 * len(left)
    later = [position for position in left if position >= at]
    assert ledgers.at_or_after(at) == (later[0] if later else ledgers.end)


def test_ids_rise_for_ever() -> None:
    ledgers = LedgerMap([LedgerInfo(5, 1), LedgerInfo(7, 1)])
    ledgers.drop({5, 7})
    for old in (5, 7):
        with pytest.raises(LedgerAssertion):
            ledgers.add(LedgerInfo(old))
    ledgers.add(LedgerInfo(8))


def test_no_hole_is_made() -> None:
    ledgers = LedgerMap([LedgerInfo(1, 1), LedgerInfo(2, 1), LedgerInfo(3, 0), LedgerInfo(4, 1)])
    ledgers.drop({3})
    with pytest.raises(LedgerAssertion):
        ledgers.drop({2})


def test_the_next_end_to_pass() -> None:
    ledgers = LedgerMap([LedgerInfo(1, 3, 0, 99), LedgerInfo(2, 2, 0, 99), LedgerInfo(3, 2)])
    assert ledgers.end_after(EARLIEST) == Position(1, 2)
    assert ledgers.end_after(Position(1, 1)) == Position(1, 2)
    assert ledgers.end_after(Position(1, 2)) == Position(2, 1)
    assert ledgers.end_after(Position(2, 1)) == LATEST


# States


def test_every_state_has_its_moves_and_ends_are_ends() -> None:
    state = ManagedLedgerState
    assert set(MOVES) == set(state)
    assert MOVES[state.CLOSED] == frozenset()
    assert MOVES[state.FENCED] == {state.CLOSED}
    assert all(state.CLOSED in MOVES[each] for each in state if each is not state.CLOSED)
    assert not any(state.OPEN in MOVES[each] for each in (state.TERMINATED, state.FENCED))


# Trimming: ledgers 1 to 4 of 100 bytes and 10 entries each, closed at 1000, 2000, 3000, 4 open

LEDGERS = [
    LedgerInfo(1, 10, 100, 1000),
    LedgerInfo(2, 10, 100, 2000),
    LedgerInfo(3, 10, 100, 3000),
    LedgerInfo(4, 10, 100),
]
AT_END = ReaderPositions(Position(4, 9), any_durable=True)
NOBODY = ReaderPositions(None, any_durable=False)
TABLE = {
    "consumed, no retention": (AT_END, None, 5000, (1, 2, 3), None),
    "consumed, retention set to none": (AT_END, Retention(0, 0), 5000, (1, 2, 3), None),
    "nothing consumed": (ReaderPositions(Position(1, -1), True), None, 5000, (), None),
    "the first is consumed": (ReaderPositions(Position(1, 9), True), None, 5000, (1,), None),
    "not quite": (ReaderPositions(Position(1, 8), True), None, 5000, (), None),
    "consumed up to within the third": (
        ReaderPositions(Position(3, 0), True),
        None,
        5000,
        (1, 2),
        None,
    ),
    "kept for ever": (AT_END, Retention(-1, -1), 10**9, (), None),
    "kept by time": (AT_END, Retention(2500, -1), 5000, (1, 2), 5500),
    "kept by time, all young": (AT_END, Retention(5000, -1), 5000, (), 6000),
    "kept by size": (AT_END, Retention(-1, 200), 5000, (1, 2), None),
    "kept by size, one byte more": (AT_END, Retention(-1, 201), 5000, (1,), None),
    "time is up though size has room": (AT_END, Retention(1000, 10**6), 3500, (1, 2), 4000),
    "too much though time is not up": (AT_END, Retention(10**6, 300), 3500, (1,), 1002000),
    "retention never drops unread": (
        ReaderPositions(EARLIEST, True),
        Retention(0, 0),
        5000,
        (),
        None,
    ),
    "nobody reads, young": (NOBODY, None, 5000, (), 1000 + 10_000),
    "nobody reads, some old": (NOBODY, None, 12_500, (1, 2), 13_000),
    "nobody reads, retention decides": (NOBODY, Retention(0, 0), 5000, (1, 2, 3), None),
    "nobody reads, retention keeps": (NOBODY, Retention(-1, -1), 10**9, (), None),
    "a reader alone holds": (ReaderPositions(Position(2, 3), False), None, 10**9, (1,), None),
    "a reader alone does not hasten": (
        ReaderPositions(Position(4, 9), False),
        None,
        5000,
        (),
        11_000,
    ),
}


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_trimming_decisions(case: str) -> None:
    readers, retention, now_ms, drop, next_check_ms = TABLE[case]
    decision = decide(
        LEDGERS,
        readers,
        retention=retention,
        unsubscribed_retention_ms=10_000,
        now_ms=now_ms,
    )
    assert decision == TrimDecision(drop, next_check_ms)


def test_of_an_ended_stream_everything_may_go() -> None:
    ended = [*LEDGERS[:3], LedgerInfo(4, 10, 100, 4000)]
    found = decide(ended, AT_END, retention=None, unsubscribed_retention_ms=0, now_ms=5000)
    assert found.drop == (1, 2, 3, 4)


# The cache


def group(ledger_id: int, first: int, count: int, size: int = 10) -> tuple[int, list[Entry], int]:
    entries = [Entry(Position(ledger_id, first + n), b"x" * size) for n in range(count)]
    return ledger_id, entries, size * count


def test_the_cache_gives_runs_and_nothing_it_has_not() -> None:
    cache = EntryCache(10**6)
    cache.add(*group(1, 5, 3))
    cache.add(*group(1, 8, 2))
    found = cache.run(1, 6, 8)
    assert found is not None
    assert [entry.position.entry_id for entry in found] == [6, 7, 8]
    assert [entry.position.entry_id for entry in cache.run(1, 9, 99) or ()] == [9]
    assert cache.run(1, 4, 9) is None
    assert cache.run(1, 10, 11) is None
    assert cache.run(2, 0, 1) is None


def test_the_oldest_group_of_all_ledgers_goes_first() -> None:
    each = ENTRY_OVERHEAD_BYTES + 10
    cache = EntryCache(4 * each)
    cache.add(*group(1, 0, 2))
    cache.add(*group(2, 0, 1))
    cache.add(*group(1, 2, 1))
    assert cache.size_bytes == 4 * each
    cache.add(*group(2, 1, 1))
    assert cache.run(1, 1, 1) is None
    assert cache.run(1, 2, 2) is not None
    assert cache.run(2, 0, 1) is not None
    assert cache.size_bytes == 3 * each
    cache.add(*group(3, 0, 5))
    assert cache.size_bytes == 0


def test_dropped_ledgers_leave_nothing_behind() -> None:
    cache = EntryCache(10**6)
    for ledger_id in range(1000):
        cache.add(*group(ledger_id, 0, 1))
        if ledger_id != 500:
            cache.drop(ledger_id)
    assert cache.size_bytes == ENTRY_OVERHEAD_BYTES + 10
    assert len(cache._groups) < 200
    assert cache.run(500, 0, 0) is not None


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans()), max_size=60),
    st.integers(0, 3000),
)
def test_the_cache_holds_the_newest_within_its_bound(
    steps: list[tuple[int, int, bool]], max_bytes: int
) -> None:
    cache = EntryCache(max_bytes)
    ends = {1: 0, 2: 0, 3: 0}
    for ledger_id, count, drop in steps:
        cache.add(*group(ledger_id, ends[ledger_id], count))
        ends[ledger_id] += count
        if drop:
            cache.drop(ledger_id)
        held = 0
        for ledger, end in ends.items():
            known = [entry for entry in range(end) if cache.run(ledger, entry, entry)]
            assert known == list(range(end - len(known), end))
            held += len(known)
        assert cache.size_bytes == held * (ENTRY_OVERHEAD_BYTES + 10) <= max_bytes


def test_a_gap_starts_a_new_run() -> None:
    cache = EntryCache(10**6)
    cache.add(*group(1, 0, 2))
    cache.add(*group(1, 5, 1))
    assert cache.run(1, 0, 1) is None
    assert cache.run(1, 5, 5) is not None
    assert cache.size_bytes == ENTRY_OVERHEAD_BYTES + 10


# Records


def test_a_stream_record_is_pulsars() -> None:
    record = StreamRecord(
        (LedgerInfo(3, 10, 1000, 77), LedgerInfo(9, 4, 400, 0)),
        Position(9, 3),
        {"b": "2", "a": "1"},
    )
    value = encode_stream(record)
    assert value == bytes.fromhex(
        "0a09" "0803" "100a" "18e807" "204d"  # ledger 3, entries, size, timestamp
        "0a02" "0809"  # the current one: its id only
        "1204" "0809" "1003"
        "1a06" "0a0161" "120131" "1a06" "0a0162" "120132"
    )  # fmt: skip
    found = decode_stream("/k", value)
    assert found.ledgers == (LedgerInfo(3, 10, 1000, 77), LedgerInfo(9))
    assert found.terminated == Position(9, 3)
    assert found.properties == {"a": "1", "b": "2"}
    assert decode_stream("/k", b"") == StreamRecord()


def snapshot(acked: AckRanges, batches: BatchBits) -> CursorSnapshot:
    return CursorSnapshot(Position(3, 7), acked, batches)


def test_notes_are_stored_with_the_position_in_either_place() -> None:
    notes = (2**63 - 1, 0, 7)
    taken = CursorSnapshot(Position(3, 7), AckRanges(), BatchBits(), notes=notes)
    record = decode_cursor("/k", encode_cursor(-1, taken, {}, 55))
    position = decode_position("/k", encode_position(taken))
    assert record.state.notes == position.notes == notes
    assert not record.state.numbers
    assert not position.numbers


def acked_of(*positions: Position) -> AckRanges:
    acked = AckRanges()
    for position in positions:
        acked.add(position)
    return acked


def test_a_cursor_record_is_pulsars() -> None:
    acked = acked_of(Position(3, 9), Position(3, 10), Position(4, 0))
    batches = BatchBits({Position(4, 2): 0b101})
    value = encode_cursor(-1, snapshot(acked, batches), {"p": "v"}, 55)
    info = pb.ManagedCursorInfo.FromString(value)
    assert info.cursorsLedgerId == -1
    assert (info.markDeleteLedgerId, info.markDeleteEntryId, info.lastActive) == (3, 7, 55)
    assert [
        (each.lowerEndpoint.entryId, each.upperEndpoint.ledgerId, each.upperEndpoint.entryId)
        for each in info.individualDeletedMessages
    ] == [(8, 3, 10), (-1, 4, 0)]
    assert list(info.batchedEntryDeletionIndexInfo[0].deleteSet) == [0b101]
    found = decode_cursor("/k", value)
    assert found.ledger_id == -1
    assert found.state.mark_delete == Position(3, 7)
    assert found.state.spans == (
        (Position(3, 8), Position(3, 10)),
        (Position(4, -1), Position(4, 0)),
    )
    assert found.state.batches == {Position(4, 2): 0b101}
    assert found.properties == {"p": "v"}


def test_beside_a_cursor_ledger_the_record_is_only_a_hint() -> None:
    value = encode_cursor(12, snapshot(acked_of(Position(3, 9)), BatchBits()), {}, 55)
    found = decode_cursor("/k", value)
    assert found.ledger_id == 12
    assert found.state.spans == ()


def test_positions_are_written_in_the_smaller_form_and_both_are_read() -> None:
    few = decode_position("/k", encode_position(snapshot(acked_of(Position(3, 900)), BatchBits())))
    assert few.spans == ((Position(3, 899), Position(3, 900)),)
    assert few.words == ()
    every_other = acked_of(*(Position(3, entry) for entry in range(8, 900, 2)))
    many = decode_position("/k", encode_position(snapshot(every_other, BatchBits())))
    assert many.spans == ()
    assert dict(many.words) == every_other.words()
    assert many.mark_delete == Position(3, 7)


def test_position_where_a_replicator_began_is_written_with_its_mark_delete_position() -> None:
    began = Position(-1, -1)
    taken = CursorSnapshot(
        Position(3, 7), AckRanges(), BatchBits(), began=began, sent_as=2**63 + 1, sent_to=5
    )
    for state in (
        decode_position("/k", encode_position(taken)),
        decode_cursor("/k", encode_cursor(-1, taken, {}, 55)).state,
    ):
        assert (state.mark_delete, state.began, state.numbers) == (Position(3, 7), began, {})
        assert (state.sent_as, state.sent_to) == (2**63 + 1, 5)
    plain = decode_position("/k", encode_position(snapshot(AckRanges(), BatchBits())))
    assert plain.began is None


def test_ranges_win_over_words_as_in_pulsar() -> None:
    info = pb.PositionInfo(ledgerId=1, entryId=2)
    info.individualDeletedMessageRanges.add(key=1, values=[-1])
    assert dict(decode_position("/k", info.SerializeToString()).words) == {1: (-1,)}
    low, high = (
        pb.NestedPositionInfo(ledgerId=1, entryId=4),
        pb.NestedPositionInfo(ledgerId=2, entryId=1),
    )
    info.individualDeletedMessages.add(lowerEndpoint=low, upperEndpoint=high)
    found = decode_position("/k", info.SerializeToString())
    assert found.words == ()
    assert found.spans == ((Position(1, 4), Position(2, 1)),)


@pytest.mark.parametrize("compression", [0, 1, 2])
def test_records_with_pulsars_compression_header_are_read(compression: int) -> None:
    plain = encode_stream(StreamRecord((LedgerInfo(3, 10, 1000, 77),)))
    head = pb.RecordCompression(
        compressionType=compression, uncompressedSize=len(plain)
    ).SerializeToString()
    block = (
        plain,
        lz4.block.compress(plain, store_size=False),
        zlib.compress(plain),
    )[compression]
    value = b"\x47\x78" + len(head).to_bytes(4, "big") + head + block
    assert decode_stream("/k", value).ledgers == (LedgerInfo(3, 10, 1000, 77),)


def test_corrupt_record_error_says_what_to_do() -> None:
    for compression, says in ((1, "broken"), (2, "broken"), (3, "CompressionType=NONE")):
        head = pb.RecordCompression(compressionType=compression, uncompressedSize=9)
        text = head.SerializeToString()
        with pytest.raises(CorruptRecord, match=says):
            decode_stream("/k", b"\x47\x78" + len(text).to_bytes(4, "big") + text + b"\xf0lz4")
    for broken in (b"\xff\xff", b"\x0a\x05ab", b"\x47\x78\x00"):
        with pytest.raises(CorruptRecord):
            decode_cursor("/k", broken)


@pytest.mark.parametrize("name", ["s", "a/b", "..", ".", "ä %", "x+y", "%2E"])
def test_cursor_names_are_one_part_of_a_key_and_come_back(name: str) -> None:
    key = cursor_key("t/n/persistent/x", name)
    head, _, child = key.rpartition("/")
    assert head == "/managed-ledgers/t/n/persistent/x"
    assert child not in ("", ".", "..")
    assert cursor_name(child) == name
