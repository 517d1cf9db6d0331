"""Exclusive and Failover over fakes: order, permits, redelivery, who is active, back pressure."""

import pytest

from broker.topics.consumer import SubscriptionType
from config.bounds import READ_BATCH_ENTRIES
from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.message import payload_of
from magnetar.protocol.pulsar_pb2 import BaseCommand
from tests.support.bounds import set_bound
from tests.unit.broker.topics.fakes import FakeTopic, attach, entry_bytes, settle

EXCLUSIVE, FAILOVER = SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER


def fill(topic: FakeTopic, entries: int, count: int = 1) -> None:
    topic.ledger.put(*(entry_bytes(index, count=count) for index in range(entries)))


async def test_everything_in_order_as_permits_allow() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=3)
    fill(topic, 5)
    await settle()
    assert peer.got() == [0, 1, 2]
    assert consumer.permits == 0
    consumer.flow(10)
    await settle()
    assert peer.got() == [0, 1, 2, 3, 4]
    entry = peer.frames[-1].entry
    assert entry == topic.ledger.entries[4].data
    assert entry is not None
    assert bytes(payload_of(entry)) == b"x" * 10
    assert (subscription.messages_out_total, consumer.entries_out_total) == (5, 5)


async def test_an_append_is_sent_without_a_loop_turn() -> None:
    topic = FakeTopic()
    _, peer = await attach(topic.subscription(), EXCLUSIVE, permits=10)
    await settle()
    fill(topic, 3)
    assert peer.got() == [0, 1, 2]
    assert len(peer.commands(BaseCommand.MESSAGE)) == 3
    assert peer.writes == 1


async def test_a_batch_may_overdraw_permits_once() -> None:
    topic = FakeTopic()
    fill(topic, 3, count=10)
    consumer, peer = await attach(topic.subscription(), EXCLUSIVE, permits=11)
    await settle()
    assert peer.got() == [0, 1]
    assert consumer.permits == -9
    consumer.flow(9)
    await settle()
    assert peer.got() == [0, 1]
    consumer.flow(1)
    await settle()
    assert peer.got() == [0, 1, 2]


async def test_long_backlogs_go_out_in_bounded_runs() -> None:
    topic = FakeTopic()
    fill(topic, 2 * READ_BATCH_ENTRIES + 5)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE)
    consumer.permits = 10_000
    assert subscription.dispatcher is not None
    subscription.dispatcher.run()
    assert len(peer.got()) == READ_BATCH_ENTRIES
    await settle()
    assert peer.got() == list(range(2 * READ_BATCH_ENTRIES + 5))


async def test_acknowledged_entries_are_not_sent_again() -> None:
    topic = FakeTopic()
    fill(topic, 5)
    subscription = topic.subscription()
    for entry_id in (0, 1, 3):
        subscription.cursor.acknowledge(Position(1, entry_id))
    _, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    assert peer.got() == [2, 4]


async def test_partly_acknowledged_batches_say_what_is_left() -> None:
    topic = FakeTopic()
    fill(topic, 1, count=4)
    subscription = topic.subscription()
    subscription.cursor.acknowledge_batch(Position(1, 0), [0b1010], 4)
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    (command,) = peer.commands(BaseCommand.MESSAGE)
    assert list(command.message.ack_set) == [0b1010]
    assert consumer.permits == 6


async def test_redelivery_starts_over_with_the_new_epoch() -> None:
    topic = FakeTopic()
    fill(topic, 4)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    subscription.acknowledge_up_to(consumer, Position(1, 1), ())
    subscription.redeliver(consumer, None, 3)
    await settle()
    assert peer.got() == [0, 1, 2, 3, 2, 3]
    epochs = [each.message.consumer_epoch for each in peer.commands(BaseCommand.MESSAGE)]
    assert epochs == [0, 0, 0, 0, 3, 3]
    subscription.redeliver(consumer, dict.fromkeys([Position(1, 3)], -1), 2)
    await settle()
    assert peer.got()[6:] == [2, 3], "single ids redeliver in order, all of them"
    assert peer.commands(BaseCommand.MESSAGE)[-1].message.consumer_epoch == 3


async def test_a_read_begun_before_a_redelivery_is_forgotten() -> None:
    topic = FakeTopic()
    fill(topic, 3)
    topic.ledger.cached_from = 3
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE)
    consumer.flow(10)
    while not topic.ledger.reads:
        await settle(1)
    subscription.redeliver(consumer, None, 1)
    await settle()
    assert peer.got() == [0, 1, 2]
    assert {each.message.consumer_epoch for each in peer.commands(BaseCommand.MESSAGE)} == {1}


