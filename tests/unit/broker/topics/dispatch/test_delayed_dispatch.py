"""Entries with a delivery time, over fakes: kept back, then sent once, whatever else happens."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from broker.policies.applied_policies import broker_policies
from broker.topics.consumer import Consumer, KeySharedMode, KeySharedPolicy, SubscriptionType
from broker.topics.dispatch.delay_timer import DelayTimer
from broker.topics.dispatch.delayed_messages import DelayedMessages
from config.bounds import DELAYED_LOOK_S
from config.settings import load_settings
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.key_hash import sticky_hash
from magnetar.protocol.pulsar_pb2 import BaseCommand
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED
BOTH = pytest.mark.parametrize("kind", [SHARED, KEY_SHARED], ids=["Shared", "Key_Shared"])
NOW_MS = 10_000
"""The clock of `FakeTopic` when it is made."""


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def put(topic: FakeTopic, *due_ms: int | None, count: int = 1) -> None:
    """One entry for each delivery time; None: without one."""
    start = len(topic.ledger.entries)
    topic.ledger.put(
        *(
            entry_bytes(start + index, f"k{(start + index) % 3}", count)
            if due is None
            else entry_bytes(start + index, f"k{(start + index) % 3}", count, deliver_at_time=due)
            for index, due in enumerate(due_ms)
        )
    )


class TimedConnection(FakeConnection):
    """Knows when it was given each message."""

    def __init__(self, topic: FakeTopic) -> None:
        super().__init__()
        self.topic = topic
        self.sent_ms: list[int] = []

    def send_encoded(self, *buffers: bytes) -> None:
        super().send_encoded(*buffers)
        missing = len(self.got()) - len(self.sent_ms)
        self.sent_ms += [self.topic.context.clock.now_ms()] * missing


async def pass_to(topic: FakeTopic, now_ms: int) -> None:
    """Let it be that time, and everybody have noticed."""
    topic.now_ms = now_ms
    for subscription in topic.subscriptions.values():
        subscription.wake()
    await settle()


def ack(consumer: Consumer, *entry_ids: int) -> None:
    consumer.subscription.acknowledge(consumer, [(at(entry_id), (), 0) for entry_id in entry_ids])


@BOTH
async def test_an_entry_waits_for_its_time_and_others_overtake_it(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 300, None, NOW_MS + 200, NOW_MS, NOW_MS - 1, -5)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=10)
    await settle()
    assert peer.got() == [1, 3, 4, 5]
    assert (consumer.permits, consumer.unacked) == (6, 4)
    assert (subscription.delayed, subscription.backlog) == (2, 6)
    put(topic, None)
    await pass_to(topic, NOW_MS + 199)
    assert peer.got()[4:] == [6]
    await pass_to(topic, NOW_MS + 200)
    assert peer.got()[5:] == [2]
    await pass_to(topic, NOW_MS + 301)
    assert peer.got()[6:] == [0]
    assert {c.message.redelivery_count for c in peer.commands(BaseCommand.MESSAGE)} == {0}
    assert (subscription.delayed, consumer.permits, consumer.unacked) == (0, 3, 7)
    ack(consumer, *range(7))
    await pass_to(topic, NOW_MS + 10_000)
    assert (len(peer.got()), subscription.backlog) == (7, 0)


@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
async def test_in_order_consumers_get_it_at_once(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 300, None)
    subscription = topic.subscription()
    _, peer = await attach(subscription, kind, permits=10)
    await settle()
    assert (peer.got(), subscription.delayed) == ([0, 1], 0)


@BOTH
async def test_delayed_message_is_sent_at_once_when_delay_is_disabled(
    kind: SubscriptionType,
) -> None:
    topic = FakeTopic()
    topic.policies = broker_policies(load_settings(None, {"delayed_delivery_enabled": False}))
    put(topic, NOW_MS + 300)
    _, peer = await attach(topic.subscription(), kind, permits=10)
    await settle()
    assert peer.got() == [0]


async def test_all_are_sent_when_delay_is_disabled_though_others_wait_at_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "KEY_SHARED_LOOK_AHEAD_ENTRIES", 2)
    topic = FakeTopic()
    subscription = topic.subscription()
    low, high = (
        KeySharedPolicy(KeySharedMode.STICKY, ranges=(each,))
        for each in ((0, 30000), (30001, 65535))
    )
    await attach(subscription, KEY_SHARED, "without permits", key_shared=low)
    _, peer = await attach(subscription, KEY_SHARED, "b", permits=10, key_shared=high)
    of_low, of_high = (
        next(key for key in "abcdefgh" if (sticky_hash(key.encode()) <= 30000) is is_low)
        for is_low in (True, False)
    )
    later = NOW_MS + 10_000_000
    topic.ledger.put(*(entry_bytes(each, of_high, deliver_at_time=later) for each in range(3)))
    topic.ledger.put(entry_bytes(3, of_low))
    await settle()
    assert (peer.got(), subscription.delayed, subscription.in_replay) == ([], 3, 1)
    topic.policies = replace(topic.policies, delays_delivery=False)
    subscription.apply_policies()
    await until(lambda: peer.got() == [0, 1, 2], DELAYED_LOOK_S / 2)


@BOTH
@pytest.mark.parametrize("cached_from", [0, 1000], ids=["cached", "from disk"])
async def test_the_timer_brings_each_at_its_time(kind: SubscriptionType, cached_from: int) -> None:
    loop = asyncio.get_running_loop()
    topic = FakeTopic()
    topic.ledger.cached_from = cached_from
    start_s = loop.time()
    topic.context.clock.now_ms = lambda: NOW_MS + int((loop.time() - start_s) * 1000)
    topic.policies = broker_policies(load_settings(None, {"delayed_delivery_tick_time_ms": 5}))
    due = [NOW_MS + (7 * index) % 100 for index in range(100)]
    put(topic, *due)
    peer = TimedConnection(topic)
    await attach(topic.subscription(), kind, permits=100, connection=peer)
    await until(lambda: len(peer.got()) == 100)
    assert sorted(peer.got()) == list(range(100))
    early = zip(peer.got(), peer.sent_ms, strict=True)
    assert [each for each, sent_ms in early if sent_ms < due[each]] == []


async def test_timer_fires_once_per_tick_and_not_after_it_is_stopped() -> None:
    loop = asyncio.get_running_loop()
    rings: list[float] = []
    timer: DelayTimer

    def ring() -> None:
        rings.append(loop.time())
        timer.aim(0)

    began_s = loop.time()
    timer = DelayTimer(lambda: 1, 20, ring)
    timer.aim(10_000)
    timer.aim(0)
    await until(lambda: len(rings) == 4)
    # Not each pause: a ring may come late, and the next one in its own time.
    assert rings[-1] - began_s > 3 * 0.019
    timer.aim(None)
    await asyncio.sleep(0.05)
    assert len(rings) == 4


async def test_a_clock_that_is_put_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "DELAYED_LOOK_S", 0.02)
    topic = FakeTopic()
    put(topic, NOW_MS + 3_600_000)
    _, peer = await attach(topic.subscription(), SHARED, permits=10)
    await settle()
    topic.now_ms += 3_600_000
    await until(lambda: peer.got() == [0])


@BOTH
async def test_consumers_come_and_go_while_it_waits(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 100, NOW_MS + 200)
    subscription = topic.subscription()
    _, first = await attach(subscription, kind, "a", permits=10)
    await settle()
    second_consumer, second = await attach(subscription, kind, "b", permits=10)
    first.lose()
    await pass_to(topic, NOW_MS + 100)
    assert (first.got(), second.got()) == ([], [0])
    second_consumer.close()
    assert subscription.delayed == 0
    _, third = await attach(subscription, kind, "c", permits=10)
    await settle()
    assert (third.got(), subscription.delayed) == ([0], 1)
    await pass_to(topic, NOW_MS + 200)
    assert third.got() == [0, 1]


@BOTH
async def test_at_the_bound_nothing_more_is_read_until_one_is_due_or_acknowledged(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = partial(DelayedMessages, 3)
    monkeypatch.setattr("broker.topics.dispatch.pending.DelayedMessages", bounded)
    topic = FakeTopic()
    put(topic, None, NOW_MS + 900, NOW_MS + 100, NOW_MS + 900, None, NOW_MS + 900, None)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=100)
    await settle()
    assert (peer.got(), subscription.delayed) == ([0], 3)
    put(topic, None)
    await settle()
    assert peer.got() == [0]
    await pass_to(topic, NOW_MS + 100)
    assert (peer.got()[1:], subscription.delayed) == ([2, 4], 3)
    ack(consumer, 3)
    await settle()
    assert (peer.got()[3:], subscription.delayed) == ([6, 7], 2)
    await pass_to(topic, NOW_MS + 900)
    assert peer.got()[5:] == [1, 5]


@BOTH
async def test_due_messages_are_sent_as_permits_allow(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, *(NOW_MS + 100 + index % 7 for index in range(1000)))
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=1)
    await settle()
    assert subscription.delayed == 1000
    await pass_to(topic, NOW_MS + 500)
    assert len(peer.got()) == 1
    for _ in range(50):
        consumer.flow(25)
        await settle()
    assert sorted(peer.got()) == list(range(1000))
    assert (subscription.delayed, consumer.unacked) == (0, 1000)


@BOTH
async def test_of_what_is_far_apart_on_disk_no_more_is_read(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, *(NOW_MS + (100 if number % 100 == 7 else 900) for number in range(1000)))
    topic.ledger.cached_from = 1000
    subscription = topic.subscription()
    _, peer = await attach(subscription, kind, permits=2000)
    await settle(60)
    assert (subscription.delayed, topic.ledger.entries_read) == (1000, 1000)
    topic.now_ms = NOW_MS + 100
    subscription.wake()
    await settle(60)
    assert peer.got() == list(range(7, 1000, 100))
    assert topic.ledger.entries_read == 1010
    topic.now_ms = NOW_MS + 900
    subscription.wake()
    await settle(200)
    assert len(peer.got()) == 1000
    assert topic.ledger.reads < 5 + 10 + 30


@BOTH
async def test_acknowledged_delayed_message_is_never_sent(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 100, NOW_MS + 100, NOW_MS + 100)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=10)
    await settle()
    ack(consumer, 1)
    assert subscription.delayed == 2
    subscription.skip(at(2))
    await pass_to(topic, NOW_MS + 100)
    assert (peer.got(), subscription.delayed, subscription.backlog) == ([0], 0, 1)


@BOTH
async def test_redeliveries_count_from_the_first_delivery(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 100)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=10)
    await settle()
    subscription.redeliver(consumer, dict.fromkeys([at(0)], -1), None)
    subscription.redeliver(consumer, None, None)
    await settle()
    assert peer.got() == []
    await pass_to(topic, NOW_MS + 100)
    subscription.redeliver(consumer, dict.fromkeys([at(0)], -1), None)
    await settle()
    counts = [each.message.redelivery_count for each in peer.commands(BaseCommand.MESSAGE)]
    assert counts == [0, 1]


@BOTH
async def test_trimmed_delayed_message_is_dropped(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 100, NOW_MS + 100)
    subscription = topic.subscription()
    _, peer = await attach(subscription, kind, permits=10)
    await settle()
    gone = topic.ledger.entries[0]
    topic.ledger.entries_from = (  # type: ignore[method-assign]
        lambda start, count: [
            e for e in topic.ledger.entries if e.position >= start and e is not gone
        ][:count]
    )
    await pass_to(topic, NOW_MS + 100)
    assert (peer.got(), subscription.backlog) == ([1], 1)


@BOTH
async def test_a_transaction_decides_first(kind: SubscriptionType) -> None:
    """Undecided over its time it comes with the commit; aborted it never comes."""
    topic = FakeTopic()
    for _ in range(3):
        entry = entry_bytes(0, "k", txnid_least_bits=1, deliver_at_time=NOW_MS + 100)
        topic.ledger.put(entry)
    topic.horizon = EARLIEST
    topic.aborted = {at(0)}
    subscription = topic.subscription()
    _, peer = await attach(subscription, kind, permits=10)
    topic.horizon = at(1)
    await pass_to(topic, NOW_MS + 50)
    assert (peer.got(), subscription.delayed) == ([], 1)
    assert subscription.cursor.is_acknowledged(at(0))
    await pass_to(topic, NOW_MS + 100)
    assert peer.got() == [1]
    topic.horizon = at(2)
    await pass_to(topic, NOW_MS + 200)
    assert peer.got() == [1, 2]


@BOTH
async def test_a_sealed_topic_is_drained_when_it_is_acknowledged(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, None, NOW_MS + 100)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=10)
    await settle()
    topic.seal()
    ack(consumer, 0)
    await settle()
    assert peer.commands(BaseCommand.REACHED_END_OF_TOPIC) == []
    assert not subscription.at_end
    await pass_to(topic, NOW_MS + 100)
    assert peer.got() == [0, 1]
    assert not subscription.drained
    ack(consumer, 1)
    await settle()
    assert subscription.drained
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1


async def test_a_reader_that_shares_is_not_at_the_end_before_its_time() -> None:
    topic = FakeTopic()
    put(topic, None, NOW_MS + 100)
    subscription = topic.subscription(durable=False)
    _, peer = await attach(subscription, SHARED, permits=10)
    topic.seal()
    await settle()
    assert not subscription.at_end
    await pass_to(topic, NOW_MS + 100)
    assert subscription.at_end
    assert len(peer.commands(BaseCommand.REACHED_END_OF_TOPIC)) == 1


@BOTH
async def test_a_seek_forgets_what_waits_and_keeps_it_back_anew(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    put(topic, NOW_MS + 100, NOW_MS + 100)
    subscription = topic.subscription()
    await attach(subscription, kind, permits=10)
    await settle()
    dispatcher = subscription.dispatcher
    assert dispatcher is not None
    await subscription.seek(at(1))
    assert subscription.delayed == 0
    _, peer = await attach(subscription, kind, permits=10)
    await settle()
    assert (peer.got(), subscription.delayed) == ([], 1)
    await pass_to(topic, NOW_MS + 100)
    assert peer.got() == [1]


@BOTH
async def test_a_transaction_that_holds_it_and_lets_go(kind: SubscriptionType) -> None:
    """What it held comes at its time or, when that is over, at once; once, and not counted."""
    topic = FakeTopic()
    put(topic, NOW_MS + 100, NOW_MS + 100, NOW_MS + 100, count=2)
    subscription = topic.subscription()
    _, peer = await attach(subscription, kind, permits=100)
    await settle()
    dispatcher = subscription.dispatcher
    assert dispatcher is not None
    held: set[Position] = set()
    subscription.messages_held = SimpleNamespace(  # type: ignore[assignment]
        any=True,
        cumulative_transactions=(),
        is_pending=held.__contains__,
        remaining=lambda position, words, size: words,
    )
    held |= {at(0), at(1)}
    dispatcher.held(at(0), -1)
    dispatcher.held(at(1), -1)
    dispatcher.held(at(2), 0b01)
    assert subscription.delayed == 1
    held -= {at(0)}
    dispatcher.released([at(0)], again=False)
    dispatcher.released([at(2)], again=True)
    await settle()
    assert (peer.got(), subscription.delayed) == ([], 2)
    await pass_to(topic, NOW_MS + 100)
    assert sorted(peer.got()) == [0, 2]
    held.clear()
    dispatcher.released([at(1)], again=False)
    await settle()
    assert sorted(peer.got()) == [0, 1, 2]
    assert {c.message.redelivery_count for c in peer.commands(BaseCommand.MESSAGE)} == {0}
