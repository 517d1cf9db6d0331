"""Secondary indexes: they change with their record, at once and wholly."""

import asyncio
from collections.abc import Sequence

import pytest

from storage.metadata.keys import exact_range, number, prefix_range
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataStore,
    VersionConflict,
    is_cut,
)

ALL = ("\x02", "\U0010ffff")


async def hits(store: MetadataStore, index: str, lo: str, hi: str) -> list[tuple[str, str]]:
    return [(hit.index_key, hit.record.key) for hit in await store.scan_index(index, lo, hi)]


def entries(*keys: str, index: str = "i") -> list[IndexEntry]:
    return [IndexEntry(index, key) for key in keys]


async def test_a_put_replaces_the_whole_list(store: MetadataStore) -> None:
    await store.put("/a", b"1", indexes=[*entries("x", "y"), *entries("z", index="j")])
    assert await hits(store, "i", *ALL) == [("x", "/a"), ("y", "/a")]
    assert await hits(store, "j", *ALL) == [("z", "/a")]
    await store.put("/a", b"2", indexes=entries("y", "z"))
    assert await hits(store, "i", *ALL) == [("y", "/a"), ("z", "/a")]
    assert await hits(store, "j", *ALL) == []
    await store.put("/a", b"3")
    assert await hits(store, "i", *ALL) == []


async def test_a_delete_removes_the_entries(store: MetadataStore) -> None:
    await store.put("/a", b"", indexes=entries("x"))
    await store.put("/b", b"", indexes=entries("x"))
    await store.delete("/a")
    assert await hits(store, "i", *ALL) == [("x", "/b")]


async def test_a_failed_put_changes_no_entry(store: MetadataStore) -> None:
    await store.put("/a", b"", indexes=entries("x"))
    with pytest.raises(VersionConflict):
        await store.put("/a", b"", expect=ABSENT, indexes=entries("y"))
    with pytest.raises(VersionConflict):
        await store.delete("/a", expect=ABSENT)
    assert await hits(store, "i", *ALL) == [("x", "/a")]


async def test_hits_hold_the_record(store: MetadataStore) -> None:
    await store.put("/a", b"value", partition="p", indexes=entries("x"))
    (hit,) = await store.scan_index("i", "x", "y")
    assert hit.record == await store.get("/a", partition="p")


async def test_order_is_secondary_key_then_key(store: MetadataStore) -> None:
    for key, index_key in (("/b", "2"), ("/a", "2"), ("/c", "10"), ("/d/e", "1"), ("/d", "ä")):
        await store.put(key, b"", indexes=entries(index_key))
    expected = [("1", "/d/e"), ("10", "/c"), ("2", "/a"), ("2", "/b"), ("ä", "/d")]
    assert await hits(store, "i", *ALL) == expected


async def test_a_record_is_hit_once_for_each_key(store: MetadataStore) -> None:
    await store.put("/a", b"", indexes=entries("x", "y", "x"))
    assert await hits(store, "i", *ALL) == [("x", "/a"), ("y", "/a")]
    assert await hits(store, "i", "x", "y") == [("x", "/a")]


async def test_ranges(store: MetadataStore) -> None:
    for n in range(12):
        await store.put(f"/n/{n}", b"", indexes=entries(number(n)))
    assert await hits(store, "i", number(3), number(5)) == [
        (number(3), "/n/3"),
        (number(4), "/n/4"),
    ]
    assert await hits(store, "i", *exact_range(number(11))) == [(number(11), "/n/11")]
    assert await hits(store, "i", *exact_range(number(1)[:-1])) == []
    assert len(await hits(store, "i", *prefix_range(number(0)[:-1]))) == 10
    assert await hits(store, "i", number(5), number(3)) == []
    assert await hits(store, "other", *ALL) == []
    limited = await store.scan_index("i", *ALL, limit=2)
    assert [hit.index_key for hit in limited] == [number(0), number(1)]
    assert await store.scan_index("i", *ALL, limit=0) == []


async def test_a_scan_stops_at_so_many_bytes(store: MetadataStore) -> None:
    sizes = [1, 5, 0, 4, 100, 3, *([2] * 60)]
    for n, size in enumerate(sizes):
        await store.put(f"/n/{n:02}", b"v" * size, indexes=entries(number(n)))

    async def found(limit: int | None, max_bytes: int) -> int:
        told = await store.scan_index("i", *ALL, limit=limit, max_bytes=max_bytes)
        assert [hit.index_key for hit in told] == [number(n) for n in range(len(told))]
        assert is_cut(told, limit, max_bytes) == (len(told) < len(sizes))
        return len(told)

    assert [await found(None, most) for most in (1, 2, 6, 7, 10, 11)] == [1, 2, 2, 4, 4, 5]
    assert [await found(3, most) for most in (6, 7, 1000)] == [2, 3, 3]
    assert await found(None, 113 + 2 * 59) == 6 + 59
    assert await found(None, 1000) == len(sizes)


