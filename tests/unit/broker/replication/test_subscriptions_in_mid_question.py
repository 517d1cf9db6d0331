"""Acknowledgements that are not whole or not certain while clusters ask each other of them."""

import pytest

from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.broker.replication.test_scalable_topics import TOPIC, Pair, client_of, is_done
from tests.unit.broker.replication.test_segment_subscriptions import (
    SUB,
    Question,
    left,
    pair,
    subscription,
    written_in,
)

__all__ = ["pair"]


async def until_left(cluster: Cluster, numbers: list[int]) -> None:
    """Return when these entries are not acknowledged, and no other ones."""

    async def is_so() -> bool:
        return await left(cluster) == numbers

    await until_awaited(is_so)


@pytest.mark.parametrize("commits", [False, True])
async def test_copy_acknowledged_in_an_open_transaction_is_left(pair: Pair, commits: bool) -> None:
    east, west = pair
    count = await written_in(east, west)
    async with client_of(west) as client, client.queue_consumer(TOPIC, SUB) as consumer:
        messages = [await consumer.receive() for _ in range(count)]
        transaction = await client.transaction()
        await consumer.ack(messages[0], transaction=transaction)
        for each in messages[1:]:
            await consumer.ack(each)
        await until_left(west, [0])
        question = Question(east, west)
        await question.collect()
        await question.ask()
        await (transaction.commit() if commits else transaction.abort())
        await until_left(west, [] if commits else [0])
        await question.tell()
        assert await left(east) == list(range(count))
        await Question(east, west).run()
        assert await left(east) == ([] if commits else list(range(count)))


@pytest.mark.parametrize("commits", [False, True])
async def test_acknowledgement_in_an_open_transaction_at_home_is_not_told(
    pair: Pair, commits: bool
) -> None:
    east, west = pair
    count = await written_in(east, west)
    async with client_of(east) as client, client.stream_consumer(TOPIC, SUB) as consumer:
        messages = [await consumer.receive() for _ in range(count)]
        transaction = await client.transaction()
        await consumer.ack(messages[-1], transaction=transaction)
        question = Question(east, west)
        await question.collect()
        await (transaction.commit() if commits else transaction.abort())
        await until_left(east, [] if commits else list(range(count)))
        await question.ask()
        await question.tell()
        assert await left(west) == list(range(count))
        await Question(east, west).run()
        assert await left(west) == ([] if commits else list(range(count)))


async def test_batch_acknowledged_in_part_in_each_cluster_is_left_in_both(pair: Pair) -> None:
    east, west = pair
    async with client_of(east) as client, client.producer(TOPIC) as producer:
        sent = [producer.send_nowait(b"%d" % number, key="k") for number in range(4)]
        for each in sent:
            await each
    await until(lambda: is_done(east))
    for cluster, words in ((east, 0b1100), (west, 0b0011)):
        found = await subscription(cluster)
        position = found.ledger.entry_at(0)
        found.acknowledge(None, [(position, (words,), 4)])
    await Question(east, west).run()
    assert await left(east) == await left(west) == [0]
    found = await subscription(west)
    found.acknowledge(None, [(found.ledger.entry_at(0), (0b1100,), 4)])
    await Question(east, west).run()
    assert await left(east) == await left(west) == []
