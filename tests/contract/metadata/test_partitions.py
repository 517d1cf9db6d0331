"""Partition keys: stored, and checked wherever a record is named."""

import pytest

from storage.metadata.store import (
    IndexEntry,
    InvalidMetadataRequest,
    MetadataStore,
    PartitionMismatch,
)
from tests.contract.metadata.backends import next_event


async def test_a_record_is_found_with_its_partition_only(store: MetadataStore) -> None:
    await store.put("/t/1", b"v", partition="one")
    record = await store.get("/t/1", partition="one")
    assert record is not None
    assert record.partition == "one"
    for wrong in (None, "two"):
        with pytest.raises(PartitionMismatch):
            await store.get("/t/1", partition=wrong)
        with pytest.raises(PartitionMismatch):
            await store.get_many(["/t/0", "/t/1"], partition=wrong)
        with pytest.raises(PartitionMismatch):
            await store.put("/t/1", b"w", partition=wrong)
        with pytest.raises(PartitionMismatch):
            await store.delete("/t/1", partition=wrong)
    assert await store.delete("/t/1", partition="one")


async def test_a_record_without_a_partition_is_checked_too(store: MetadataStore) -> None:
    await store.put("/t/1", b"v")
    with pytest.raises(PartitionMismatch):
        await store.get("/t/1", partition="one")
    with pytest.raises(PartitionMismatch):
        await store.delete("/t/1", partition="one")


async def test_absent_record_has_no_partition(store: MetadataStore) -> None:
    assert await store.get("/t/1", partition="one") is None
    assert not await store.delete("/t/1", partition="one")
    await store.put("/t/1", b"", partition="one")
    await store.delete("/t/1", partition="one")
    await store.put("/t/1", b"", partition="two")
    assert await store.get("/t/1", partition="two") is not None


async def test_scans_ask_one_partition_or_all(store: MetadataStore) -> None:
    await store.put("/t/1", b"", partition="one", indexes=[IndexEntry("i", "k")])
    await store.put("/t/2", b"", partition="two", indexes=[IndexEntry("i", "k")])
    assert [each.key for each in await store.scan("/t/", "/t//")] == ["/t/1", "/t/2"]
    assert [each.key for each in await store.scan("/t/1", "/t/2", partition="one")] == ["/t/1"]
    with pytest.raises(PartitionMismatch):
        await store.scan("/t/", "/t//", partition="one")
    assert await store.children("/t") == ["1", "2"]
    assert [hit.record.key for hit in await store.scan_index("i", "k", "l")] == ["/t/1", "/t/2"]
    hits = await store.scan_index("i", "k", "l", partition="two", limit=1)
    assert [hit.record.key for hit in hits] == ["/t/2"]


async def test_a_watch_names_the_partition(store: MetadataStore) -> None:
    right = store.watch_key("/t/1", partition="one")
    wrong = store.watch_key("/t/1")
    await store.put("/t/1", b"", partition="one")
    assert (await next_event(right)).key == "/t/1"
    with pytest.raises(PartitionMismatch):
        await next_event(wrong)
    right.close()
    wrong.close()


@pytest.mark.parametrize("partition", ["", "a\nb", "\x00", "\udc00"])
async def test_impossible_partitions_are_refused(store: MetadataStore, partition: str) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.put("/a", b"", partition=partition)
    with pytest.raises(InvalidMetadataRequest):
        await store.get("/a", partition=partition)