async def test_long_ranges_are_whole(store: MetadataStore) -> None:
    await asyncio.gather(
        *(store.put(f"/n/{n:04}", b"", indexes=entries(f"{n % 7}")) for n in range(900))
    )
    expected = sorted((f"{n % 7}", f"/n/{n:04}") for n in range(900))
    assert await hits(store, "i", *ALL) == expected
    limited = await store.scan_index("i", *ALL, limit=700)
    assert [(hit.index_key, hit.record.key) for hit in limited] == expected[:700]


@pytest.mark.parametrize(("limit", "max_bytes"), [(20, None), (None, 200), (20, 10_000)])
async def test_w10_a_scan_under_churn_is_cut_or_whole(
    clients: Sequence[MetadataStore], limit: int | None, max_bytes: int | None
) -> None:
    """Fewer hits than a bound allows are all there are, whatever comes and goes meanwhile.

    By several clients where the store takes them; each of them writes, and scans.
    """
    store = clients[0]
    staying = [f"/stay/{n:02}" for n in range(40)]
    for n, key in enumerate(staying):
        await store.put(key, b"v" * 10, indexes=entries(number(100 + n)))
    scans = 0

    async def come_and_go(writer: int) -> None:
        store = clients[writer % len(clients)]
        while scans < 25:
            for n in range(5):
                at = number(5 * writer + n)
                await store.put(f"/go/{writer}-{n}", b"v" * 10, indexes=entries(at))
            for n in range(5):
                await store.delete(f"/go/{writer}-{n}")

    async with asyncio.TaskGroup() as writers:
        for writer in range(6):
            writers.create_task(come_and_go(writer))
        try:
            for scans in range(25):
                store = clients[scans % len(clients)]
                told = await store.scan_index(
                    "i", *ALL, fresh=True, limit=limit, max_bytes=max_bytes
                )
                places = [(hit.index_key, hit.record.key) for hit in told]
                assert places == sorted(set(places))
                found = [key for _, key in places if key in staying]
                assert found == staying[: len(found)]
                assert is_cut(told, limit, max_bytes) or found == staying
        finally:
            scans = 25


async def test_indexes_are_apart(store: MetadataStore) -> None:
    await store.put("/a", b"", indexes=[*entries("k", index="i"), *entries("k", index="i2")])
    await store.put("/a", b"", indexes=entries("k", index="i2"))
    assert await hits(store, "i", *ALL) == []
    assert await hits(store, "i2", *ALL) == [("k", "/a")]


async def test_an_entry_never_outlives_its_record(store: MetadataStore) -> None:
    """Readers beside a writer: every hit is of a record that says the same key."""
    done = asyncio.Event()

    async def write() -> None:
        for n in range(80):
            await store.put("/r", str(n).encode(), indexes=entries(str(n)))
            if n % 10 == 9:
                await store.delete("/r")
        done.set()

    writing = asyncio.ensure_future(write())
    while not done.is_set():
        found = await store.scan_index("i", *ALL)
        assert len(found) <= 1
        assert all(hit.index_key.encode() == hit.record.value for hit in found)
    await writing
    assert await hits(store, "i", *ALL) == []


@pytest.mark.parametrize(
    "entry",
    [
        IndexEntry("i", ""),
        IndexEntry("i", "a\x01b"),
        IndexEntry("i", "\x00"),
        IndexEntry("i", "\ud800"),
        IndexEntry("", "a"),
        IndexEntry("a/b", "k"),
        IndexEntry("a\x01", "k"),
    ],
)
async def test_impossible_entries_are_refused(store: MetadataStore, entry: IndexEntry) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.put("/a", b"", indexes=[entry])
    assert await store.get("/a") is None


@pytest.mark.parametrize(("index", "lo", "hi"), [("i", "a", ""), ("a/b", "a", "b"), ("", "a", "b")])
async def test_impossible_ranges_are_refused(
    store: MetadataStore, index: str, lo: str, hi: str
) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.scan_index(index, lo, hi)


async def test_secondary_keys_may_have_slashes(store: MetadataStore) -> None:
    await store.put("/a", b"", indexes=entries("tenant/ns/topic"))
    assert await hits(store, "i", *exact_range("tenant/ns/topic")) == [("tenant/ns/topic", "/a")]
    assert await hits(store, "i", *prefix_range("tenant/")) == [("tenant/ns/topic", "/a")]
