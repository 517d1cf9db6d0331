"""Shared and Key_Shared over fakes: turns, pending acknowledgements, redelivery, order of keys."""

import asyncio
from dataclasses import replace

import pytest

from broker.topics.consumer import Consumer, KeySharedMode, KeySharedPolicy, SubscriptionType
from broker.topics.dispatch.entry_reader import GONE, EntryReader
from broker.topics.dispatch.errors import ConsumerAssignError, ConsumerNotAllowed
from broker.topics.dispatch.key_shared import KeySharedDispatcher
from broker.topics.dispatch.pending import PendingDispatcher
from broker.topics.subscription import Subscription
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import sticky_hash
from magnetar.protocol.pulsar_pb2 import BaseCommand
from tests.support.bounds import set_bound
from tests.support.waiting import count_turns, until
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def fill(topic: FakeTopic, entries: int, count: int = 1) -> None:
    topic.ledger.put(*(entry_bytes(index, count=count) for index in range(entries)))


def ack(consumer: Consumer, *entry_ids: int) -> None:
    consumer.subscription.acknowledge(consumer, [(at(entry_id), (), 0) for entry_id in entry_ids])


def unacked(consumer: Consumer) -> tuple[int, int]:
    assert isinstance(consumer.subscription, Subscription)
    dispatcher = consumer.subscription.dispatcher
    assert isinstance(dispatcher, PendingDispatcher)
    return consumer.unacked, dispatcher.unacked


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_nothing_is_kept_of_a_batch_that_is_gone_when_a_part_comes_again(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    fill(topic, 1, count=3)
    consumer, _ = await attach(subscription, kind, permits=10)
    await settle()
    assert unacked(consumer) == (3, 3)
    monkeypatch.setattr(EntryReader, "at", lambda *_: GONE)
    subscription.redeliver(consumer, {at(0): 0b001}, None)
    await settle()
    assert subscription.backlog == 0
    assert (unacked(consumer), consumer.pending) == ((0, 0), {})
    dispatcher = subscription.dispatcher
    assert isinstance(dispatcher, PendingDispatcher)
    assert not dispatcher._parted


async def test_consumers_take_turns_and_keep_to_permits() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, one = await attach(subscription, SHARED, "a", permits=25)
    _, two = await attach(subscription, SHARED, "b", permits=100)
    fill(topic, 100)
    await settle()
    assert sorted(one.got() + two.got()) == list(range(100))
    assert len(one.got()) == 25
    assert len(two.got()) == 75
    assert not any(c.message.HasField("consumer_epoch") for c in one.commands(BaseCommand.MESSAGE))


@pytest.mark.parametrize("cached_from", [0, 100])
async def test_single_messages_take_turns_too(cached_from: int) -> None:
    topic = FakeTopic()
    topic.ledger.cached_from = cached_from
    subscription = topic.subscription()
    _, one = await attach(subscription, SHARED, "a", permits=100)
    _, two = await attach(subscription, SHARED, "b", permits=100)
    await settle()
    for index in range(10):
        topic.ledger.put(entry_bytes(index))
        await settle()
    assert one.got() == [0, 2, 4, 6, 8]
    assert two.got() == [1, 3, 5, 7, 9]


async def test_priority_levels_come_first() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, low = await attach(subscription, SHARED, "a", permits=100, priority_level=1)
    _, high = await attach(subscription, SHARED, "b", permits=10)
    fill(topic, 15)
    await settle()
    assert (len(high.got()), len(low.got())) == (10, 5)


async def test_a_slow_socket_does_not_hold_up_the_other() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, slow = await attach(subscription, SHARED, "a", permits=1000)
    _, fast = await attach(subscription, SHARED, "b", permits=1000)
    await settle()
    slow.writable = False
    fill(topic, 50)
    await settle()
    assert slow.got() == []
    assert fast.got() == list(range(50))
    slow.writable = True
    topic.ledger.put(*(entry_bytes(index) for index in range(50)))
    await settle()
    assert len(slow.got()) > 0


async def test_negative_acknowledgements_come_back_with_a_count() -> None:
    topic = FakeTopic()
    fill(topic, 3)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, SHARED, permits=100)
    await settle()
    subscription.redeliver(consumer, dict.fromkeys([at(2), at(1), at(7)], -1), None)
    await settle()
    assert peer.got() == [0, 1, 2, 1, 2]
    counts = [each.message.redelivery_count for each in peer.commands(BaseCommand.MESSAGE)]
    assert counts == [0, 0, 0, 1, 1]
    assert unacked(consumer) == (3, 3)
    subscription.redeliver(consumer, None, None)
    await settle()
    assert peer.got()[5:] == [0, 1, 2]
    assert [c.message.redelivery_count for c in peer.commands(BaseCommand.MESSAGE)][5:] == [1, 2, 2]
    ack(consumer, 0, 1, 2)
    assert unacked(consumer) == (0, 0)
    assert subscription.backlog == 0


