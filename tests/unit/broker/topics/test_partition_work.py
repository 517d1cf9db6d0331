"""Work on many partitions: bounded over all requests, in order, and ended by the first error."""

import asyncio

import pytest

from broker.topics.partitions import PartitionWork
from config.bounds import PARTITIONS_AT_ONCE
from magnetar.protocol.names import TopicName, parse_topic_name

NAME = parse_topic_name("persistent://public/default/t")
PARTITIONS = [NAME.partition(index) for index in range(5 * PARTITIONS_AT_ONCE)]


class Work:
    """Counts what is in progress, and in which turn of the loop each piece began."""

    def __init__(self) -> None:
        self.in_progress = 0
        self.most = 0
        self.begun = 0

    async def run(self, partition: TopicName) -> int | None:
        self.begun += 1
        self.in_progress += 1
        self.most = max(self.most, self.in_progress)
        await asyncio.sleep(0.001)
        self.in_progress -= 1
        return partition.partition_index


async def test_results_are_in_order_and_all_requests_share_the_bound() -> None:
    shared, work = PartitionWork(), Work()
    found = await asyncio.gather(*(shared.run(PARTITIONS, work.run) for _ in range(3)))
    assert found == [list(range(len(PARTITIONS)))] * 3
    assert work.most == PARTITIONS_AT_ONCE


async def test_small_request_does_not_wait_for_the_whole_of_a_large_one() -> None:
    shared, work = PartitionWork(), Work()
    large = asyncio.create_task(shared.run(PARTITIONS, work.run))
    await asyncio.sleep(0)
    await shared.run(PARTITIONS[:1], work.run)
    assert work.begun <= 3 * PARTITIONS_AT_ONCE
    await large


async def test_work_that_waits_for_nothing_leaves_the_loop_in_between() -> None:
    done = 0

    async def at_once(partition: TopicName) -> None:
        nonlocal done
        done += 1

    task = asyncio.create_task(PartitionWork().run(PARTITIONS, at_once))
    turns: list[int] = []
    while not task.done():
        before = done
        await asyncio.sleep(0)
        turns.append(done - before)
    assert done == len(PARTITIONS)
    assert max(turns) <= PARTITIONS_AT_ONCE


async def test_first_error_is_raised_after_what_is_in_progress() -> None:
    work = Work()

    async def fail_at_third(partition: TopicName) -> int | None:
        if partition.partition_index == 3:
            raise LookupError("third")
        return await work.run(partition)

    with pytest.raises(LookupError, match="third"):
        await PartitionWork().run(PARTITIONS, fail_at_third)
    assert work.in_progress == 0
    assert work.begun < PARTITIONS_AT_ONCE


async def test_no_partitions_need_no_work() -> None:
    assert await PartitionWork().run([], Work().run) == []
