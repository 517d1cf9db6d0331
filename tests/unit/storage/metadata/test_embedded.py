"""A defect where changes are told keeps no writer waiting, and no watcher in the dark."""

import asyncio

import pytest
from structlog.testing import capture_logs

from storage.clock import SystemClock
from storage.metadata.group import Group
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import EventKind, MetadataError
from storage.metadata.watches import WatchHub
from tests.support.waiting import TIMEOUT_S


async def test_defect_in_publishing_a_change_resyncs_watchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    store = MemoryMetadataStore(SystemClock())
    watch = store.watch_children("/a")
    monkeypatch.setattr(WatchHub, "publish", broken)
    async with asyncio.timeout(TIMEOUT_S):
        with capture_logs() as logs:
            made = await asyncio.gather(store.put("/a/b", b"1"), store.put("/a/c", b"1"))
        assert [each.key for each in made] == ["/a/b", "/a/c"]
        assert [each["event"] for each in logs] == ["changes_not_told"]
        assert (await anext(watch)).kind is EventKind.RESYNC
        monkeypatch.undo()
        await store.put("/a/b", b"2", expect=made[0].version)
        assert (await anext(watch)).key == "/a/b"
        await store.close()


async def test_callers_get_their_answer_when_watchers_cannot_be_resynced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    store = MemoryMetadataStore(SystemClock())
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    monkeypatch.setattr(WatchHub, "publish", broken)
    monkeypatch.setattr(WatchHub, "resync", broken)
    async with asyncio.timeout(TIMEOUT_S):
        with capture_logs():
            assert (await store.put("/a/b", b"1")).key == "/a/b"
    assert len(told) == 1
    monkeypatch.undo()
    await store.close()


async def test_defect_in_a_commit_in_memory_fails_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    store = MemoryMetadataStore(SystemClock())
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with asyncio.timeout(TIMEOUT_S):
        monkeypatch.setattr(Group, "apply", broken)
        with capture_logs():
            puts = (store.put("/a", b"1"), store.put("/b", b"1"))
            results = await asyncio.gather(*puts, return_exceptions=True)
        assert [type(each) for each in results] == [MetadataError] * 2
        assert results[0] is not results[1]
        monkeypatch.undo()
        assert store._queued_operations == 0
        await store.put("/a", b"2")
        await store.close()