async def test_messages_of_a_lost_consumer_are_redelivered_with_count_zero() -> None:
    topic = FakeTopic()
    fill(topic, 10)
    subscription = topic.subscription()
    gone, gone_peer = await attach(subscription, SHARED, "a", permits=10)
    await settle()
    ack(gone, 0, 5)
    stays, peer = await attach(subscription, SHARED, "b", permits=100)
    gone_peer.lose()
    await settle()
    assert peer.got() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert {c.message.redelivery_count for c in peer.commands(BaseCommand.MESSAGE)} == {0}
    assert unacked(stays) == (8, 8)
    assert topic.events[-1] == ("closed", "a", False)


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_all_messages_of_a_consumer_come_back_in_slices(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RETURNED_AT_ONCE", 2)
    topic = FakeTopic()
    fill(topic, 7)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=100)
    await settle()
    subscription.redeliver(consumer, None, None)
    subscription.redeliver(consumer, None, None)
    assert unacked(consumer) == (5, 5)
    ack(consumer, 0, 5)
    await settle()
    assert peer.got()[7:] == [1, 2, 3, 4, 6]
    counts = [each.message.redelivery_count for each in peer.commands(BaseCommand.MESSAGE)][7:]
    assert counts == [1, 1, 1, 1, 1]
    subscription.redeliver(consumer, None, None)
    await settle()
    assert peer.got()[12:] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_many_named_messages_of_a_consumer_come_back_in_slices(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RETURNED_AT_ONCE", 2)
    topic = FakeTopic()
    fill(topic, 7)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=100)
    await settle()
    subscription.redeliver(consumer, {at(entry_id): -1 for entry_id in (4, 2, 5, 0, 3)}, None)
    assert unacked(consumer) == (5, 5)
    ack(consumer, 0, 6)
    await settle()
    assert peer.got()[7:] == [2, 3, 4, 5]
    assert unacked(consumer) == (5, 5)


async def test_messages_that_wait_go_to_the_new_owners_of_their_keys_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "RETURNED_AT_ONCE", 2)
    topic = FakeTopic()
    keys = [f"key-{index % 5}" for index in range(21)]
    topic.ledger.put(*(entry_bytes(index, key) for index, key in enumerate(keys)))
    subscription = topic.subscription()
    first, one = await attach(subscription, KEY_SHARED, "a", permits=1)
    await settle()
    assert one.got() == [0]
    _, other = await attach(subscription, KEY_SHARED, "b", permits=100)
    ack(first, 0)
    first.flow(100)
    turn = count_turns()
    await until(lambda: len(one.got() + other.got()) > 1, poll_s=0)
    assert turn() >= 10
    await settle()
    assert sorted(one.got() + other.got()) == list(range(21))
    for got in (one.got(), other.got()):
        assert got == sorted(got)
    assert len({keys[each] for each in other.got()} & {keys[each] for each in one.got()[1:]}) == 0


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_messages_of_a_lost_consumer_come_back_in_slices_unless_acknowledged(
    kind: SubscriptionType, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RETURNED_AT_ONCE", 2)
    topic = FakeTopic()
    fill(topic, 7)
    subscription = topic.subscription()
    _, gone_peer = await attach(subscription, kind, "a", permits=7)
    await settle()
    stays, peer = await attach(subscription, kind, "b", permits=100)
    gone_peer.lose()
    ack(stays, 0, 5)
    turns = 0
    while not peer.got():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    await settle()
    assert peer.got() == [1, 2, 3, 4, 6]
    assert unacked(stays) == (5, 5)


async def test_any_consumer_may_acknowledge_for_another() -> None:
    topic = FakeTopic()
    fill(topic, 2)
    subscription = topic.subscription()
    holder, _ = await attach(subscription, SHARED, "a", permits=10)
    other, _ = await attach(subscription, SHARED, "b")
    await settle()
    ack(other, 0)
    assert unacked(holder) == (1, 1)
    assert 0 not in [position.entry_id for position in holder.pending]


async def test_an_entry_acknowledged_while_it_waits_is_not_sent() -> None:
    topic = FakeTopic()
    fill(topic, 3)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, SHARED, permits=3)
    await settle()
    subscription.redeliver(consumer, None, None)
    ack(consumer, 1)
    consumer.flow(10)
    await settle()
    assert peer.got() == [0, 1, 2, 0, 2]


