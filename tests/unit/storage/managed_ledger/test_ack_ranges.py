"""Sets of acknowledged positions against plain sets."""

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ids import Position
from storage.managed_ledger.ack_ranges import BLOCK, AckRanges, BatchBits

ENTRIES = st.one_of(
    st.integers(0, 40), st.integers(BLOCK - 5, BLOCK + 5), st.integers(3 * BLOCK - 3, 3 * BLOCK + 3)
)
POSITIONS = st.builds(Position, st.integers(1, 3), ENTRIES)
RANGES = st.tuples(st.integers(1, 3), ENTRIES, ENTRIES)


def filled(positions: Iterable[Position]) -> AckRanges:
    acked = AckRanges()
    for position in positions:
        acked.add(position)
    return acked


def listed(acked: AckRanges) -> set[Position]:
    return {
        Position(ledger_id, entry_id)
        for ledger_id, first, last in acked.ranges()
        for entry_id in range(first, last + 1)
    }


def span(ledger_id: int, first: int, last: int) -> set[Position]:
    return {Position(ledger_id, entry_id) for entry_id in range(first, last + 1)}


@given(st.lists(POSITIONS))
def test_holds_what_was_put_in_and_says_what_is_new(positions: list[Position]) -> None:
    acked, model = AckRanges(), set()
    for position in positions:
        assert acked.add(position) == (position not in model)
        model.add(position)
    assert listed(acked) == model
    assert acked.count == len(model)
    assert all(
        (Position(1, entry) in acked) == (Position(1, entry) in model) for entry in range(60)
    )


@given(st.lists(POSITIONS))
def test_ranges_ascend_and_never_touch(positions: list[Position]) -> None:
    found = list(filled(positions).ranges())
    for (ledger, _, last), (next_ledger, first, _) in pairwise(found):
        assert ledger < next_ledger or last + 1 < first
    assert filled(positions).run_count() == len(found)


@given(st.lists(POSITIONS), POSITIONS)
def test_discard_up_to(positions: list[Position], end: Position) -> None:
    acked = filled(positions)
    acked.discard_up_to(end)
    expected = {position for position in positions if position > end}
    assert listed(acked) == expected
    assert acked.count == len(expected)


@given(st.lists(RANGES, max_size=4), st.lists(RANGES, max_size=4))
def test_ack_ranges_add_and_discard_whole_ranges(
    added: list[tuple[int, int, int]], removed: list[tuple[int, int, int]]
) -> None:
    acked = AckRanges()
    model: set[Position] = set()
    for each in added:
        acked.add_range(*each)
        model |= span(*each)
    for each in removed:
        acked.discard_range(*each)
        model -= span(*each)
    assert listed(acked) == model
    assert acked.count == len(model)


@given(st.lists(POSITIONS), POSITIONS)
def test_run_end(positions: list[Position], at: Position) -> None:
    model = set(positions)
    end = filled(positions).run_end(at)
    if end is None:
        assert at not in model
    else:
        assert span(at.ledger_id, at.entry_id, end) <= model
        assert Position(at.ledger_id, end + 1) not in model


@given(st.lists(POSITIONS), st.integers(0, 4 * BLOCK))
def test_words_give_the_same_set_as_far_as_entries_go(
    positions: list[Position], entries: int
) -> None:
    copy = AckRanges()
    for ledger_id, words in filled(positions).words().items():
        assert words[-1] != 0
        copy.add_words(ledger_id, words, entries)
    expected = {position for position in positions if position.entry_id < entries}
    assert listed(copy) == expected
    assert copy.count == len(expected)


def test_words_are_those_of_a_java_bit_set() -> None:
    acked = filled([Position(7, 0), Position(7, 63), Position(7, 64), Position(9, 1)])
    assert acked.words() == {7: (1 - 2**63, 1), 9: (2,)}


def test_a_hundred_thousand_entries_out_of_order_take_little() -> None:
    acked = AckRanges()
    for entry_id in range(1, 200_000, 2):
        acked.add(Position(1, entry_id))
    assert acked.count == acked.run_count() == 100_000
    assert acked.word_count() <= 200_000 // 64 + 16
    for entry_id in range(198_000, -1, -2):
        acked.add(Position(1, entry_id))
    assert acked.run_end(Position(1, 0)) == 198_001


def test_batches_keep_what_is_not_acknowledged_yet() -> None:
    batches = BatchBits()
    at, later = Position(1, 1), Position(1, 2)
    assert batches.narrow(at, 0b1110) == 0b1110
    assert batches.narrow(at, 0b0111) == 0b0110
    assert batches.narrow(later, 0b1) == 0b1
    assert dict(batches.items()) == {at: 0b0110, later: 1}
    assert batches.narrow(at, 0b1001) == 0
    assert batches.get(at) is None
    batches.discard_up_to(later)
    assert len(batches) == 0
