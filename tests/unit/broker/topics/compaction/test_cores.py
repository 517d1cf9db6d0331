"""The pure core of compaction, beside a dict."""

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.topics.compaction.entries import last_kept_index, messages_of, with_messages
from broker.topics.compaction.newest_messages import NewestMessages
from magnetar.compression import CompressionType
from magnetar.protocol.message import build_entry, parse_metadata
from tests.unit.broker.topics.compaction.made_entries import (
    Message,
    batch,
    marker,
    metadata_of,
    read_entry,
    single,
)

Stored = tuple[int, bytes]
"""The number and the bytes of an entry."""
ABORTED = 7


def compact(
    entries: Sequence[Stored], *, part_keys: int = 10, spill_every: int = 3
) -> list[Stored]:
    """Compact in memory, as a run does with stores."""
    newest = NewestMessages(io.BytesIO(), b"salt", part_keys=part_keys)
    for number, (_, data) in enumerate(entries):
        found = messages_of(data)
        newest.add(found, hidden=found.transaction == (0, ABORTED))
        if number % spill_every == 0:
            newest.spill()
    for _ in newest.resolve():
        pass
    kept: list[Stored] = []
    for number, data in entries:
        count = messages_of(data).count
        left = with_messages(data, count, newest.kept_of(count))
        if left is not None:
            kept.append((number, left))
    return kept


def expected(entries: Sequence[Stored]) -> dict[str, tuple[int, int, bytes]]:
    """The newest value of each key, with its place, from a dict."""
    newest: dict[str, tuple[int, int, bytes]] = {}
    for number, data in entries:
        metadata = parse_metadata(data)
        aborted = metadata.HasField("txnid_least_bits") and metadata.txnid_least_bits == ABORTED
        if metadata.marker_type or aborted:
            continue
        for index, (key, value) in read_entry(data):
            if key is not None:
                newest[key] = (number, index, value)
    return {key: found for key, found in newest.items() if found[2]}


def held_by(entries: Sequence[Stored]) -> dict[str, tuple[int, int, bytes]]:
    found: dict[str, tuple[int, int, bytes]] = {}
    for number, data in entries:
        for index, (key, value) in read_entry(data):
            assert key is not None
            assert key not in found
            found[key] = (number, index, value)
    return found


MESSAGES = st.builds(
    Message,
    st.one_of(st.none(), st.sampled_from([f"k{n}" for n in range(40)])),
    st.sampled_from([b"", b"a", b"bb"]),
)
ENTRIES = st.one_of(
    st.builds(single, MESSAGES),
    st.builds(single, MESSAGES, txn=st.sampled_from([1, ABORTED])),
    st.builds(marker),
    st.builds(
        batch, st.lists(MESSAGES, min_size=1, max_size=6), st.sampled_from(list(CompressionType))
    ),
)


@given(st.lists(ENTRIES, max_size=60), st.lists(ENTRIES, max_size=30))
def test_the_newest_message_of_each_key_is_kept_over_two_compactions(
    first: list[bytes], then: list[bytes]
) -> None:
    entries = list(enumerate(first))
    once = compact(entries)
    assert held_by(once) == expected(entries)
    later = list(enumerate(then, len(first)))
    assert held_by(compact([*once, *later])) == expected([*entries, *later])


def test_a_part_of_many_keys_is_divided() -> None:
    entries = [(n, single(Message(f"k{n % 3000}", b"v"))) for n in range(4000)]
    found = compact(entries, part_keys=1, spill_every=500)
    assert [number for number, _ in found] == list(range(1000, 4000))


@pytest.mark.parametrize("kind", list(CompressionType))
def test_dropped_messages_of_a_batch_leave_its_indexes(kind: CompressionType) -> None:
    data = batch([Message("a", b"1"), Message("b", b"2"), Message("c", b"3")], kind)
    left = with_messages(data, 3, [0, 1])
    assert left is not None
    metadata = parse_metadata(left)
    assert metadata.num_messages_in_batch == 3
    assert list(metadata.compacted_batch_indexes) == [0, 1]
    assert read_entry(left) == [(0, Message("a", b"1")), (1, Message("b", b"2"))]
    assert last_kept_index(left) == 1
    assert last_kept_index(data) == 2
    again = with_messages(left, 3, [0])
    assert again is not None
    assert list(parse_metadata(again).compacted_batch_indexes) == [0]


def test_a_batch_of_which_all_is_kept_is_not_touched() -> None:
    data = batch([Message("a", b"1"), Message("b", b"2")], CompressionType.ZSTD)
    assert with_messages(data, 2, [0, 1]) is data
    assert with_messages(data, 2, []) is None


def test_an_encrypted_batch_is_one_message_under_its_outer_key() -> None:
    def encrypted(key: str) -> bytes:
        data = batch([Message("a", b"1"), Message("b", b"2")], encrypted=True)
        metadata = parse_metadata(data)
        metadata.partition_key = key
        return build_entry(metadata, b"not to be read")

    old, new, other = encrypted("x"), encrypted("x"), encrypted("y")
    keyless = batch([Message("a", b"1")], encrypted=True)
    assert compact(list(enumerate([old, new, other, keyless]))) == [(1, new), (2, other)]


def test_unreadable_entries_are_kept() -> None:
    whole = batch([Message("a", b"1"), Message("a", b"2")], CompressionType.LZ4)
    broken = whole[:-3]
    metadata = metadata_of()
    metadata.num_messages_in_batch = 3
    short = build_entry(metadata, b"\0\0\0\1")
    entries = [(0, broken), (1, short), (2, b"no entry"), (3, single(Message("a", b"")))]
    assert compact(entries) == entries[:3]


def chunk(uuid: str, index: int, count: int, key: str) -> bytes:
    metadata = metadata_of()
    metadata.partition_key, metadata.uuid = key, uuid
    metadata.num_chunks_from_msg, metadata.chunk_id = count, index
    return build_entry(metadata, b"part")


def test_a_chunked_message_is_kept_or_dropped_whole() -> None:
    entries = list(
        enumerate(
            [
                chunk("old", 0, 2, "k"),
                chunk("new", 0, 2, "k"),
                chunk("old", 1, 2, "k"),
                chunk("new", 1, 2, "k"),
                chunk("other", 0, 3, "j"),
            ]
        )
    )
    # Of the last one the end is not there yet.
    assert [number for number, _ in compact(entries)] == [1, 3, 4]
