"""Who may attach when, ends of topics, closing: a subscription over fakes."""

import asyncio

import pytest

from broker.topics.consumer import KeySharedPolicy, SubscriptionType
from broker.topics.dispatch.errors import ConsumerBusy, SubscriptionUnavailable
from magnetar.protocol.ids import Position
from magnetar.protocol.pulsar_pb2 import BaseCommand
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED
SEGMENT = "segment://t/n/x/0000-ffff-0"


async def test_a_second_exclusive_consumer_is_refused() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, _ = await attach(subscription, EXCLUSIVE, "a")
    with pytest.raises(ConsumerBusy):
        await attach(subscription, EXCLUSIVE, "b")
    assert subscription.consumers == (first,)


async def test_a_silent_connection_loses_its_place() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, dead = await attach(subscription, EXCLUSIVE, "a")
    dead.alive = False
    second, _ = await attach(subscription, EXCLUSIVE, "a")
    assert dead.closing
    assert subscription.consumers == (second,)


async def test_a_segment_holds_the_next_exclusive_consumer_back() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    first, _ = await attach(subscription, EXCLUSIVE, "a")
    waiting = asyncio.create_task(attach(subscription, EXCLUSIVE, "b"))
    third = asyncio.create_task(attach(subscription, EXCLUSIVE, "c"))
    await settle()
    assert not waiting.done()
    first.close()
    second, _ = await waiting
    assert subscription.consumers == (second,)
    await settle()
    assert not third.done()
    second.connection.lose()  # type: ignore[attr-defined]
    await third
    assert [event[:2] for event in topic.events] == [
        ("attached", "a"),
        ("closed", "a"),
        ("attached", "b"),
        ("closed", "b"),
        ("attached", "c"),
    ]


async def test_the_wait_on_a_segment_ends() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription(handover_wait_s=0.01)
    await attach(subscription, EXCLUSIVE, "a")
    with pytest.raises(ConsumerBusy):
        await attach(subscription, EXCLUSIVE, "b")


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    first, _ = await attach(subscription, EXCLUSIVE, "a")
    waiting = asyncio.create_task(attach(subscription, EXCLUSIVE, "b"))
    await settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    first.close()
    assert subscription.consumers == ()


async def test_closing_fails_waiting_calls() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    _, peer = await attach(subscription, EXCLUSIVE, "a")
    waiting = asyncio.create_task(attach(subscription, EXCLUSIVE, "b"))
    await settle()
    await subscription.close(persist=True)
    with pytest.raises(SubscriptionUnavailable):
        await waiting
    assert len(peer.commands(BaseCommand.CLOSE_CONSUMER)) == 1
    assert subscription.cursor.persisted == 1  # type: ignore[attr-defined]
    assert topic.ledger.listeners == []


async def test_the_type_is_that_of_who_is_connected() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    shared, _ = await attach(subscription, SHARED)
    for kind in (EXCLUSIVE, FAILOVER, KEY_SHARED):
        with pytest.raises(ConsumerBusy):
            await attach(subscription, kind)
    shared.close()
    topic.ledger.put(entry_bytes(0))
    _, peer = await attach(subscription, FAILOVER, permits=10)
    await settle()
    assert subscription.type is FAILOVER
    assert peer.got() == [0]


async def test_key_shared_consumers_agree_on_the_policy() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    await attach(subscription, KEY_SHARED)
    with pytest.raises(ConsumerBusy):
        await attach(subscription, KEY_SHARED, key_shared=KeySharedPolicy(allow_out_of_order=True))