async def test_cold_reads_are_one_at_a_time_and_failures_are_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "READ_RETRY_MIN_S", 0)
    topic = FakeTopic()
    topic.ledger.cached_from = 10**6
    topic.ledger.read_errors = [OSError("the disk is sulking")]
    fill(topic, 3)
    consumer, peer = await attach(topic.subscription(), EXCLUSIVE, permits=10)
    for _ in range(50):
        consumer.flow(1)
        await settle(1)
    while peer.got() != [0, 1, 2]:
        await settle(1)
    assert topic.ledger.reads == 2


async def test_a_cold_read_begins_behind_what_is_acknowledged() -> None:
    topic = FakeTopic()
    fill(topic, 500)
    topic.ledger.cached_from = 10**6
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=1)
    await settle()
    for entry_id in range(READ_BATCH_ENTRIES, 450):
        subscription.cursor.acknowledge(Position(1, entry_id))
    consumer.flow(1000)
    await settle(40)
    assert peer.got() == [*range(READ_BATCH_ENTRIES), *range(450, 500)]
    assert topic.ledger.reads == 2


async def test_a_full_socket_pauses_and_wakes_up() -> None:
    topic = FakeTopic()
    _, peer = await attach(topic.subscription(), EXCLUSIVE, permits=10)
    await settle()
    peer.writable = False
    fill(topic, 2)
    await settle()
    assert peer.got() == []
    peer.writable = True
    await settle()
    assert peer.got() == [0, 1]


async def test_nothing_past_the_horizon_markers_and_aborted_entries_are_skipped() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    topic.horizon = Position(1, 3)
    topic.aborted = {Position(1, 2)}
    topic.ledger.put(
        entry_bytes(0),
        entry_bytes(1, marker_type=21),
        entry_bytes(2, txnid_least_bits=0, txnid_most_bits=0),
        entry_bytes(3, txnid_least_bits=5, txnid_most_bits=1),
        entry_bytes(4),
    )
    _, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    assert peer.got() == [0, 3]
    assert subscription.cursor.is_acknowledged(Position(1, 1))
    assert subscription.cursor.is_acknowledged(Position(1, 2))
    topic.horizon = Position(1, 4)
    subscription.wake()
    await settle()
    assert peer.got() == [0, 3, 4]


async def test_failover_goes_to_the_consumer_that_the_topic_chooses_and_on_to_the_next() -> None:
    topic = FakeTopic()
    fill(topic, 4)
    subscription = topic.subscription()
    second, second_peer = await attach(subscription, FAILOVER, "a", permits=2)
    await settle()
    subscription.acknowledge_up_to(second, Position(1, 0), ())
    first, first_peer = await attach(subscription, FAILOVER, "b", permits=10)
    await settle()
    assert second_peer.got() == [0, 1]
    assert first_peer.got() == [1, 2, 3]
    first.close()
    second.flow(10)
    await settle()
    assert second_peer.got() == [0, 1, 1, 2, 3]

    def changes(peer: object) -> list[bool]:
        return [
            each.active_consumer_change.is_active
            for each in peer.commands(BaseCommand.ACTIVE_CONSUMER_CHANGE)  # type: ignore[attr-defined]
        ]

    assert changes(first_peer) == [True]
    assert changes(second_peer) == [True, False, True]


async def test_only_the_active_consumer_may_ask_for_redelivery() -> None:
    topic = FakeTopic()
    fill(topic, 2)
    subscription = topic.subscription()
    _, active_peer = await attach(subscription, FAILOVER, "b", permits=10)
    standby, _ = await attach(subscription, FAILOVER, "a", permits=10)
    await settle()
    subscription.redeliver(standby, None, 9)
    await settle()
    assert active_peer.got() == [0, 1]


async def test_the_partition_chooses_among_failover_consumers() -> None:
    topic = FakeTopic("persistent://t/n/x-partition-1")
    fill(topic, 1)
    subscription = topic.subscription()
    _, first = await attach(subscription, FAILOVER, "a", permits=10)
    _, second = await attach(subscription, FAILOVER, "b", permits=10)
    await settle()
    assert second.got() == [0]
    assert second.commands(BaseCommand.MESSAGE)[0].message.message_id.partition == 1
    assert first.got() in ([], [0])


async def test_seek_moves_the_cursor_and_disconnects_consumers() -> None:
    topic = FakeTopic()
    fill(topic, 4)
    subscription = topic.subscription()
    consumer, peer = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    subscription.acknowledge_up_to(consumer, Position(1, 3), ())
    await subscription.seek(Position(1, 2))
    (close,) = peer.commands(BaseCommand.CLOSE_CONSUMER)
    assert close.close_consumer.consumer_id == 1
    assert consumer.closed
    assert peer.consumers == {}
    assert subscription.consumers == ()
    _, again = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    assert again.got() == [2, 3]
    await subscription.seek(LATEST)
    _, last = await attach(subscription, EXCLUSIVE, permits=10)
    await settle()
    assert last.got() == []
    assert ("rewound", "s") in topic.events
