"""Sequences: keys that the store numbers."""

import asyncio

import pytest

from storage.metadata.keys import sequence_key
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataStore,
    PartitionMismatch,
    VersionConflict,
)
from tests.contract.metadata.backends import events_until, next_event

PREFIX = "/t/history/"


async def add(store: MetadataStore, value: bytes = b"", prefix: str = PREFIX) -> str:
    return (await store.put(prefix, value, partition="t", sequence=True)).key


async def test_keys_are_the_prefix_and_twenty_digits(store: MetadataStore) -> None:
    made = await store.put(PREFIX, b"first", partition="t", sequence=True)
    assert made.key == f"{PREFIX}-00000000000000000001"
    assert made.modifications == 0
    record = await store.get(made.key, partition="t")
    assert record is not None
    assert (record.value, record.version) == (b"first", made.version)


async def test_numbers_rise_in_the_order_issued(store: MetadataStore) -> None:
    keys = await asyncio.gather(*(add(store, str(n).encode()) for n in range(700)))
    assert keys == sorted(keys)
    assert len(set(keys)) == 700
    records = await store.scan(PREFIX, f"{PREFIX}/", partition="t")
    assert [record.key for record in records] == keys
    assert [record.value for record in records] == [str(n).encode() for n in range(700)]


async def test_numbers_rise_among_live_keys(store: MetadataStore) -> None:
    first, second = await add(store), await add(store)
    await store.delete(first, partition="t")
    third = await add(store)
    assert third > second


async def test_sequences_are_apart(store: MetadataStore) -> None:
    assert await add(store, prefix="/op/a/") == sequence_key("/op/a/", 1)
    assert await add(store, prefix="/op/a-1/") == sequence_key("/op/a-1/", 1)
    assert await add(store, prefix="/op/a/") == sequence_key("/op/a/", 2)
    assert await store.children("/op/a") == [sequence_key("", 1), sequence_key("", 2)]


async def test_a_made_record_can_be_changed_and_deleted(store: MetadataStore) -> None:
    key = await add(store, b"one")
    record = await store.get(key, partition="t")
    assert record is not None
    await store.put(key, b"two", partition="t", expect=record.version)
    with pytest.raises(VersionConflict):
        await store.put(key, b"three", partition="t", expect=ABSENT)
    assert await store.delete(key, partition="t")


async def test_made_records_are_indexed(store: MetadataStore) -> None:
    made = await store.put(
        PREFIX, b"", partition="t", sequence=True, indexes=[IndexEntry("i", "k")]
    )
    hits = await store.scan_index("i", "k", "l")
    assert [hit.record.key for hit in hits] == [made.key]


async def test_other_keys_have_no_place_under_a_sequence(store: MetadataStore) -> None:
    await add(store)
    for other in (f"{PREFIX}other", sequence_key(PREFIX, 7)):
        with pytest.raises(InvalidMetadataRequest):
            await store.put(other, b"", partition="t")
    await store.put(f"{PREFIX}below/it", b"", partition="t")
    assert await add(store) == sequence_key(PREFIX, 2)


async def test_a_sequence_begins_on_an_empty_level(store: MetadataStore) -> None:
    await store.put(f"{PREFIX}other", b"")
    with pytest.raises(InvalidMetadataRequest):
        await add(store)
    others = await asyncio.gather(
        store.put("/u/other", b""), add(store, prefix="/u/"), return_exceptions=True
    )
    assert isinstance(others[1], InvalidMetadataRequest)
    after = await asyncio.gather(
        add(store, prefix="/v/"), store.put("/v/other", b""), return_exceptions=True
    )
    assert isinstance(after[1], InvalidMetadataRequest)


async def test_a_sequence_has_one_partition(store: MetadataStore) -> None:
    await add(store)
    with pytest.raises(PartitionMismatch):
        await store.put(PREFIX, b"", partition="other", sequence=True)
    assert await add(store) == sequence_key(PREFIX, 2)


async def test_impossible_sequence_puts_are_refused(store: MetadataStore) -> None:
    """Stores break on some of these, so they never leave the process."""
    session = await store.open_session(timeout_ms=10_000, identity="test")
    with pytest.raises(InvalidMetadataRequest):
        await store.put(PREFIX, b"", sequence=True)
    with pytest.raises(InvalidMetadataRequest):
        await store.put(PREFIX, b"", sequence=True, partition="t", expect=ABSENT)
    with pytest.raises(InvalidMetadataRequest):
        await store.put(PREFIX, b"", sequence=True, partition="t", session=session)
    for prefix in ("/t/history", "/", "t/", "/t//", ""):
        with pytest.raises(InvalidMetadataRequest):
            await store.put(prefix, b"", sequence=True, partition="t")
        with pytest.raises(InvalidMetadataRequest):
            store.watch_sequence(prefix, partition="t")
    assert await add(store) == sequence_key(PREFIX, 1)
    await session.close()


async def test_a_watch_leads_to_the_newest_key(store: MetadataStore) -> None:
    """Events are hints: fewer than puts, the last one is of the newest key."""
    watch = store.watch_sequence(PREFIX, partition="t")
    other = store.watch_sequence("/t/other/", partition="t")
    keys = await asyncio.gather(*(add(store) for _ in range(50)))
    events = await events_until(watch, lambda event: event.key == keys[-1])
    seen = [event.key for event in events]
    assert seen == sorted(seen)
    assert len(seen) <= 50
    assert all(event.record is None for event in events)
    newest = await add(store)
    assert (await next_event(watch)).key == newest
    alone = await add(store, prefix="/t/other/")
    assert (await next_event(other)).key == alone
    watch.close()
    other.close()
