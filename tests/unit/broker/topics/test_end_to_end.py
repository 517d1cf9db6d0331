"""Consumers over real sockets and storage: one broker in this process, clients of the bare wire."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from broker.app.service import Broker
from broker.topics.topic_stats import topic_stats
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import to_wire
from magnetar.protocol.key_hash import sticky_hash
from magnetar.protocol.names import parse_topic_name
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.ledger import ManagedLedger
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer

TOPIC = "persistent://public/default/egress"
EXCLUSIVE, SHARED = pb.CommandSubscribe.Exclusive, pb.CommandSubscribe.Shared
FAILOVER, KEY_SHARED = pb.CommandSubscribe.Failover, pb.CommandSubscribe.Key_Shared
EARLIEST = pb.CommandSubscribe.Earliest


@pytest.fixture(params=[64 * 2**20, 0], ids=["cached", "from-disk"])
async def broker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    async with running(tmp_path, entry_cache_bytes=request.param) as broker:
        yield broker


async def client_of(broker: Broker) -> RawClient:
    return await RawClient.open("127.0.0.1", broker.port)


async def fill(client: RawClient, count: int, *, topic: str = TOPIC, size: int = 0) -> None:
    producer = await client.create_producer(topic)
    for index in range(count):
        await producer.send(
            str(index).encode().ljust(size),
            metadata=pb.MessageMetadata(publish_time=1000 + index, partition_key=f"k{index % 7}"),
        )
    await producer.close()


def options(kind: pb.CommandSubscribe.SubType, **fields: object) -> pb.CommandSubscribe:
    """The parts of a SUBSCRIBE that a test says, unset fields left to the client."""
    made = pb.CommandSubscribe()
    made.sub_type = kind
    for name, value in fields.items():
        if isinstance(value, pb.MessageIdData):
            made.start_message_id.CopyFrom(value)
        else:
            setattr(made, name, value)
    return made


async def take(consumer: RawConsumer, count: int) -> list[int]:
    return [int((await consumer.receive()).payload) for _ in range(count)]


async def nothing_more(consumer: RawConsumer) -> bool:
    """A PING that is answered has overtaken nothing."""
    await consumer.client.ping()
    return consumer.messages.empty()


async def test_a_subscription_stays_replicated_after_a_restart(tmp_path: Path) -> None:
    options = pb.CommandSubscribe(
        replicate_subscription_state=True,
        subscription_properties=[pb.KeyValue(key="team", value="a")],
    )
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        await (await client.subscribe(TOPIC, "s")).close()
        for name in "st":
            await (await client.subscribe(TOPIC, name, options)).close()
        # A consumer that says nothing of it changes nothing.
        await client.subscribe(TOPIC, "s")
        await client.close()
    async with running(tmp_path) as broker:
        topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
        assert all(topic.subscriptions[name].cursor.replicated for name in "st")
        stats = (await topic_stats(topic, ""))["subscriptions"]
        assert isinstance(stats, dict)
        assert stats["t"]["isReplicated"] is True
        assert stats["t"]["subscriptionProperties"] == {"team": "a"}


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_a_compacted_read_of_a_shared_subscription_is_refused(
    broker: Broker, kind: pb.CommandSubscribe.SubType
) -> None:
    client = await client_of(broker)
    with pytest.raises(BrokerError, match="readCompacted") as refused:
        await client.subscribe(TOPIC, "s", options(kind, read_compacted=True))
    assert refused.value.code == pb.NotAllowedError
    assert TOPIC not in broker.topics.loaded()
    await client.close()


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "reader"])
@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER])
async def test_a_compacted_read_of_a_topic_that_never_was_compacted_gets_every_message(
    broker: Broker, kind: pb.CommandSubscribe.SubType, durable: bool
) -> None:
    client = await client_of(broker)
    await fill(client, 3)
    asked = options(kind, read_compacted=True, durable=durable, initial_position=EARLIEST)
    consumer = await client.subscribe(TOPIC, "s", asked, permits=10)
    assert await take(consumer, 3) == [0, 1, 2]
    await client.close()


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED, KEY_SHARED])
async def test_entry_buckets_need_sticky_key_shared(
    broker: Broker, kind: pb.CommandSubscribe.SubType
) -> None:
    client = await client_of(broker)
    asked = options(kind)
    asked.key_shared_meta.key_shared_mode = pb.AUTO_SPLIT
    asked.key_shared_meta.entryBucketDispatch = True
    asked.key_shared_meta.hash_ranges.add(start=0, end=65535)
    with pytest.raises(BrokerError, match="STICKY") as refused:
        await client.subscribe(TOPIC, "s", asked)
    assert refused.value.code == pb.NotAllowedError
    assert TOPIC not in broker.topics.loaded()
    await client.close()


async def test_entry_buckets_that_leave_a_gap_are_refused(broker: Broker) -> None:
    client = await client_of(broker)
    asked = options(KEY_SHARED)
    asked.key_shared_meta.key_shared_mode = pb.STICKY
    asked.key_shared_meta.entryBucketDispatch = True
    asked.key_shared_meta.hash_ranges.add(start=0, end=100)
    asked.key_shared_meta.hash_ranges.add(start=102, end=65535)
    with pytest.raises(BrokerError, match="gap") as refused:
        await client.subscribe(TOPIC, "s", asked)
    assert refused.value.code == pb.ConsumerAssignError
    await client.close()


async def test_in_order_acknowledged_and_kept_over_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        await fill(client, 10)
        consumer = await client.subscribe(
            TOPIC, "s", options(EXCLUSIVE, initial_position=EARLIEST), permits=100
        )
        got = [await consumer.receive() for _ in range(10)]
        assert [int(each.payload) for each in got] == list(range(10))
        assert got[0].command.consumer_epoch == 0
        consumer.ack(got[4].message_id, cumulative=True)
        response = await consumer.ack_answered(got[6].message_id)
        assert not response.HasField("error")
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        consumer = await client.subscribe(TOPIC, "s", permits=100)
        assert await take(consumer, 4) == [5, 7, 8, 9]
        assert await nothing_more(consumer)


async def test_shared_consumers_and_a_lost_connection(broker: Broker) -> None:
    one, two = await client_of(broker), await client_of(broker)
    first = await one.subscribe(TOPIC, "s", options(SHARED), permits=1000)
    second = await two.subscribe(TOPIC, "s", options(SHARED), permits=1000)
    await fill(one, 100)
    while first.messages.qsize() + second.messages.qsize() < 100:
        await one.ping()
        await two.ping()
    mine = [second.messages.get_nowait() for _ in range(second.messages.qsize())]
    assert 0 < len(mine) < 100
    for each in mine:
        second.ack(each.message_id)
    await two.ping()
    await one.close()
    rest = await take(second, 100 - len(mine))
    assert sorted(rest + [int(each.payload) for each in mine]) == list(range(100))


async def test_negative_acknowledgement(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=1000)
    await fill(client, 3)
    got = [await consumer.receive() for _ in range(3)]
    consumer.redeliver(got[1].message_id)
    again = await consumer.receive()
    assert (int(again.payload), again.command.redelivery_count) == (1, 1)
    assert not again.command.HasField("consumer_epoch")


async def test_exclusive_redelivery_has_the_new_epoch(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", options(EXCLUSIVE), permits=1000)
    await fill(client, 3)
    got = [await consumer.receive() for _ in range(3)]
    consumer.ack(got[0].message_id)
    consumer.redeliver(epoch=1)
    again = [await consumer.receive() for _ in range(2)]
    assert [(int(e.payload), e.command.consumer_epoch) for e in again] == [(1, 1), (2, 1)]


async def test_key_shared_keeps_keys_together(broker: Broker) -> None:
    client = await client_of(broker)
    names = ("a", "b", "c")
    consumers = [
        await client.subscribe(TOPIC, "s", options(KEY_SHARED, consumer_name=name), permits=1000)
        for name in names
    ]
    await fill(client, 140)
    while sum(each.messages.qsize() for each in consumers) < 140:
        await client.ping()
    owners: dict[str, set[int]] = {}
    for index, consumer in enumerate(consumers):
        seen = [consumer.messages.get_nowait() for _ in range(consumer.messages.qsize())]
        for each in seen:
            owners.setdefault(each.metadata.partition_key, set()).add(index)
        numbers = [int(each.payload) for each in seen]
        assert numbers == sorted(numbers)
    assert [len(owner) for owner in owners.values()] == [1] * 7


async def test_a_second_exclusive_consumer(broker: Broker) -> None:
    one, two = await client_of(broker), await client_of(broker)
    await one.subscribe(TOPIC, "s")
    with pytest.raises(BrokerError) as refused:
        await two.subscribe(TOPIC, "s")
    assert refused.value.code == pb.ConsumerBusy
    with pytest.raises(BrokerError) as refused:
        await two.subscribe(TOPIC, "s", options(SHARED))
    assert refused.value.code == pb.ConsumerBusy
    await one.close()
    await two.subscribe(TOPIC, "s", options(SHARED))


async def test_failover_moves_on(broker: Broker) -> None:
    one, two = await client_of(broker), await client_of(broker)
    first = await one.subscribe(TOPIC, "s", options(FAILOVER, consumer_name="b"), permits=100)
    second = await two.subscribe(TOPIC, "s", options(FAILOVER, consumer_name="a"), permits=100)
    assert (await second.events.get()).active_consumer_change.is_active is False
    assert (await first.events.get()).active_consumer_change.is_active is True
    await fill(two, 4)
    got = [await first.receive() for _ in range(4)]
    await first.ack_answered(got[0].message_id)
    await one.close()
    assert (await two.wait(second.events.get())).active_consumer_change.is_active is True
    assert await take(second, 3) == [1, 2, 3]


async def test_seek_by_id_and_time_disconnects_and_moves(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    await fill(client, 10)
    got = [await consumer.receive() for _ in range(10)]
    await consumer.ack_answered(got[9].message_id, cumulative=True)
    for target, first in ((got[3].message_id, 3), (1006, 6), (0, 0), (5000, None)):
        await consumer.seek(target)
        closed = await client.wait(consumer.events.get())
        assert closed.close_consumer.consumer_id == consumer.consumer_id
        consumer = await client.subscribe(TOPIC, "s", permits=1)
        if first is None:
            assert await nothing_more(consumer)
        else:
            assert await take(consumer, 1) == [first]


async def test_readers_start_where_they_say_and_leave_nothing_behind(broker: Broker) -> None:
    client = await client_of(broker)
    await fill(client, 6)
    everything = pb.MessageIdData(ledger_id=to_wire(-1), entry_id=to_wire(-1))
    reader = await client.subscribe(
        TOPIC, "r", options(EXCLUSIVE, durable=False, start=everything), permits=100
    )
    got = [await reader.receive() for _ in range(6)]
    assert [int(each.payload) for each in got] == list(range(6))
    last = await reader.last_message_id()
    assert last.last_message_id.entry_id == got[5].message_id.entry_id
    middle = await client.subscribe(
        TOPIC, "r2", options(EXCLUSIVE, durable=False, start=got[4].message_id), permits=100
    )
    assert await take(middle, 2) == [4, 5]
    await reader.seek(got[5].message_id)
    reader = await client.subscribe(
        TOPIC, "r", options(EXCLUSIVE, durable=False, start=everything), permits=100
    )
    assert await take(reader, 1) == [5]
    (topic,) = broker.topics.loaded().values()
    assert set(topic.subscriptions) == {"r", "r2"}
    await reader.close()
    await middle.close()
    while topic.subscriptions:
        await client.ping()
    again = await client.subscribe(
        TOPIC, "r", options(EXCLUSIVE, durable=False, start=everything), permits=1
    )
    assert await take(again, 1) == [0]


async def test_a_reader_that_leaves_before_it_is_attached_leaves_nothing_behind(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, leaving = await client_of(broker), await client_of(broker)
    await fill(client, 1)
    (topic,) = broker.topics.loaded().values()
    open_cursor, began, go_on = ManagedLedger.open_cursor, asyncio.Event(), asyncio.Event()

    async def slow(ledger: ManagedLedger, name: str, *rest: Any, **others: Any) -> Cursor:  # noqa: ANN401
        began.set()
        await go_on.wait()
        return await open_cursor(ledger, name, *rest, **others)

    monkeypatch.setattr(ManagedLedger, "open_cursor", slow)
    other = asyncio.create_task(client.subscribe(TOPIC, "other"))
    await began.wait()
    reader = asyncio.create_task(leaving.subscribe(TOPIC, "r", options(EXCLUSIVE, durable=False)))
    for _ in range(5):
        await leaving.ping()
    await leaving.close()
    await asyncio.wait((reader,))
    go_on.set()
    await other
    await client.subscribe(TOPIC, "another")
    assert set(topic.subscriptions) == {"other", "another"}


async def test_readers_of_half_the_hashes_share_the_keys(broker: Broker) -> None:
    """`keyHashRange`: what is outside is done with, so nothing of it is ever waited for."""
    client = await client_of(broker)
    await fill(client, 40)
    seen: list[list[int]] = []
    for first, last in ((0, 32767), (32768, 65535)):
        wanted = options(EXCLUSIVE, initial_position=EARLIEST, durable=False)
        wanted.key_shared_meta.key_shared_mode = pb.STICKY
        wanted.key_shared_meta.hash_ranges.add(start=first, end=last)
        reader = await client.subscribe(TOPIC, f"half-{first}", wanted, permits=100)
        count = sum(first <= sticky_hash(f"k{n % 7}".encode()) <= last for n in range(40))
        seen.append(await take(reader, count))
        assert await nothing_more(reader)
        await reader.close()
    assert all(seen)
    assert sorted(seen[0] + seen[1]) == list(range(40))
    wanted.key_shared_meta.hash_ranges[0].start = 65536
    with pytest.raises(BrokerError, match="ascending within 0 to 65535"):
        await client.subscribe(TOPIC, "odd", wanted, permits=100)
    await client.close()


async def test_unsubscribe_forgets(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    await fill(client, 2)
    assert await take(consumer, 2) == [0, 1]
    await consumer.unsubscribe()
    consumer = await client.subscribe(TOPIC, "s", permits=100)
    assert await nothing_more(consumer)


async def ack_one_of_four(consumer: RawConsumer, delivery: Delivery) -> None:
    part = pb.MessageIdData()
    part.CopyFrom(delivery.message_id)
    part.ack_set.append(0b1011)
    part.batch_size = 4
    await consumer.ack_answered(part)


async def test_batches_are_acknowledged_by_message(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    producer = await client.create_producer(TOPIC)
    batch = pb.MessageMetadata(num_messages_in_batch=4)
    await producer.send(b"four", metadata=batch, send=pb.CommandSend(num_messages=4))
    got = await consumer.receive()
    await ack_one_of_four(consumer, got)
    consumer.redeliver(got.message_id)
    again = await consumer.receive()
    assert list(again.command.ack_set) == [0b1011]
    assert (await consumer.last_message_id()).last_message_id.batch_index == 3
    await consumer.ack_answered(got.message_id)
    (topic,) = broker.topics.loaded().values()
    assert topic.subscriptions["s"].backlog == 0


@pytest.mark.parametrize("count", [0, -1, 2**20 + 1, 2**31 - 1])
async def test_a_number_of_messages_that_no_batch_has_counts_as_one(
    broker: Broker, count: int
) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=3)
    producer = await client.create_producer(TOPIC)
    await producer.send(b"odd", metadata=pb.MessageMetadata(num_messages_in_batch=count))
    got = await consumer.receive()
    await ack_one_of_four(consumer, got)
    consumer.redeliver(got.message_id)
    assert (await consumer.receive()).payload == b"odd"
    await producer.send(b"next")
    assert (await consumer.receive()).payload == b"next"
    assert (await consumer.last_message_id()).last_message_id.batch_index == -1


async def test_unloading_sends_consumers_away_and_loses_nothing(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    await fill(client, 4)
    got = [await consumer.receive() for _ in range(4)]
    consumer.ack(got[1].message_id)
    await client.ping()
    (topic,) = broker.topics.loaded().values()
    await broker.topics.unload(topic.name)
    assert (await client.wait(consumer.events.get())).HasField("close_consumer")
    consumer = await client.subscribe(TOPIC, "s", options(SHARED), permits=100)
    assert await take(consumer, 3) == [0, 2, 3]


async def test_a_client_that_does_not_read_delays_no_other(broker: Broker) -> None:
    stuck_client, client = await client_of(broker), await client_of(broker)
    stuck = await stuck_client.subscribe(TOPIC, "stuck", options(SHARED), permits=10_000)
    mate = await client.subscribe(TOPIC, "stuck", options(SHARED), permits=10_000)
    other = await client.subscribe(TOPIC, "other", permits=10_000)
    assert stuck_client.transport is not None
    stuck_client.transport.pause_reading()
    count, size = 400, 100_000
    await fill(client, count, size=size)
    assert await take(other, count) == list(range(count))
    (topic,) = broker.topics.loaded().values()
    subscription = topic.subscriptions["stuck"]
    while subscription.messages_out_total < count:
        await client.ping()
    held = subscription.consumers[0].messages_out_total
    assert held * size < 20 * 2**20, "what is queued to one peer is bounded"
    stuck_client.transport.resume_reading()
    got = await take(stuck, held) + await take(mate, count - held)
    assert sorted(got) == list(range(count))


async def test_many_small_messages_arrive_in_order_and_once(broker: Broker) -> None:
    client = await client_of(broker)
    consumer = await client.subscribe(TOPIC, "s", permits=500)
    producer = await client.create_producer(TOPIC)
    count = 3000
    sending = asyncio.create_task(producer.send_many(str(index).encode() for index in range(count)))
    for index in range(count):
        got = await consumer.receive()
        assert int(got.payload) == index
        if index % 250 == 249:
            consumer.ack(got.message_id, cumulative=True)
            consumer.flow(250)
    await sending
    await client.ping()
    (topic,) = broker.topics.loaded().values()
    assert topic.subscriptions["s"].backlog == 0
