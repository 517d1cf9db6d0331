"""The thread that works in batches."""

import asyncio
import threading

from storage.metadata.batch_thread import BatchThread, Delivery
from tests.support.waiting import TIMEOUT_S

MAX_ITEMS = 10


class Work:
    """Records batches; holds the thread until the gate opens."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.delivered: list[int] = []
        self.failed: list[tuple[list[int], str]] = []
        self.gate = threading.Event()
        self.started = threading.Event()
        self.threads: set[int] = set()

    def work(self, batch: list[int]) -> Delivery:
        self.started.set()
        assert self.gate.wait(20)
        self.batches.append(batch)
        if 13 in batch:
            raise ValueError("unlucky")
        return lambda: self.deliver(batch)

    def fail(self, batch: list[int], error: Exception) -> Delivery:
        return lambda: self.failed.append((batch, str(error)))

    def deliver(self, batch: list[int]) -> None:
        self.threads.add(threading.get_ident())
        self.delivered.extend(batch)

    def thread(self) -> BatchThread[int]:
        return BatchThread(
            "test",
            self.work,
            self.fail,
            weigh=lambda item: item,
            max_items=MAX_ITEMS,
            max_weight=1000,
        )


async def test_items_queued_during_work_are_the_next_batch() -> None:
    work = Work()
    thread = work.thread()
    thread.submit(0)
    assert await asyncio.to_thread(work.started.wait, 20)
    for item in range(1, 6):
        thread.submit(item)
        await asyncio.sleep(0)
    work.gate.set()
    await thread.stop()
    assert work.batches == [[0], [1, 2, 3, 4, 5]]
    assert work.delivered == [0, 1, 2, 3, 4, 5]
    assert work.threads == {threading.get_ident()}


async def test_batches_are_bounded_in_items_and_weight() -> None:
    work = Work()
    thread = work.thread()
    thread.submit(0)
    assert await asyncio.to_thread(work.started.wait, 20)
    for item in [1] * 25 + [900] * 3:
        thread.submit(item)
    work.gate.set()
    await thread.stop()
    assert [len(batch) for batch in work.batches] == [1, 10, 10, 7, 1]
    assert work.batches[3] == [1, 1, 1, 1, 1, 900, 900]


async def test_a_batch_that_fails_fails_alone() -> None:
    work = Work()
    thread = work.thread()
    thread.submit(0)
    assert await asyncio.to_thread(work.started.wait, 20)
    for item in (1, 13):
        thread.submit(item)
    work.gate.set()
    while not work.failed:
        await asyncio.sleep(0.001)
    thread.submit(2)
    await thread.stop()
    assert work.failed == [([1, 13], "unlucky")]
    assert work.delivered == [0, 2]


async def test_a_stop_that_is_cancelled_can_be_waited_for_again() -> None:
    work = Work()
    thread = work.thread()
    thread.submit(0)
    stopping = asyncio.ensure_future(thread.stop())
    assert await asyncio.to_thread(work.started.wait, 20)
    stopping.cancel()
    await asyncio.wait({stopping})
    assert stopping.cancelled()
    work.gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        await thread.stop()
    assert work.delivered == [0]


def test_a_loop_that_is_gone_ends_the_thread() -> None:
    work = Work()

    async def leave() -> BatchThread[int]:
        thread = work.thread()
        thread.submit(1)
        await asyncio.sleep(0)
        return thread

    thread = asyncio.run(leave())
    work.gate.set()
    thread._thread.join(20)
    assert not thread._thread.is_alive()
    assert work.delivered == []
