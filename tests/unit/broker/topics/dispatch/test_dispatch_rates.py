"""Dispatch rates of subscriptions, topics and the broker, in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from broker.policies.message_rate import MessageRate
from broker.topics.consumer import Consumer, SubscriptionType
from broker.topics.subscription import Subscription
from broker.topics.throttle import Level, RateLimit
from magnetar.protocol.ids import Position
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle
from tests.unit.txn.virtual_time import now_s, run

KINDS = list(SubscriptionType)
EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED


def fill(topic: FakeTopic, entries: int, count: int = 1) -> None:
    topic.ledger.put(*(entry_bytes(index, count=count) for index in range(entries)))


def set_rate(topic: FakeTopic, rate: MessageRate | None) -> None:
    topic.policies = replace(topic.policies, subscription_dispatch_rate=rate)


async def consuming(
    rate: MessageRate,
    entries: int,
    kind: SubscriptionType,
    *,
    count: int = 1,
    permits: int = 1000,
) -> tuple[FakeTopic, Subscription, Consumer, FakeConnection]:
    """A subscription at a rate, whose consumer has got what it gets at once."""
    topic = FakeTopic()
    set_rate(topic, rate)
    subscription = topic.subscription()
    fill(topic, entries, count=count)
    consumer, connection = await attach(subscription, kind, permits=permits)
    await settle()
    return topic, subscription, consumer, connection


async def until_got(connection: FakeConnection, entries: int) -> None:
    while len(connection.got()) < entries:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_a_subscription_gets_messages_at_its_rate_and_all_at_once_without_it(
    kind: SubscriptionType,
) -> None:
    async def scenario() -> None:
        topic, subscription, _, connection = await consuming(MessageRate(10, 0), 100, kind)
        assert connection.got() == list(range(10))
        await until_got(connection, 30)
        assert now_s() == pytest.approx(2.0, abs=0.1)
        assert subscription.throttled[Level.SUBSCRIPTION, False] >= 20
        set_rate(topic, None)
        subscription.apply_policies()
        before_s = now_s()
        await settle()
        assert connection.got() == list(range(100))
        assert now_s() == before_s

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_in_bytes_lets_the_entry_through_that_exceeds_it(kind: SubscriptionType) -> None:
    async def scenario() -> None:
        topic = FakeTopic()
        size = len(entry_bytes(0))
        set_rate(topic, MessageRate(0, size // 2, period_s=2))
        subscription = topic.subscription()
        fill(topic, 3)
        _, connection = await attach(subscription, kind, permits=1000)
        await settle()
        assert connection.got() == [0]
        await until_got(connection, 2)
        assert now_s() == pytest.approx(2.0, abs=0.3)
        assert subscription.throttled[Level.SUBSCRIPTION, True] >= 1

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
def test_batches_count_by_their_messages(kind: SubscriptionType) -> None:
    async def scenario() -> None:
        _, _, _, connection = await consuming(MessageRate(10, 0), 4, kind, count=5)
        assert connection.got() == [0, 1]
        await until_got(connection, 3)
        assert now_s() == pytest.approx(0.1, abs=0.01)
        await until_got(connection, 4)
        assert now_s() == pytest.approx(0.6, abs=0.01)

    run(scenario())


def test_subscriptions_share_the_rate_of_their_topic_and_of_the_broker() -> None:
    async def scenario() -> None:
        topic = FakeTopic()
        topic.dispatch_limits = (
            RateLimit(MessageRate(10, 0), Level.TOPIC),
            RateLimit(MessageRate(1000, 0), Level.BROKER),
        )
        subscriptions = [topic.subscription(name) for name in "abc"]
        fill(topic, 100)
        got = [(await attach(each, EXCLUSIVE, permits=1000))[1] for each in subscriptions]
        await asyncio.sleep(9.05)
        counts = [len(each.got()) for each in got]
        assert sum(counts) == 100
        # The tokens that were there at once went to the first; from then on they take turns.
        assert max(counts[1:]) - min(counts[1:]) <= 1
        assert min(counts) >= 29
        assert all(each.throttled[Level.TOPIC, False] for each in subscriptions)
        assert not any(each.throttled[Level.BROKER, False] for each in subscriptions)

    run(scenario())


def test_those_that_wait_at_two_rates_get_on_when_both_have_tokens_at_the_same_time() -> None:
    async def scenario() -> None:
        of_topic = RateLimit(MessageRate(10, 0), Level.TOPIC)
        of_broker = RateLimit(MessageRate(1000, 0), Level.BROKER)
        topic = FakeTopic()
        topic.dispatch_limits = of_topic, of_broker
        fill(topic, 10)
        peers: list[FakeConnection] = []
        for taken, limit in ((2099, of_broker), (20, of_topic)):
            # Of either rate there is a token after 1.1 s.
            limit.take(taken, 0)
            for _ in range(5):
                subscription = topic.subscription(f"s{len(peers)}")
                peers.append((await attach(subscription, EXCLUSIVE, permits=1000))[1])
            await settle()
        assert not any(peer.got() for peer in peers)
        await asyncio.sleep(1.1)
        await settle(200)
        assert sum(len(peer.got()) for peer in peers) == 1
        await asyncio.sleep(9)
        assert [len(peer.got()) for peer in peers] == [pytest.approx(9, abs=1)] * 10

    run(scenario())


@pytest.mark.parametrize("kind", [SHARED, SubscriptionType.KEY_SHARED])
def test_redelivered_messages_count_too(kind: SubscriptionType) -> None:
    async def scenario() -> None:
        _, subscription, consumer, connection = await consuming(MessageRate(2, 0), 2, kind)
        subscription.redeliver(consumer, None, None)
        await settle()
        assert connection.got() == [0, 1]
        await until_got(connection, 4)
        assert now_s() == pytest.approx(1.0, abs=0.1)

    run(scenario())


def test_a_relative_rate_follows_the_rate_of_publishing() -> None:
    async def scenario() -> None:
        topic = FakeTopic()
        set_rate(topic, MessageRate(10, 0, is_relative=True))
        topic.published_per_s = (40.0, 0.0)
        subscription = topic.subscription()
        fill(topic, 1000)
        _, connection = await attach(subscription, EXCLUSIVE, permits=1000)
        await settle()
        first = len(connection.got())
        await asyncio.sleep(1.01)
        assert len(connection.got()) - first == pytest.approx(50, abs=2)
        topic.published_per_s = (90.0, 0.0)
        await asyncio.sleep(1.01)
        before = len(connection.got())
        await asyncio.sleep(1)
        assert len(connection.got()) - before == pytest.approx(100, abs=2)

    run(scenario())


def test_other_policies_and_new_consumers_give_no_tokens() -> None:
    async def scenario() -> None:
        topic, subscription, consumer, connection = await consuming(
            MessageRate(5, 0), 100, EXCLUSIVE
        )
        topic.policies = replace(topic.policies, max_unacked_per_consumer=7)
        subscription.apply_policies()
        await settle()
        assert len(connection.got()) == 5
        subscription.remove_consumer(consumer, by_command=True)
        _, again = await attach(subscription, EXCLUSIVE, permits=1000)
        await settle()
        assert again.got() == []
        await until_got(again, 1)

    run(scenario())


def test_nothing_runs_while_tokens_are_there_or_nobody_consumes() -> None:
    async def scenario() -> None:
        topic, subscription, consumer, _ = await consuming(MessageRate(50, 0), 20, EXCLUSIVE)
        assert not subscription.throttled
        fill(topic, 100)
        await settle()
        assert subscription.throttled
        subscription.remove_consumer(consumer, by_command=True)
        await asyncio.get_running_loop().create_future()

    # The loop of virtual time fails if everybody waits and there is no timer: as is wanted here.
    with pytest.raises(RuntimeError, match="no timer is set"):
        run(scenario())


def test_a_consumer_without_permits_gets_nothing_and_keeps_the_tokens() -> None:
    async def scenario() -> None:
        _, _, consumer, connection = await consuming(MessageRate(5, 0), 100, EXCLUSIVE, permits=2)
        assert connection.got() == [0, 1]
        consumer.flow(10)
        await settle()
        assert connection.got() == [0, 1, 2, 3, 4]

    run(scenario())


def acknowledge(consumer: Consumer, *entries: int) -> None:
    consumer.subscription.acknowledge(consumer, [(Position(1, each), (), 0) for each in entries])


def test_acknowledged_entries_are_passed_over_without_tokens() -> None:
    async def scenario() -> None:
        topic = FakeTopic()
        subscription = topic.subscription()
        fill(topic, 6)
        consumer, _ = await attach(subscription, SHARED, permits=6)
        await settle()
        acknowledge(consumer, 1, 2, 3, 4)
        set_rate(topic, MessageRate(2, 0))
        subscription.apply_policies()
        subscription.remove_consumer(consumer, by_command=True)
        _, again = await attach(subscription, SHARED, permits=10)
        await settle()
        assert again.got() == [0, 5]

    run(scenario())
