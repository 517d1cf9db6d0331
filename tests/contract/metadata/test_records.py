"""Records: conditions, versions, order of operations, bounds."""

import asyncio

import pytest

from config import bounds
from magnetar.protocol.server_error import MagnetarError
from storage.clock import SystemClock
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataError,
    MetadataStore,
    PutResult,
    RecordTooLarge,
    Version,
    VersionConflict,
)


async def test_a_record_is_what_was_put(store: MetadataStore) -> None:
    assert await store.get("/a/b") is None
    made = await store.put("/a/b", b"one")
    record = await store.get("/a/b")
    assert record is not None
    assert (record.key, record.value, record.version) == ("/a/b", b"one", made.version)
    assert (record.modifications, made.modifications) == (0, 0)
    assert not record.ephemeral
    assert record.partition is None
    assert record.created_ms == record.modified_ms > 0


async def test_servers_tell_the_time_of_their_clock(store: MetadataStore) -> None:
    """Which is ours here; again and again, as it goes on.  A store in this process has none."""
    before_ms = SystemClock().now_ms()
    told_ms = [await store.server_time_ms() for _ in range(3)]
    after_ms = SystemClock().now_ms()
    assert told_ms == [None] * 3 or [before_ms, *told_ms, after_ms] == sorted(
        [before_ms, *(each for each in told_ms if each is not None), after_ms]
    )


async def test_an_overwrite_counts_and_keeps_the_creation_time(store: MetadataStore) -> None:
    first = await store.put("/a/b", b"one")
    before = await store.get("/a/b")
    second = await store.put("/a/b", b"two")
    after = await store.get("/a/b")
    assert before is not None
    assert after is not None
    assert second.modifications == after.modifications == 1
    assert second.version == after.version != first.version
    assert after.created_ms == before.created_ms
    assert after.modified_ms >= before.modified_ms
    assert after.value == b"two"


async def test_a_created_record_starts_anew_after_a_delete(store: MetadataStore) -> None:
    first = await store.put("/a", b"one")
    await store.put("/a", b"two")
    assert await store.delete("/a")
    again = await store.put("/a", b"three")
    assert again.modifications == 0
    assert again.version != first.version


@pytest.mark.parametrize("value", [b"", b"\x00", bytes(range(256)), b"\xff" * 70_000])
async def test_values_are_any_bytes(store: MetadataStore, value: bytes) -> None:
    await store.put("/value", value)
    record = await store.get("/value")
    assert record is not None
    assert record.value == value
    assert [each.value for each in await store.scan("/", "//")] == [value]


async def test_create_only(store: MetadataStore) -> None:
    await store.put("/a", b"one", expect=ABSENT)
    with pytest.raises(VersionConflict):
        await store.put("/a", b"two", expect=ABSENT)
    record = await store.get("/a")
    assert record is not None
    assert record.value == b"one"


async def test_conditional_put_and_delete(store: MetadataStore) -> None:
    first = await store.put("/a", b"one")
    second = await store.put("/a", b"two", expect=first.version)
    with pytest.raises(VersionConflict):
        await store.put("/a", b"three", expect=first.version)
    with pytest.raises(VersionConflict):
        await store.delete("/a", expect=first.version)
    assert await store.delete("/a", expect=second.version)
    assert await store.get("/a") is None


async def test_conditions_on_what_is_not_there(store: MetadataStore) -> None:
    gone = await store.put("/a", b"one")
    assert await store.delete("/a")
    assert not await store.delete("/a")
    with pytest.raises(VersionConflict):
        await store.put("/a", b"two", expect=gone.version)
    with pytest.raises(VersionConflict):
        await store.delete("/a", expect=gone.version)
    assert await store.get("/a") is None


async def test_a_version_never_comes_back(store: MetadataStore) -> None:
    """Else a stale holder could overwrite a record that was deleted and made again."""
    seen: set[Version] = set()
    for _ in range(5):
        made = await store.put("/a", b"same")
        assert made.version not in seen
        seen.add(made.version)
        await store.delete("/a")


async def test_one_of_many_concurrent_creators_wins(store: MetadataStore) -> None:
    results = await asyncio.gather(
        *(store.put("/lock", str(n).encode(), expect=ABSENT) for n in range(50)),
        return_exceptions=True,
    )
    won = [result for result in results if isinstance(result, PutResult)]
    assert len(won) == 1
    assert sum(isinstance(result, VersionConflict) for result in results) == 49
    record = await store.get("/lock")
    assert record is not None
    assert record.version == won[0].version


async def test_concurrent_compare_and_set_loses_no_increment(store: MetadataStore) -> None:
    await store.put("/counter", b"0")

    async def increment() -> None:
        while True:
            record = await store.get("/counter")
            assert record is not None
            try:
                value = str(int(record.value) + 1).encode()
                await store.put("/counter", value, expect=record.version)
                return
            except VersionConflict:
                continue

    await asyncio.gather(*(increment() for _ in range(20)))
    record = await store.get("/counter")
    assert record is not None
    assert (record.value, record.modifications) == (b"20", 20)


async def test_a_failed_condition_fails_alone(store: MetadataStore) -> None:
    await store.put("/taken", b"")
    results = await asyncio.gather(
        store.put("/one", b"1"),
        store.put("/taken", b"", expect=ABSENT),
        store.put("/two", b"2"),
        return_exceptions=True,
    )
    assert isinstance(results[1], VersionConflict)
    assert [record.key for record in await store.scan("/", "//")] == ["/one", "/taken", "/two"]


