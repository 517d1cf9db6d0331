"""Children and scans: levels, order, bounds."""

import asyncio

import pytest

from storage.metadata.keys import children_range, prefix_range
from storage.metadata.store import InvalidMetadataRequest, MetadataStore


async def put_all(store: MetadataStore, *keys: str) -> None:
    await asyncio.gather(*(store.put(key, key.encode()) for key in keys))


async def test_children_are_the_level_right_below(store: MetadataStore) -> None:
    await put_all(store, "/a", "/a/b", "/a/b/c", "/a/c", "/ab", "/a-/x", "/b/c/d", "/a/b/c/d")
    assert await store.children("/a") == ["b", "c"]
    assert await store.children("/a/b") == ["c"]
    assert await store.children("/") == ["a", "ab"]
    assert await store.children("/a/c") == []
    assert await store.children("/nowhere") == []


async def test_only_records_are_children(store: MetadataStore) -> None:
    """A path between two records is no record."""
    await put_all(store, "/b/c/d")
    assert await store.children("/") == []
    assert await store.children("/b") == []
    assert await store.children("/b/c") == ["d"]


async def test_children_go_with_their_records(store: MetadataStore) -> None:
    await put_all(store, "/a/1", "/a/2")
    await store.delete("/a/1")
    assert await store.children("/a") == ["2"]
    await store.delete("/a/2")
    assert await store.children("/a") == []


async def test_order_is_bytewise(store: MetadataStore) -> None:
    names = ["-1", "10", "2", "A", "Z", "a", "a.b", "aa", "~", "ä", "日", "ﬁ", "🙂"]
    assert names == sorted(names, key=str.encode)
    await put_all(store, *(f"/o/{name}" for name in reversed(names)))
    assert await store.children("/o") == names
    assert [record.key for record in await store.scan("/o/", "/o//")] == [
        f"/o/{name}" for name in names
    ]


async def test_scan_bounds(store: MetadataStore) -> None:
    await put_all(store, "/s/a", "/s/b", "/s/b/below", "/s/ba", "/s/c", "/t/b", "/s")

    async def found(lo: str, hi: str) -> list[str]:
        return [record.key for record in await store.scan(lo, hi)]

    assert await found("/s/b", "/s/c") == ["/s/b", "/s/ba"]
    assert await found("/s/b", "/s/b\x01") == ["/s/b"]
    assert await found("/s/", "/s/b") == ["/s/a"]
    assert await found("/s/c", "/s//") == ["/s/c"]
    assert await found("/s/c", "/s/b") == []
    assert await found("/s/b", "/s/b") == []
    assert await found(*children_range("/s")) == ["/s/a", "/s/b", "/s/ba", "/s/c"]
    assert await found(*children_range("/")) == ["/s"]
    assert await found(*prefix_range("/s/b")) == ["/s/b", "/s/ba"]


async def test_a_scan_returns_whole_records(store: MetadataStore) -> None:
    made = await store.put("/s/a", b"value", partition="p")
    (record,) = await store.scan("/s/", "/s//")
    assert record == await store.get("/s/a", partition="p")
    assert record.version == made.version


async def test_long_scans_are_whole(store: MetadataStore) -> None:
    """More than any page that a backend may fetch at once."""
    keys = [f"/long/{n:05}" for n in range(1300)]
    await put_all(store, *keys)
    assert [record.key for record in await store.scan("/long/", "/long//")] == keys
    assert [each.value for each in await store.scan("/long/", "/long//")] == [
        key.encode() for key in keys
    ]
    assert len(await store.children("/long")) == 1300


async def test_a_scan_is_of_one_moment(store: MetadataStore) -> None:
    """Two keys that always change together, in one order, are never seen the other way round."""
    done = asyncio.Event()

    async def write() -> None:
        for n in range(60):
            value = str(n).encode()
            await asyncio.gather(store.put("/m/b", value), store.put("/m/a", value))
        done.set()

    writing = asyncio.ensure_future(write())
    while not done.is_set():
        values = {each.key: int(each.value) for each in await store.scan("/m/", "/m//")}
        assert values.get("/m/b", -1) >= values.get("/m/a", -1)
    await writing


@pytest.mark.parametrize(
    ("lo", "hi"),
    [
        ("", ""),
        ("a", "b"),
        ("/a", "/b/c"),
        ("/a/b", "/c/d"),
        ("/a/", "/b"),
        ("/a/", "/a0/x"),
        ("/a/", "/a///"),
        ("/a/b", "/a/b/c"),
        ("/a/b\x00", "/a/c"),
        ("/a/b", "/a/\ud800"),
    ],
)
async def test_bounds_of_two_levels_are_refused(store: MetadataStore, lo: str, hi: str) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.scan(lo, hi)


@pytest.mark.parametrize("key", ["", "a", "/a/", "//"])
async def test_children_of_impossible_paths_are_refused(store: MetadataStore, key: str) -> None:
    with pytest.raises(InvalidMetadataRequest):
        await store.children(key)
    with pytest.raises(InvalidMetadataRequest):
        store.watch_children(key)
