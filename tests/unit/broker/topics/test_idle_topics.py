"""Topics that nobody uses leave memory, and are there again for the next one who asks."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.idle_topics import IdleTopics, IdleWatch
from broker.topics.registry import TopicRegistry
from broker.topics.topic import Topic
from config.bounds import TRIM_RETRY_MS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.clocks import FakeClock
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.topics.test_topics import name_of

Connect = Callable[[], Awaitable[RawClient]]
TOPIC = "persistent://public/default/t"
IDLE_S = 300


class Looks:
    """The broker's looks, at times that a test chooses."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.now_s = 0.0
        broker.idle_topics = IdleTopics(broker, lambda: self.now_s)

    async def look(self) -> None:
        await self.broker.idle_topics.unload_idle()

    async def idle_time_passes(self) -> None:
        """A look, the whole idle time, another look."""
        await self.look()
        self.now_s += IDLE_S
        await self.look()

    @property
    def loaded(self) -> list[str]:
        return list(self.broker.topics.loaded())


@pytest.fixture
async def looks(broker: Broker) -> Looks:
    await broker.idle_topics.stop()
    return Looks(broker)


def test_only_what_was_idle_and_not_asked_for_all_the_time_goes() -> None:
    watch: IdleWatch[str] = IdleWatch(10)
    assert watch.observe([("a", 0, True), ("b", 0, True), ("c", 0, True)], 0) == []
    assert watch.observe([("a", 0, True), ("b", 1, True), ("c", 0, False)], 9) == []
    assert watch.observe([("a", 0, True), ("b", 1, True), ("c", 0, True)], 10) == ["a"]
    assert watch.observe([("b", 1, True), ("c", 0, True)], 18) == []
    assert watch.observe([("b", 1, True), ("c", 0, True)], 19) == ["b"]
    assert watch.observe([("c", 0, True)], 20) == ["c"]


