"""Records that are read once and then followed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import structlog

from broker.policies.followed_records import FollowedRecords
from magnetar.background_tasks import BackgroundTasks
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Record
from tests.support.waiting import until

PATH = "/admin/policies/a/b"


class SlowReads(MemoryMetadataStore):
    """A store whose reads end when they are let."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.let = asyncio.Event()
        self.let.set()
        self.reads = 0

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        found = await super().get(key, partition=partition, fresh=fresh)
        self.reads += 1
        await self.let.wait()
        return found


@pytest.fixture
async def store() -> AsyncIterator[SlowReads]:
    store = SlowReads()
    yield store
    await store.close()


@pytest.fixture
async def records(store: SlowReads) -> AsyncIterator[FollowedRecords[bytes]]:
    tasks = BackgroundTasks(structlog.get_logger(__name__))
    yield FollowedRecords(store, tasks, "records", lambda record: record.value)
    await tasks.stop()


async def test_all_that_require_a_record_at_once_share_one_read(
    store: SlowReads, records: FollowedRecords[bytes]
) -> None:
    await store.put(PATH, b"1")
    assert await asyncio.gather(*(records.require(PATH) for _ in range(5))) == [b"1"] * 5
    assert store.reads == 1
    assert await records.require(PATH) == b"1"
    assert store.reads == 1


@pytest.mark.parametrize("value", [b"2", None])
async def test_a_change_during_the_read_is_not_lost(
    store: SlowReads, records: FollowedRecords[bytes], value: bytes | None
) -> None:
    await store.put(PATH, b"1")
    store.let.clear()
    requiring = asyncio.ensure_future(records.require(PATH))
    await until(lambda: store.reads == 1)
    changed = asyncio.Event()
    records.on_change(lambda _: changed.set())
    if value is None:
        await store.delete(PATH)
    else:
        await store.put(PATH, value)
    await asyncio.wait_for(changed.wait(), 10)
    store.let.set()
    assert await requiring == value
    assert records.known(PATH) == value


async def test_several_that_require_what_is_not_there_all_get_none(
    records: FollowedRecords[bytes],
) -> None:
    assert await asyncio.gather(*(records.require(PATH) for _ in range(3))) == [None] * 3


async def test_a_record_that_becomes_unreadable_has_no_value(store: SlowReads) -> None:
    """What was known may grant what the new record does not."""
    tasks = BackgroundTasks(structlog.get_logger(__name__))
    records = FollowedRecords(store, tasks, "records", lambda record: int(record.value))
    changes: asyncio.Queue[str] = asyncio.Queue()
    records.on_change(changes.put_nowait)
    await store.put(PATH, b"1")
    assert await records.require(PATH) == 1
    await store.put(PATH, b"unreadable")
    await asyncio.wait_for(changes.get(), 10)
    assert records.known(PATH) is None
    with pytest.raises(ValueError, match="unreadable"):
        await records.require(PATH)
    await store.put(PATH, b"2")
    await asyncio.wait_for(changes.get(), 10)
    assert records.known(PATH) == 2
    await tasks.stop()