async def test_drained_and_end_of_topic_once_everything_is_acknowledged() -> None:
    topic = FakeTopic(SEGMENT)
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, SHARED, permits=10)
    await settle()
    topic.seal()
    await settle()
    assert not peer.commands(BaseCommand.REACHED_END_OF_TOPIC)
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0)])
    assert ("drained", "s") not in topic.events
    subscription.acknowledge(consumer, [(Position(1, 1), (), 0)])
    subscription.acknowledge(consumer, [(Position(1, 1), (), 0)])
    assert topic.events.count(("drained", "s")) == 1
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1
    await subscription.seek(Position(1, 0))
    again, peer = await attach(subscription, SHARED, permits=10)
    await settle()
    subscription.acknowledge(again, [(Position(1, 0), (), 0), (Position(1, 1), (), 0)])
    assert topic.events.count(("drained", "s")) == 2
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1


async def test_a_seek_that_is_not_durable_yet_counts_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = FakeTopic(SEGMENT)
    topic.ledger.put(entry_bytes(0))
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, EXCLUSIVE)
    topic.seal()
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0)])
    assert subscription.drained
    waiting = asyncio.create_task(attach(subscription, EXCLUSIVE, "b"))
    await settle()
    reset = subscription.cursor.reset

    async def not_durable(position: Position) -> None:
        await reset(position)
        raise MetadataError("The disk is full: make room.")

    monkeypatch.setattr(subscription.cursor, "reset", not_durable)
    with pytest.raises(MetadataError):
        await subscription.seek(Position(1, 0))
    assert not subscription.drained
    assert topic.events[-1] == ("rewound", "s")
    await settle()
    assert waiting.done()
    again, peer = await waiting
    again.flow(10)
    await settle()
    assert peer.got() == [0]


async def test_a_drained_subscription_is_reported_when_sealed_or_loaded() -> None:
    topic = FakeTopic(SEGMENT)
    topic.subscription()
    topic.seal()
    topic.seal()
    assert topic.events == [("drained", "s")]


async def test_consumer_of_a_drained_topic_gets_end_of_topic_after_success() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    topic.seal()
    _, peer = await attach(subscription, EXCLUSIVE)
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1


@pytest.mark.parametrize(
    ("version", "sent"),
    [
        ("Pulsar-CPP-v3.7.2-program", 0),
        ("Pulsar-CPP-v4.2.0", 0),
        ("Pulsar-CPP-v5.0.0", 1),
        ("Pulsar-Go-0.14.0", 0),
        ("Pulsar Go 0.9", 0),
        ("Pulsar-Java-v4.0.9", 1),
    ],
)
async def test_clients_that_do_not_know_the_end_of_a_topic_are_not_sent_it(
    version: str, sent: int
) -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    topic.seal()
    peer = FakeConnection()
    peer.client_version = version
    await attach(subscription, EXCLUSIVE, connection=peer)
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == sent


async def test_reader_gets_end_of_topic_after_the_last_message() -> None:
    topic = FakeTopic(SEGMENT)
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    subscription = topic.subscription(durable=False)
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=1)
    topic.seal()
    await settle()
    assert not peer.commands(BaseCommand.REACHED_END_OF_TOPIC)
    consumer.flow(5)
    await settle()
    assert peer.got() == [0, 1]
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1
    assert ("drained", "s") not in topic.events


async def test_a_reader_subscription_ends_with_its_consumer() -> None:
    topic = FakeTopic()
    subscription = topic.subscription(durable=False)
    _, peer = await attach(subscription, EXCLUSIVE)
    peer.lose()
    await settle()
    assert topic.unsubscribed == ["s"]
    with pytest.raises(SubscriptionUnavailable):
        await attach(subscription, EXCLUSIVE)


async def test_a_reader_subscription_outlives_its_seek_for_a_while() -> None:
    topic = FakeTopic()
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    subscription = topic.subscription(durable=False, reattach_s=0.2)
    await attach(subscription, EXCLUSIVE)
    await subscription.seek(Position(1, 1))
    await settle()
    _, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    assert peer.got() == [1]
    await subscription.seek(Position(1, 0))
    assert not topic.unsubscribed
    await until(lambda: topic.unsubscribed)


