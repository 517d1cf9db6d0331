"""Sequence ids over layout changes, with parents, children and the leader at several brokers."""

from collections.abc import AsyncIterator

import pytest

from tests.support.raw_client import RawProducer
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.several import TOPIC, User, hold, segment, take_lead
from tests.unit.broker.scalable.stored import nothing_is_noted
from tests.unit.broker.scalable.test_carried_ids import LOWER_KEY, UPPER_KEY, send, send_all
from tests.unit.broker.topics.test_produce import named

LOWER, UPPER = segment(0, 0x7FFF, 0), segment(0x8000, 0xFFFF, 1)
MERGED = segment(0, 0xFFFF, 2)


@pytest.fixture
async def user(cluster: Cluster) -> AsyncIterator[User]:
    user = User(cluster)
    yield user
    await user.close()


async def three_apart(cluster: Cluster) -> tuple[Node, Node, Node]:
    """The first two have a segment each, the third leads the topic."""
    nodes = [await cluster.add(deduplication=True) for _ in range(3)]
    await until(lambda: all(len(node.placement.candidates) == 3 for node in nodes))
    a, b, c = nodes
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    await hold(a, LOWER)
    await hold(b, UPPER)
    await take_lead(c)
    return a, b, c


async def producer_of(user: User, topic: str) -> RawProducer:
    client = await user.owner(topic)
    return await client.create_producer(topic, named(f"p-seg-{topic.rpartition('-')[2]}"))


async def fill(user: User) -> list[RawProducer]:
    """The lower half has even ids up to 8, the upper one odd ids up to 3."""
    producers = [await producer_of(user, each) for each in (LOWER, UPPER)]
    for number in (0, 2, 4, 6, 8):
        assert await send(producers[0], number, LOWER_KEY)
    for number in (1, 3):
        assert await send(producers[1], number, UPPER_KEY)
    return producers


async def check_merged(cluster: Cluster) -> None:
    """A program that sends all again stores what neither parent has, once."""
    user = User(cluster)
    try:
        producer = await producer_of(user, MERGED)
        assert producer.success.last_sequence_id == 8
        keys = [LOWER_KEY, UPPER_KEY]
        found = [n for n in range(12) if await send(producer, n, keys[n % 2])]
        assert found == [5, 7, 9, 10, 11]
        assert await send_all(producer, range(13)) == [12]
    finally:
        await user.close()


async def test_ids_come_from_parents_at_other_brokers(cluster: Cluster, user: User) -> None:
    a, _, c = await three_apart(cluster)
    for producer in await fill(user):
        await producer.close()
    await c.broker.scalable.merge(TOPIC, (0, 1))
    await hold(a, MERGED)
    await check_merged(cluster)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))


async def test_ids_are_carried_though_the_leader_is_killed(cluster: Cluster, user: User) -> None:
    """A producer holds a parent up, so the leader has published the layout and sealed nothing."""
    a, _, c = await three_apart(cluster)
    lower, upper = await fill(user)
    await c.broker.scalable.merge(TOPIC, (0, 1))
    assert not await nothing_is_noted(cluster.metadata)
    await c.kill()
    await lower.close()
    await upper.close()
    await hold(a, MERGED)
    await check_merged(cluster)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))


async def test_ids_are_carried_though_the_owner_of_a_parent_is_killed(
    cluster: Cluster, user: User
) -> None:
    a, b, c = await three_apart(cluster)
    lower, _ = await fill(user)
    await c.broker.scalable.merge(TOPIC, (0, 1))
    await b.kill()
    await lower.close()
    await hold(a, MERGED)
    await check_merged(cluster)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))


async def test_ids_move_with_the_segment_that_has_them(cluster: Cluster, user: User) -> None:
    a, _, c = await three_apart(cluster)
    for producer in await fill(user):
        await producer.close()
    await c.broker.scalable.merge(TOPIC, (0, 1))
    await hold(a, MERGED)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    await a.kill()
    await check_merged(cluster)