async def test_operations_take_effect_in_the_order_issued(store: MetadataStore) -> None:
    outcomes = await asyncio.gather(
        store.put("/a", b"1"),
        store.put("/a", b"2"),
        store.delete("/a"),
        store.put("/a", b"3", expect=ABSENT),
        store.put("/b", b"1"),
        store.delete("/b"),
        store.delete("/b"),
    )
    assert outcomes[2] is True
    assert outcomes[5:] == [True, False]
    record = await store.get("/a")
    assert record is not None
    assert (record.value, record.modifications) == (b"3", 0)
    assert await store.get("/b") is None


async def test_many_puts_of_one_key_leave_the_last(store: MetadataStore) -> None:
    results = await asyncio.gather(*(store.put("/a", str(n).encode()) for n in range(700)))
    assert [result.modifications for result in results] == list(range(700))
    assert len({result.version for result in results}) == 700
    record = await store.get("/a")
    assert record is not None
    assert (record.value, record.version) == (b"699", results[-1].version)


async def test_an_acknowledged_write_is_seen_by_every_later_read(store: MetadataStore) -> None:
    for n in range(20):
        value = str(n).encode()
        await store.put("/d/a", value, indexes=[IndexEntry("i", f"k{n:03}")])
        for fresh in (False, True):
            record = await store.get("/d/a", fresh=fresh)
            assert record is not None
            assert record.value == value
        assert [each.value for each in await store.scan("/d/", "/d//", fresh=True)] == [value]
        hits = await store.scan_index("i", "k", "l", fresh=True)
        assert [(hit.index_key, hit.record.value) for hit in hits] == [(f"k{n:03}", value)]


async def test_get_many_answers_in_order(store: MetadataStore) -> None:
    for n in range(600):
        if n % 3:
            await asyncio.gather(store.put(f"/m/{n:03}", str(n).encode()))
    keys = [f"/m/{n:03}" for n in reversed(range(600))]
    records = await store.get_many([*keys, keys[0]])
    expected = [str(n).encode() if n % 3 else None for n in reversed(range(600))]
    assert [None if each is None else each.value for each in records] == [*expected, expected[0]]
    assert await store.get_many([]) == []


async def test_a_cancelled_put_harms_nobody_else(store: MetadataStore) -> None:
    put = asyncio.ensure_future(store.put("/cancelled", b""))
    others = [asyncio.ensure_future(store.put(f"/other/{n}", b"")) for n in range(3)]
    await asyncio.sleep(0)
    put.cancel()
    await asyncio.gather(*others)
    assert await store.children("/other") == ["0", "1", "2"]


async def test_a_value_may_be_as_long_as_the_bound(store: MetadataStore) -> None:
    value = b"v" * bounds.METADATA_VALUE_BYTES
    await store.put("/large", value)
    record = await store.get("/large")
    assert record is not None
    assert record.value == value
    with pytest.raises(RecordTooLarge):
        await store.put("/larger", value + b"v")
    assert await store.get("/larger") is None


async def test_keys_may_be_as_long_as_the_bound(store: MetadataStore) -> None:
    key = "/" + "k" * (bounds.METADATA_KEY_BYTES - 1)
    await store.put(key, b"")
    assert await store.children("/") == [key[1:]]
    for longer in (key + "k", "/" + "ü" * (bounds.METADATA_KEY_BYTES // 2)):
        with pytest.raises(RecordTooLarge):
            await store.put(longer, b"")


async def test_a_record_has_a_bounded_number_of_index_entries(store: MetadataStore) -> None:
    entries = [IndexEntry("i", f"{n:05}") for n in range(bounds.METADATA_INDEX_ENTRIES + 1)]
    await store.put("/many", b"", indexes=entries[:-1])
    assert len(await store.scan_index("i", "0", "9")) == bounds.METADATA_INDEX_ENTRIES
    with pytest.raises(RecordTooLarge):
        await store.put("/more", b"", indexes=entries)
    long = [IndexEntry("i", f"{n:04}" + "x" * 4000) for n in range(1000)]
    with pytest.raises(RecordTooLarge):
        await store.put("/long", b"v" * bounds.METADATA_VALUE_BYTES, indexes=long)


@pytest.mark.parametrize(
    "key",
    ["", "a", "/", "/a/", "//", "/a//b", "/.", "/a/..", "/./a", "/a\x00", "/a\n", "/\ud800", "a/b"],
)
async def test_impossible_keys_are_refused(store: MetadataStore, key: str) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.put(key, b"")
    with pytest.raises(InvalidMetadataRequest):
        await store.get(key)
    with pytest.raises(InvalidMetadataRequest):
        await store.delete(key)


@pytest.mark.parametrize("key", ["/.a", "/a/...", "/ü/日本/🙂", "/a b", "/%2F", "/'\"\\;--", "/-"])
async def test_unusual_keys_work(store: MetadataStore, key: str) -> None:
    await store.put(key, b"v", indexes=[IndexEntry("i", key)])
    record = await store.get(key)
    assert record is not None
    assert record.key == key
    assert [hit.record.key for hit in await store.scan_index("i", "/", "0")] == [key]


async def test_a_closed_store_says_so(store: MetadataStore) -> None:
    await store.put("/a", b"")
    queued = asyncio.ensure_future(store.put("/b", b""))
    await asyncio.sleep(0)
    await store.close()
    await queued
    await store.close()
    for call in (store.get("/a"), store.put("/a", b""), store.children("/"), store.delete("/a")):
        with pytest.raises(MetadataError):
            await call
    with pytest.raises(MagnetarError):
        store.watch_key("/a")
