"""Large batches are opened in threads, within a budget."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from broker.replication.batch_opener import BatchOpener, is_large
from config.bounds import REPLICATED_BATCH_BYTES
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from tests.support.waiting import TIMEOUT_S


class Threads:
    """Opens batches when the test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = threading.Semaphore(0)

    def work(self) -> int:
        self.begun += 1
        number = self.begun
        self.may_end.acquire()
        return number


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.may_end.release(10)


async def begun(threads: Threads, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while threads.begun < count:
            await asyncio.sleep(0.001)


async def test_batches_are_opened_in_order_within_the_budget(threads: Threads) -> None:
    opener = BatchOpener(200)
    opening = [asyncio.create_task(opener.run(100, threads.work)) for _ in range(3)]
    await begun(threads, 2)
    await asyncio.sleep(0)
    assert threads.begun == 2
    threads.may_end.release()
    await begun(threads, 3)
    threads.may_end.release(2)
    assert sorted([await each for each in opening]) == [1, 2, 3]


async def test_batch_that_is_larger_than_the_budget_is_opened_alone(threads: Threads) -> None:
    opener = BatchOpener(200)
    first, second = (asyncio.create_task(opener.run(1000, threads.work)) for _ in range(2))
    await begun(threads, 1)
    await asyncio.sleep(0)
    assert threads.begun == 1
    threads.may_end.release(2)
    await asyncio.gather(first, second)


async def test_batch_whose_replicator_ends_gives_its_turn_to_the_next_one(threads: Threads) -> None:
    opener = BatchOpener(100)
    first, second, third = (asyncio.create_task(opener.run(100, threads.work)) for _ in range(3))
    await begun(threads, 1)
    second.cancel()
    threads.may_end.release(2)
    assert [await first, await third] == [1, 2]
    assert second.cancelled()


def test_batch_is_large_by_what_it_is_unpacked() -> None:
    assert not is_large(b"", MessageMetadata(uncompressed_size=REPLICATED_BATCH_BYTES))
    assert is_large(b"", MessageMetadata(uncompressed_size=REPLICATED_BATCH_BYTES + 1))