async def test_batches_count_by_message_and_return_by_what_is_left() -> None:
    topic = FakeTopic()
    fill(topic, 1, count=5)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, SHARED, permits=100)
    await settle()
    assert unacked(consumer) == (5, 5)
    subscription.acknowledge(consumer, [(at(0), [0b11101], 5)])
    assert unacked(consumer) == (4, 4)
    subscription.acknowledge(consumer, [(at(0), [0b01111], 5)])
    assert unacked(consumer) == (3, 3)
    subscription.redeliver(consumer, dict.fromkeys([at(0)], -1), None)
    await settle()
    message = peer.commands(BaseCommand.MESSAGE)[-1].message
    assert (list(message.ack_set), message.redelivery_count) == ([0b01101], 1)
    assert unacked(consumer) == (3, 3)
    subscription.acknowledge(consumer, [(at(0), [0b10010], 5)])
    assert unacked(consumer) == (0, 0)
    assert subscription.backlog == 0


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_unacknowledged_bounds_stop_and_acknowledgements_go_on(
    kind: SubscriptionType,
) -> None:
    topic = FakeTopic()
    topic.policies = replace(
        topic.policies, max_unacked_per_consumer=5, max_unacked_per_subscription=8
    )
    fill(topic, 40)
    subscription = topic.subscription()
    consumers = [await attach(subscription, kind, name, permits=100) for name in "ab"]
    await settle()
    while subscription.backlog:
        assert 0 < subscription.unacked <= 8
        for consumer, _ in consumers:
            assert consumer.unacked <= 5
            ack(consumer, *[position.entry_id for position in sorted(consumer.pending)])
        await settle()
    got = [entry_id for _, peer in consumers for entry_id in peer.got()]
    assert sorted(got) == list(range(40))


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_redelivery_from_disk(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    fill(topic, 30)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=100)
    await settle()
    topic.ledger.cached_from = 100
    subscription.redeliver(
        consumer, dict.fromkeys([at(entry_id) for entry_id in (3, 4, 20)], -1), None
    )
    subscription.redeliver(consumer, dict.fromkeys([at(25)], -1), None)
    await settle()
    assert peer.got()[30:] == [3, 4, 20, 25]
    assert topic.ledger.reads <= 2


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_entries_trimmed_while_they_waited_are_done_with(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    fill(topic, 3)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, kind, permits=100)
    await settle()
    trimmed = topic.ledger.entries[0]
    topic.ledger.entries_from = (  # type: ignore[method-assign]
        lambda start, count: [
            e for e in topic.ledger.entries if e.position >= start and e is not trimmed
        ][:count]
    )
    subscription.redeliver(consumer, None, None)
    await settle()
    assert peer.got() == [0, 1, 2, 1, 2]
    assert subscription.cursor.is_acknowledged(at(0))


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_cumulative_acknowledgement_is_refused(kind: SubscriptionType) -> None:
    topic = FakeTopic()
    fill(topic, 1)
    consumer, _ = await attach(topic.subscription(), kind, permits=1)
    await settle()
    with pytest.raises(ConsumerNotAllowed):
        consumer.subscription.acknowledge_up_to(consumer, at(0), ())
    assert consumer.subscription.backlog == 1


def keyed(topic: FakeTopic, keys: str) -> None:
    topic.ledger.put(*(entry_bytes(index, key) for index, key in enumerate(keys)))