async def test_an_unloaded_topic_has_everything_when_it_is_loaded_again(
    looks: Looks, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    topic = looks.broker.topics.loaded()[TOPIC]
    await topic.create_subscription("s", EARLIEST, properties={"k": "v"})
    await looks.idle_time_passes()
    assert looks.loaded == [TOPIC], "a producer is attached"
    await producer.close()
    await looks.idle_time_passes()
    assert looks.loaded == []
    assert dict(looks.broker.managed_ledgers.loaded()) == {}
    consumer = await client.subscribe(TOPIC, "s", permits=1)
    assert (await consumer.receive()).payload == b"x"
    again = looks.broker.topics.loaded()[TOPIC]
    assert again.subscriptions["s"].cursor.properties == {"k": "v"}


async def test_the_idle_time_begins_when_the_last_one_has_gone(
    looks: Looks, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await looks.idle_time_passes()
    await producer.close()
    await looks.look()
    looks.now_s += IDLE_S - 1
    await looks.look()
    assert looks.loaded == [TOPIC]
    await looks.broker.topics.get(name_of(TOPIC), create=False)
    looks.now_s += 1
    await looks.look()
    assert looks.loaded == [TOPIC], "somebody asked for it"


@pytest.mark.parametrize("durable", [True, False])
async def test_consumers_and_readers_keep_a_topic(
    looks: Looks, connect: Connect, durable: bool
) -> None:
    client = await connect()
    consumer = await client.subscribe(TOPIC, "s", pb.CommandSubscribe(durable=durable))
    await looks.idle_time_passes()
    assert looks.loaded == [TOPIC]
    await consumer.close()
    topic = looks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.idle)
    await looks.idle_time_passes()
    assert looks.loaded == []


async def test_topic_with_unfinished_or_unsaved_work_is_not_idle(looks: Looks) -> None:
    topic = await looks.broker.topics.get(name_of(TOPIC), create=True)
    subscription = await topic.create_subscription("s", EARLIEST)
    assert topic.idle
    async with subscription._change:
        assert not topic.idle
    async with topic._subscription_change:
        assert not topic.idle
    subscription.cursor._touch()
    assert not topic.idle
    await subscription.cursor.persist()
    sealing = asyncio.create_task(topic.seal())
    await asyncio.sleep(0)
    assert not topic.idle
    await sealing
    await until(lambda: topic.idle)


async def test_request_during_unloading_waits_and_loses_nothing(
    looks: Looks, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"1")
    old = looks.broker.topics.loaded()[TOPIC]
    await old.create_subscription("s", EARLIEST)
    await producer.close()
    begun, go_on = asyncio.Event(), asyncio.Event()
    close_ledger = type(old.ledger).close

    async def slow_close(ledger: object) -> None:
        if ledger is old.ledger:
            begun.set()
            await go_on.wait()
        await close_ledger(ledger)  # type: ignore[arg-type]

    monkeypatch.setattr(type(old.ledger), "close", slow_close)
    looking = asyncio.create_task(looks.idle_time_passes())
    await begun.wait()
    opening = asyncio.create_task(client.create_producer(TOPIC))
    subscribing = asyncio.create_task(client.subscribe(TOPIC, "s", permits=10))
    await until(lambda: TOPIC in looks.broker.topics._loads)
    assert not opening.done()
    go_on.set()
    producer, consumer = await opening, await subscribing
    await looking
    new = looks.broker.topics.loaded()[TOPIC]
    assert new is not old
    assert looks.broker.managed_ledgers.loaded()[new.name.ledger_path] is new.ledger
    await producer.send(b"2")
    assert [(await consumer.receive()).payload for _ in range(2)] == [b"1", b"2"]


async def test_request_just_before_unloading_keeps_the_topic(looks: Looks) -> None:
    """Between the look and the turn in which closing would begin."""
    topic = await looks.broker.topics.get(name_of(TOPIC), create=True)
    await looks.look()
    looks.now_s += IDLE_S
    async with looks.broker.topics._lock(TOPIC):
        looking = asyncio.create_task(looks.look())
        await until(lambda: looks.broker.topics._work.busy)
        assert await looks.broker.topics.get(name_of(TOPIC), create=False) is topic
    await looking
    assert looks.broker.topics.loaded() == {TOPIC: topic}


async def test_retention_goes_on_for_unloaded_topics(
    looks: Looks, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    await producer.close()
    await looks.idle_time_passes()
    assert looks.loaded == []
    await looks.look()
    assert looks.loaded == [], "unsubscribed data stays for a day"
    tomorrow = FakeClock(looks.broker.clock.now_ms() + 25 * 3600 * 1000)
    monkeypatch.setattr(looks.broker, "clock", tomorrow)
    monkeypatch.setattr(looks.broker.managed_ledgers._stores, "clock", tomorrow)
    await looks.look()
    topic: Topic = looks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.ledger.entry_count == 0)
    await looks.idle_time_passes()
    await looks.look()
    assert looks.loaded == [], "there is nothing left to wait for"


async def test_retention_goes_on_when_the_store_was_away_at_its_time(
    looks: Looks, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    await producer.send(b"x")
    await producer.close()
    await looks.idle_time_passes()
    clock = FakeClock(looks.broker.clock.now_ms() + 25 * 3600 * 1000)
    monkeypatch.setattr(looks.broker, "clock", clock)
    monkeypatch.setattr(looks.broker.managed_ledgers._stores, "clock", clock)

    async def away(*_: object, **__: object) -> None:
        raise MetadataError("The store is away.")

    with monkeypatch.context() as patched:
        patched.setattr(TopicRegistry, "get", away)
        await looks.look()
    assert looks.loaded == []
    clock.ms += TRIM_RETRY_MS
    await looks.look()
    topic: Topic = looks.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.ledger.entry_count == 0)


async def test_metrics_are_of_loaded_topics(looks: Looks) -> None:
    await looks.broker.topics.get(name_of(TOPIC), create=True)
    assert TOPIC in await metrics_text(looks.broker)
    await looks.idle_time_passes()
    assert TOPIC not in await metrics_text(looks.broker)


async def backlogs(broker: Broker) -> list[str]:
    """The lines about entries that subscriptions have not acknowledged."""
    lines = (await metrics_text(broker)).splitlines()
    return [line for line in lines if line.startswith("pulsar_subscription_back_log{")]


async def abandon(looks: Looks, connect: Connect) -> str:
    """Unload a topic with one entry that an absent subscription has not acknowledged."""
    topic = await looks.broker.topics.get(name_of(TOPIC), create=True)
    await topic.create_subscription("left", EARLIEST)
    await topic.create_subscription("done", LATEST)
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"m")
    topic.subscriptions["done"].skip(topic.ledger.last_confirmed)
    await topic.subscriptions["done"].cursor.persist()
    await client.close()
    await until(lambda: topic.idle)
    await looks.idle_time_passes()
    assert looks.loaded == []
    labels = f'cluster="standalone",namespace="public/default",subscription="left",topic="{TOPIC}"'
    return f"pulsar_subscription_back_log{{{labels}}} 1.0"


async def test_backlog_of_an_unloaded_topic_stays_in_the_metrics(
    looks: Looks, connect: Connect
) -> None:
    line = await abandon(looks, connect)
    assert await backlogs(looks.broker) == [line]
    await looks.broker.topics.get(name_of(TOPIC), create=False)
    assert line in await backlogs(looks.broker)
    assert len(await backlogs(looks.broker)) == 2


async def test_backlog_of_a_deleted_topic_leaves_the_metrics(
    looks: Looks, connect: Connect
) -> None:
    await abandon(looks, connect)
    await looks.broker.topics.delete(name_of(TOPIC), force=True)
    assert await backlogs(looks.broker) == []


async def test_remembered_backlogs_are_bounded(
    looks: Looks, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "UNLOADED_BACKLOGS", 0)
    await abandon(looks, connect)
    assert await backlogs(looks.broker) == []


async def test_0_is_never(tmp_path: Path) -> None:
    async with running(tmp_path, idle_topic_unload_s=0) as broker:
        assert not broker.idle_topics._tasks.busy
    async with running(tmp_path, idle_topic_unload_s=1) as broker:
        await broker.topics.get(name_of(TOPIC), create=True)
        await until(lambda: not broker.topics.loaded())
