"""A watch that is followed: first the watch, then what is there, and both again when it broke."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from structlog.testing import capture_logs

from magnetar.background_tasks import BackgroundTasks
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Event, EventKind, MetadataError, Watch
from storage.metadata.watch_follower import WatchFollower
from tests.support.waiting import TIMEOUT_S, until

LEVEL = "/followed"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not drawn for a terminal, which takes long."""
    with capture_logs():
        yield


class Follower:
    """What is known of one level, by following it."""

    def __init__(self, store: MemoryMetadataStore) -> None:
        self.known: set[str] = set()
        self.watches: list[Watch] = []
        self.reads = 0
        self.fails_at = ""
        self._store = store
        self.following = WatchFollower(self.watch, self._read, self.take)

    def watch(self) -> Watch:
        self.watches.append(self._store.watch_children(LEVEL))
        return self.watches[-1]

    async def _read(self) -> None:
        self.reads += 1
        self.known = {f"{LEVEL}/{name}" for name in await self._store.children(LEVEL)}

    async def take(self, event: Event) -> None:
        if event.key == self.fails_at:
            raise RuntimeError("a defect")
        (self.known.add if event.kind is EventKind.UPSERT else self.known.discard)(event.key)


@pytest.fixture
async def store() -> AsyncIterator[MemoryMetadataStore]:
    made = MemoryMetadataStore(SystemClock())
    yield made
    await made.close()


async def test_changes_missed_during_a_failure_are_read(store: MemoryMetadataStore) -> None:
    follower, tasks = Follower(store), BackgroundTasks()
    follower.fails_at = f"{LEVEL}/b"
    await store.put(f"{LEVEL}/a", b"")
    tasks.keep("followed", follower.following.run)
    await until(lambda: follower.known == {f"{LEVEL}/a"})
    await store.put(f"{LEVEL}/b", b"")
    await store.delete(f"{LEVEL}/a")
    await until(lambda: follower.known == {f"{LEVEL}/b"})
    await store.put(f"{LEVEL}/c", b"")
    await until(lambda: len(follower.known) == 2)
    follower.watches[-1].close()
    await store.delete(f"{LEVEL}/c")
    await until(lambda: follower.known == {f"{LEVEL}/b"})
    assert len(follower.watches) == follower.reads == 3
    await tasks.stop()


async def test_after_a_resync_it_is_read_again(store: MemoryMetadataStore) -> None:
    follower, tasks = Follower(store), BackgroundTasks()
    await follower.following.begin()
    task = tasks.keep("followed", follower.following.run)
    await store.put(f"{LEVEL}/a", b"")
    await until(lambda: bool(follower.known))
    follower.known.clear()
    follower.watches[-1].resync()  # type: ignore[attr-defined]
    await until(lambda: bool(follower.known))
    assert (len(follower.watches), follower.reads) == (1, 2), "what was begun is gone on with"
    assert not task.done()
    await tasks.stop()


async def test_a_first_read_that_fails_is_whose_who_waits_for_it(
    store: MemoryMetadataStore,
) -> None:
    async def fails() -> None:
        raise MetadataError("Down: wait.")

    follower = Follower(store)
    follower.following = WatchFollower(follower.watch, fails, follower.take)
    with pytest.raises(MetadataError):
        await follower.following.begin()
    follower.following.close()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(TIMEOUT_S):
            await anext(aiter(follower.watches[0]))