async def test_late_requests_of_a_closed_consumer_are_harmless() -> None:
    topic = FakeTopic()
    topic.ledger.put(entry_bytes(0))
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, SHARED, permits=1)
    await settle()
    consumer.close()
    consumer.close()
    consumer.flow(10)
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0)])
    subscription.redeliver(consumer, None, None)
    peer.lose()
    await settle()
    assert subscription.backlog == 1
    assert topic.events == [("attached", "c"), ("closed", "c", True)]


async def test_positions_past_the_end_are_not_taken() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, EXCLUSIVE, permits=1)
    subscription.acknowledge(consumer, [(Position(2**64 - 1, 5), (), 0)])
    subscription.acknowledge_up_to(consumer, Position(9, 9), ())
    topic.ledger.put(entry_bytes(0))
    assert subscription.backlog == 1


async def test_counters_survive_their_consumers() -> None:
    topic = FakeTopic()
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, SHARED, permits=10)
    await settle()
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0)])
    subscription.redeliver(consumer, None, None)
    await settle()
    consumer.close()
    size = len(topic.ledger.entries[0].data)
    assert subscription.messages_out_total == 3
    assert subscription.bytes_out_total == 3 * size
    assert (subscription.acknowledged_total, subscription.redelivered_total) == (1, 1)


@pytest.mark.parametrize("kind", [EXCLUSIVE, SHARED])
async def test_acknowledged_messages_are_counted_and_not_entries(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    topic.ledger.put(entry_bytes(0, count=100), entry_bytes(1), entry_bytes(2, count=10))
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, kind, permits=200)
    await settle()
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0)])
    assert subscription.acknowledged_total == 100
    subscription.acknowledge(consumer, [(Position(1, 0), (), 0), (Position(1, 1), (), 0)])
    assert subscription.acknowledged_total == 101
    for left, acknowledged in ((0b1111111110, 102), (0b1111111110, 102), (0b1111110010, 104)):
        subscription.acknowledge(consumer, [(Position(1, 2), (left,), 10)])
        assert subscription.acknowledged_total == acknowledged
    subscription.acknowledge(consumer, [(Position(1, 2), (), 0)])
    assert subscription.acknowledged_total == 111


async def test_messages_of_cumulative_acknowledgements_are_counted() -> None:
    topic = FakeTopic()
    topic.ledger.put(*(entry_bytes(number, count=1 + number % 3) for number in range(9)))
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, FAILOVER, permits=100)
    await settle()
    subscription.acknowledge(consumer, [(Position(1, 1), (), 0)])
    assert subscription.acknowledged_total == 2
    subscription.acknowledge_up_to(consumer, Position(1, 3), ())
    assert subscription.acknowledged_total == 1 + 2 + 3 + 1
    subscription.acknowledge_up_to(consumer, Position(1, 5), (0b110,))
    assert subscription.acknowledged_total == 7 + 2 + 1
    subscription.acknowledge_up_to(consumer, Position(1, 5), ())
    subscription.acknowledge_up_to(consumer, Position(1, 8), ())
    subscription.acknowledge_up_to(consumer, Position(1, 8), ())
    assert subscription.acknowledged_total == 18


async def test_sizes_of_delivered_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "DELIVERED_BATCHES", 2)
    topic = FakeTopic()
    topic.ledger.put(*(entry_bytes(number, count=10) for number in range(4)))
    subscription = topic.subscription()
    consumer, _ = await attach(subscription, FAILOVER, permits=100)
    await settle()
    subscription.acknowledge_up_to(consumer, Position(1, 3), ())
    assert subscription.acknowledged_total == 1 + 1 + 10 + 10


async def test_two_consumers_of_one_connection() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    peer = FakeConnection()
    await attach(subscription, SHARED, "a", connection=peer, consumer_id=1, permits=30)
    await attach(subscription, SHARED, "b", connection=peer, consumer_id=2, permits=30)
    topic.ledger.put(*(entry_bytes(index) for index in range(40)))
    await settle()
    ids = {command.message.consumer_id for command in peer.commands(BaseCommand.MESSAGE)}
    assert ids == {1, 2}
    peer.lose()
    assert subscription.consumers == ()
