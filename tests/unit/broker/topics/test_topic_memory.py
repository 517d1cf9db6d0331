"""A topic that is closed frees its memory at once: no part of it waits for a garbage collection."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from tests.support.bounds import set_bound
from tests.support.raw_client import RawClient
from tests.unit.broker.topics.test_topics import name_of

Connect = Callable[[], Awaitable[RawClient]]
OF_TOPICS = ("broker.topics.", "broker.replication.", "storage.managed_ledger.", "txn.")


@contextmanager
def unreachable_objects() -> Iterator[list[str]]:
    """The types of objects of topics, made meanwhile, that only a garbage collection would free.

    A thread of an earlier test may still have its broker, and leave it only now.
    """
    found: list[str] = []
    gc.collect()
    earlier = {id(each) for each in gc.get_objects() if _is_of_topics(each)}
    gc.disable()
    flags = gc.get_debug()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [each for each in gc.garbage if _is_of_topics(each) and id(each) not in earlier]
        found += [type(each).__qualname__ for each in left]
    finally:
        left = []
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()


def _is_of_topics(found: object) -> bool:
    # Types that Cython makes have a descriptor there, which is no string.
    return str(type(found).__module__).startswith(OF_TOPICS)


async def use(client: RawClient, topic: str) -> None:
    """Produce, and consume with each type of subscription; then leave."""
    producer = await client.create_producer(topic)
    await producer.send(b"x")
    for kind in pb.CommandSubscribe.SubType.keys():  # noqa: SIM118 - it is no mapping
        options = pb.CommandSubscribe(sub_type=kind, initial_position=pb.CommandSubscribe.Earliest)
        consumer = await client.subscribe(topic, f"s-{kind}", options, permits=1)
        await consumer.receive()
        await consumer.close()
    await producer.close()


async def test_deleted_topic_is_freed_at_once(broker: Broker) -> None:
    with unreachable_objects() as found:
        for number in range(3):
            name = name_of(f"persistent://public/default/t-{number}")
            await broker.topics.get(name, create=True)
            await broker.topics.delete(name, force=False)
        await asyncio.sleep(0.1)
    assert found == []


@pytest.mark.parametrize("ends_by", ["delete", "unload"])
async def test_topic_that_was_used_is_freed_at_once(
    broker: Broker, connect: Connect, ends_by: str
) -> None:
    client = await connect()
    with unreachable_objects() as found:
        for number in range(3):
            name = name_of(f"persistent://public/default/t-{number}")
            await use(client, str(name))
            topic = await broker.topics.get(name, create=False)
            await topic.create_subscription("s", EARLIEST)
            del topic
            if ends_by == "delete":
                await broker.topics.delete(name, force=False)
            else:
                await broker.topics.unload(name)
        await asyncio.sleep(0.1)
    assert found == []


async def test_deleted_topic_that_was_checked_for_being_idle_is_freed_at_once(
    broker: Broker,
) -> None:
    name = name_of("persistent://public/default/t")
    topic = ref(await broker.topics.get(name, create=True))
    with unreachable_objects():
        await broker.idle_topics.unload_idle()
        await broker.topics.delete(name, force=False)
        await asyncio.sleep(0.1)
        assert topic() is None


async def test_topic_whose_clients_are_attached_is_freed_at_once(
    broker: Broker, connect: Connect
) -> None:
    """They are told to connect again, and hold nothing of it."""
    client = await connect()
    with unreachable_objects() as found:
        name = name_of("persistent://public/default/t")
        await client.create_producer(str(name))
        await client.subscribe(str(name), "s", permits=1)
        await broker.topics.unload(name)
        await asyncio.sleep(0.1)
    assert found == []


async def test_garbage_is_collected_in_parts_while_topics_load(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection goes through all that was made since the last one: it must not be much."""
    generations: list[int] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    set_bound(monkeypatch, "LOADS_PER_COLLECTION", 3)
    gc.callbacks.append(collecting)
    try:
        for number in range(7):
            await broker.topics.get(name_of(f"persistent://public/default/t-{number}"), create=True)
    finally:
        gc.callbacks.remove(collecting)
    assert generations.count(1) >= 2