def by_key(topic: FakeTopic, peer: FakeConnection, keys: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for entry_id in peer.got():
        found.setdefault(keys[entry_id], []).append(entry_id)
    return found


async def test_a_key_stays_with_one_consumer_in_order() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, one = await attach(subscription, KEY_SHARED, "a", permits=1000)
    _, two = await attach(subscription, KEY_SHARED, "b", permits=1000)
    keys = "abcdefghij" * 10
    keyed(topic, keys)
    await settle()
    assert set(by_key(topic, one, keys)).isdisjoint(by_key(topic, two, keys))
    assert sorted(one.got() + two.got()) == list(range(100))
    assert one.got() == sorted(one.got())
    assert one.got()
    assert two.got()


async def test_a_newcomer_gets_a_key_only_when_it_has_drained() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    old, old_peer = await attach(subscription, KEY_SHARED, "a", permits=1000)
    keys = "abcdefghij" * 4
    keyed(topic, keys[:20])
    await settle()
    assert old_peer.got() == list(range(20))
    _, new_peer = await attach(subscription, KEY_SHARED, "b", permits=1000)
    topic.ledger.put(*(entry_bytes(i, key) for i, key in enumerate(keys[20:])))
    await settle()
    assert new_peer.got() == []
    ack(old, *range(19))
    await settle()
    moved = set(by_key(topic, new_peer, keys))
    assert moved
    assert "j" not in moved or keys[19] != "j"
    ack(old, 19)
    await settle()
    assert set(by_key(topic, old_peer, keys[:20] + "-" * 20)) >= moved
    assert sorted(old_peer.got() + new_peer.got()) == list(range(40))
    after = [entry_id for entry_id in old_peer.got() if entry_id >= 20]
    assert set(by_key(topic, new_peer, keys)).isdisjoint({keys[entry_id] for entry_id in after})


async def test_a_consumer_without_permits_holds_up_only_its_keys() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    stuck, stuck_peer = await attach(subscription, KEY_SHARED, "a")
    _, peer = await attach(subscription, KEY_SHARED, "b", permits=1000)
    keys = "abcdefghij" * 10
    keyed(topic, keys)
    await settle()
    assert 0 < len(peer.got()) < 100
    stuck.flow(1000)
    await settle()
    assert sorted(stuck_peer.got() + peer.got()) == list(range(100))
    assert stuck_peer.got() == sorted(stuck_peer.got())


async def test_look_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "KEY_SHARED_LOOK_AHEAD_ENTRIES", 10)
    topic = FakeTopic()
    subscription = topic.subscription()
    stuck, stuck_peer = await attach(subscription, KEY_SHARED, "a")
    _, peer = await attach(subscription, KEY_SHARED, "b", permits=1000)
    keyed(topic, "abcdefghij" * 30)
    await settle()
    assert subscription.dispatcher is not None
    assert subscription.dispatcher.reader.next_position < at(299)
    stuck.flow(1000)
    await settle(100)
    assert sorted(stuck_peer.got() + peer.got()) == list(range(300))


async def test_reading_goes_on_when_what_waited_at_the_bound_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "KEY_SHARED_LOOK_AHEAD_ENTRIES", 2)
    topic = FakeTopic()
    subscription = topic.subscription()
    slow, slow_peer = await attach(subscription, KEY_SHARED, "a", permits=2)
    _, peer = await attach(subscription, KEY_SHARED, "b", permits=1000)
    assert isinstance(subscription.dispatcher, KeySharedDispatcher)
    owner = subscription.dispatcher._order.assignment.owner
    of_slow, of_other = (
        next(key for key in "abcdefgh" if (owner(sticky_hash(key.encode())) is slow) is mine)
        for mine in (True, False)
    )
    keyed(topic, of_slow * 2)
    await settle()
    assert slow_peer.got() == [0, 1]
    # Its client acknowledges what it asked for again, and gave no permits for.
    subscription.redeliver(slow, None, None)
    await settle()
    keyed(topic, of_other * 3)
    await settle()
    assert peer.got() == []
    ack(slow, 0, 1)
    await settle()
    assert peer.got() == [2, 3, 4]


async def test_sticky_ranges_are_checked_and_kept() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()

    def sticky(start: int, end: int) -> KeySharedPolicy:
        return KeySharedPolicy(KeySharedMode.STICKY, ranges=((start, end),))

    low, low_peer = await attach(
        subscription, KEY_SHARED, "a", permits=1000, key_shared=sticky(0, 30000)
    )
    with pytest.raises(ConsumerAssignError):
        await attach(subscription, KEY_SHARED, "b", key_shared=sticky(30000, 65535))
    assert subscription.consumers == (low,)
    keyed(topic, "abcdefghij")
    await settle()
    kept = low_peer.got()
    assert 0 < len(kept) < 10
    _, high_peer = await attach(
        subscription, KEY_SHARED, "b", permits=1000, key_shared=sticky(30001, 65535)
    )
    await settle()
    assert sorted(kept + high_peer.got()) == list(range(10))


async def test_a_refused_first_sticky_consumer_leaves_nothing_behind() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    with pytest.raises(ConsumerAssignError):
        await attach(subscription, KEY_SHARED, key_shared=KeySharedPolicy(KeySharedMode.STICKY))
    assert subscription.consumers == ()
    assert topic.ledger.listeners == []
    _, peer = await attach(subscription, SHARED, permits=10)
    fill(topic, 1)
    assert peer.got() == [0]
