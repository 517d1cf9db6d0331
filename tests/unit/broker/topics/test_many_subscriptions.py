"""A topic with many subscriptions holds the event loop for some of them in a turn."""

import asyncio
from collections import Counter

import pytest

from broker.topics.non_persistent.subscription import NonPersistentSubscription
from broker.topics.rate_timer import RateTimer
from broker.topics.subscription import Subscription
from broker.topics.topic_stats import topic_stats
from magnetar.protocol.ids import EARLIEST
from tests.support.bounds import set_bound
from tests.support.waiting import count_turns, until
from tests.unit.broker.topics.test_topics import name_of
from tests.unit.broker.topics.test_transactional_acks import TOPIC, Stage, stage

__all__ = ["stage"]
MANY = 40


async def subscribe_often(stage: Stage, count: int) -> list[str]:
    topic = await stage.topic()
    names = [f"s{number}" for number in range(count)]
    for name in names:
        await topic.create_subscription(name, EARLIEST)
    return names


async def woken_by_a_commit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> list[int]:
    """The turns of the loop in which the end of a transaction wakes subscriptions."""
    txn = await stage.begin()
    await stage.send(txn, b"x")
    woken: list[tuple[int, str]] = []
    turn = count_turns()
    monkeypatch.setattr(Subscription, "wake", lambda self: woken.append((turn(), self.name)))
    await stage.commit(txn)
    await until(lambda: {name for _, name in woken} == set(names))
    return [turn for turn, _ in woken]


async def test_end_of_a_transaction_wakes_subscriptions_in_slices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "LISTENERS_CALLED_AT_ONCE", 2)
    names = await subscribe_often(stage, MANY)
    turns = await woken_by_a_commit(stage, monkeypatch, names)
    assert max(Counter(turns).values()) == 2


async def test_end_of_a_transaction_wakes_few_subscriptions_in_one_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = await subscribe_often(stage, 3)
    turns = await woken_by_a_commit(stage, monkeypatch, names)
    assert len(set(turns)) == 1


async def test_counters_of_subscriptions_are_sampled_in_slices_and_added_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RATE_SAMPLE_TOPICS", 2)
    await subscribe_often(stage, MANY)
    topic = await stage.topic()
    turn, turns, original = count_turns(), list[int](), Subscription.sample_rates

    def sample(subscription: Subscription, now_s: float) -> tuple[int, int, int, int, int]:
        turns.append(turn())
        original(subscription, now_s)
        return 3, 20, 0, 0, 0

    monkeypatch.setattr(Subscription, "sample_rates", sample)
    sampled: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        topic.rate_sampler.__class__, "sample", lambda self, now_s, counts: sampled.append(counts)
    )
    await RateTimer(lambda: [topic], asyncio.get_running_loop().time).sample()
    assert len(turns) == MANY
    assert max(Counter(turns).values()) == 2
    assert sampled[-1][2:] == (3 * MANY, 20 * MANY)


@pytest.mark.parametrize("measured", ["size_bytes", "oldest"])
async def test_backlogs_of_subscriptions_are_measured_in_slices(
    stage: Stage, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "BACKLOGS_READ_AT_ONCE", 2)
    await subscribe_often(stage, MANY)
    topic = await stage.topic()
    turn, turns = count_turns(), list[int]()

    def backlog(subscription: Subscription) -> int:
        turns.append(turn())
        return 3

    monkeypatch.setattr(Subscription, "backlog", property(backlog))
    assert await getattr(topic.backlog, measured)()
    assert len(turns) == MANY
    assert max(Counter(turns).values()) == 2


async def test_consumer_of_a_non_persistent_topic_is_admitted_without_asking_all_subscriptions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "non-persistent://public/default/many"
    consumers = [await stage.client.subscribe(name, f"s{number}") for number in range(5)]
    topic = stage.broker.topics.non_persistent.loaded()[name]
    asked: set[str] = set()
    original = vars(NonPersistentSubscription)["consumers"]

    def note(subscription: NonPersistentSubscription) -> object:
        asked.add(subscription.name)
        return original.__get__(subscription)

    monkeypatch.setattr(NonPersistentSubscription, "consumers", property(note))
    await stage.client.subscribe(name, "last")
    assert asked == {"last"}
    assert topic.consumer_count == 6
    await consumers[0].close()
    await consumers[1].unsubscribe()
    assert topic.consumer_count == 4


async def test_subscriptions_of_a_deleted_topic_are_closed_in_slices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CURSORS_AT_ONCE", 2)
    await subscribe_often(stage, MANY)
    turn, turns, original = count_turns(), list[int](), Subscription.close

    async def close(subscription: Subscription, *, persist: bool) -> None:
        turns.append(turn())
        await original(subscription, persist=persist)

    monkeypatch.setattr(Subscription, "close", close)
    await stage.broker.topics.delete(name_of(TOPIC), force=True)
    assert len(turns) == MANY
    assert max(Counter(turns).values()) == 2


async def test_subscriptions_of_a_topic_are_made_in_slices_when_it_is_loaded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CURSORS_AT_ONCE", 2)
    names = await subscribe_often(stage, MANY)
    await stage.reload()
    turn, turns, original = count_turns(), list[int](), Subscription.__init__

    def make(subscription: Subscription, *given: object, **named: float) -> None:
        turns.append(turn())
        original(subscription, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Subscription, "__init__", make)
    topic = await stage.topic()
    assert set(topic.subscriptions) == set(names)
    assert len(turns) == MANY
    assert max(Counter(turns).values()) <= 2


@pytest.mark.parametrize("called", ["apply_policies", "topic_sealed"])
async def test_all_subscriptions_of_a_topic_follow_its_changes_in_slices(
    stage: Stage, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "LISTENERS_CALLED_AT_ONCE", 2)
    turn, turns, original = count_turns(), list[int](), getattr(Subscription, called)

    def call(subscription: Subscription) -> None:
        turns.append(turn())
        original(subscription)

    monkeypatch.setattr(Subscription, called, call)
    await stage.reload()
    topic = await stage.topic()
    await subscribe_often(stage, MANY)
    if called == "apply_policies":
        topic.apply_policies(topic.policies)
    else:
        await topic.seal()
    await until(lambda: len(turns) >= MANY)
    assert max(Counter(turns).values()) == 2


async def test_statistics_add_up_the_messages_of_subscriptions_as_they_are_shown(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SUBSCRIPTIONS_SHOWN_AT_ONCE", 2)
    await subscribe_often(stage, MANY)
    topic = await stage.topic()
    turn, turns = count_turns(), list[int]()

    def sent(subscription: Subscription) -> int:
        turns.append(turn())
        return 3

    monkeypatch.setattr(Subscription, "messages_out_total", property(sent))
    stats = await topic_stats(topic, "owner")
    assert stats["msgOutCounter"] == 3 * MANY
    assert max(Counter(turns).values()) == 2


async def test_rate_of_publishing_is_taken_without_asking_subscriptions(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe_often(stage, 3)
    topic = await stage.topic()
    producer = await stage.client.create_producer(TOPIC)
    await producer.send(b"x")
    monkeypatch.delattr(Subscription, "traffic")
    messages, size_bytes = topic.published_rates(asyncio.get_running_loop().time())
    assert messages > 0
    assert size_bytes > 0
