"""The index of one ledger, against a plain list of what its entries are."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import ENTRY_INDEX_BLOCKS
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.message import build_entry
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from storage.managed_ledger.entry_index import (
    BrokenIndex,
    EntryFacts,
    LedgerIndex,
    RecentIndexes,
    Sums,
    facts_of,
)
from tests.support.bounds import set_bound

BLOCKS = 8
FACTS = st.lists(
    st.builds(EntryFacts, st.integers(0, 5), st.integers(0, 30), st.integers(0, 9)), max_size=120
)


def entry_of(fact: EntryFacts) -> bytes:
    """An entry that counts so many messages and has so large a payload."""
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=fact.publish_time_ms)
    if fact.messages == 0:
        metadata.marker_type = 20
    elif fact.messages > 1:
        metadata.num_messages_in_batch = fact.messages
    return build_entry(metadata, bytes(fact.size_bytes))


def index_of(entries: Sequence[bytes]) -> LedgerIndex:
    index = LedgerIndex()
    index.add(entries[:7])
    index.add(entries[7:])
    return index


def sums_of(facts: Sequence[EntryFacts]) -> Sums:
    sums = Sums()
    for fact in facts:
        sums.add_entry(fact)
    return sums


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ENTRY_INDEX_BLOCKS", BLOCKS)


@given(FACTS)
def test_facts_are_those_of_the_entries(facts: list[EntryFacts]) -> None:
    for fact in facts:
        entry = entry_of(fact)
        assert facts_of(entry) == EntryFacts(fact.messages, len(entry), fact.publish_time_ms)


METADATA = st.builds(
    MessageMetadata,
    producer_name=st.one_of(st.text("nX\x10\x18", max_size=3), st.just("n" * 130)),
    sequence_id=st.sampled_from([0, 1, 0x18, 127, 128, 300_000, 2**64 - 1]),
    publish_time=st.sampled_from([0, 5, 2**35 - 1, 2**35, 2**41, 2**41 + 1, 2**42 - 1, 2**63]),
    partition_key=st.sampled_from(["", "k", "X", "\x18"]),
    uncompressed_size=st.sampled_from([0, 0x18, 0x58, 0xA0, 100]),
    num_messages_in_batch=st.sampled_from([1, 1, 2, 0x18, 0x58]),
    marker_type=st.sampled_from([0, 0, 20]),
    event_time=st.sampled_from([0, 0, 128, 2**41]),
)


def test_a_time_of_fewer_bytes_hides_no_field_behind_it() -> None:
    """With what follows it has the length of a usual time, and ends as one."""
    metadata = MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=3, event_time=128
    )
    index = index_of([build_entry(metadata, b"payload")])
    sums = index.sums(0, 1)
    assert (sums.messages, sums.least_ms, sums.greatest_ms) == (3, 1, 1)


@given(st.lists(METADATA, max_size=30), st.lists(st.binary(max_size=40), max_size=3))
def test_the_quick_way_counts_as_the_slow_one(
    metadata: list[MessageMetadata], garbage: list[bytes]
) -> None:
    """Whatever came before: what is usual is not parsed."""
    entries = [build_entry(each, b"payload") for each in metadata]
    for number, each in enumerate(garbage):
        entries.insert(number * 3, each)
    index = index_of(entries)
    assert index.sums(0, index.block_count) == sums_of([facts_of(entry) for entry in entries])


@pytest.mark.parametrize("data", [b"", b"x", b"\x0e\x01", b"\x0e\x01abcd\xff\xff\xff\xffgarbage"])
def test_unreadable_entry_counts_as_one_message_without_time(data: bytes) -> None:
    assert facts_of(data) == EntryFacts(1, len(data), 0)


@pytest.mark.parametrize("count", [-1, 0, MAX_BATCH_SIZE + 1])
def test_a_nonsensical_number_of_messages_is_one(count: int) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=5)
    metadata.num_messages_in_batch = count
    assert facts_of(build_entry(metadata, b"")).messages == 1


@given(FACTS, st.booleans(), st.data())
def test_blocks_add_up_to_their_entries(
    shapes: list[EntryFacts], stored: bool, data: st.DataObject
) -> None:
    entries = [entry_of(shape) for shape in shapes]
    facts = [facts_of(entry) for entry in entries]
    index = index_of(entries)
    if stored:
        index = LedgerIndex.decode(index.encode())
    assert (index.entries, index.block_count <= BLOCKS) == (len(entries), True)
    assert index.sums(0, index.block_count) == sums_of(facts)
    low = data.draw(st.integers(0, index.block_count))
    high = data.draw(st.integers(low, index.block_count))
    first, end = low * index.stride, index.entries_of(high - 1)[1] if high else 0
    assert index.sums(low, high) == sums_of(facts[first : max(end, first)])


@given(FACTS, st.data())
def test_blocks_at_an_entry_lie_within_the_range(
    shapes: list[EntryFacts], data: st.DataObject
) -> None:
    index = index_of([entry_of(shape) for shape in shapes])
    at = data.draw(st.integers(0, max(len(shapes) - 1, 0)))
    end = data.draw(st.integers(at, len(shapes)))
    low, high = index.blocks_at(at, end)
    assert low <= high <= max(index.block_count, low)
    if low < high:
        assert index.entries_of(low)[0] == at
        assert index.entries_of(high - 1)[1] <= end
        assert high == index.block_count or index.entries_of(high)[1] > end
    elif at < end and at % index.stride == 0:
        assert index.entries_of(low)[1] > end


@given(FACTS, st.integers(0, 80), st.integers(0, 3000), st.data())
def test_index_finds_the_longest_range_within_the_limits(
    shapes: list[EntryFacts], messages: int, size_bytes: int, data: st.DataObject
) -> None:
    index = index_of([entry_of(shape) for shape in shapes])
    low = data.draw(st.integers(0, index.block_count))
    high = data.draw(st.integers(low, index.block_count))

    def within(end: int) -> bool:
        sums = index.sums(low, end)
        return sums.messages <= messages and sums.size_bytes <= size_bytes

    fits = index.fitting(low, high, messages, size_bytes)
    assert low <= fits <= high
    assert within(fits)
    assert fits == high or not within(fits + 1)


@given(FACTS, st.integers(1, 10), st.data())
def test_no_block_with_a_late_entry_is_passed_over(
    shapes: list[EntryFacts], since_ms: int, data: st.DataObject
) -> None:
    index = index_of([entry_of(shape) for shape in shapes])
    low = data.draw(st.integers(0, index.block_count))
    late = [number for number, shape in enumerate(shapes) if shape.publish_time_ms >= since_ms]
    blocks = [number // index.stride for number in late if number // index.stride >= low]
    found = index.first_block_of(low, index.block_count, since_ms)
    assert found == (blocks[0] if blocks else None)


def test_a_long_ledger_has_a_small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ENTRY_INDEX_BLOCKS", ENTRY_INDEX_BLOCKS)
    entries = [
        entry_of(EntryFacts(1, number % 100, 10**12 + number // 7)) for number in range(50_000)
    ]
    index = index_of(entries)
    assert index.block_count <= ENTRY_INDEX_BLOCKS
    assert len(index.encode()) < 8 * 1024


@pytest.mark.parametrize("damage", [b"", b"\x01", b"\x02" + bytes(30), b"\x01" + bytes(30)])
def test_other_bytes_are_no_index(damage: bytes) -> None:
    with pytest.raises(BrokenIndex):
        LedgerIndex.decode(damage)


@given(FACTS.filter(bool), st.data())
def test_truncated_index_is_refused(shapes: list[EntryFacts], data: st.DataObject) -> None:
    whole = index_of([entry_of(shape) for shape in shapes]).encode()
    with pytest.raises(BrokenIndex):
        LedgerIndex.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


def test_recent_indexes_keep_the_last_used() -> None:
    recent = RecentIndexes(2)
    indexes = [LedgerIndex() for _ in range(3)]
    recent.keep(0, indexes[0])
    recent.keep(1, indexes[1])
    assert recent.get(0) is indexes[0]
    recent.keep(2, indexes[2])
    assert recent.get(1) is None
    assert recent.get(0) is indexes[0]
    recent.drop(0)
    assert recent.get(0) is None
