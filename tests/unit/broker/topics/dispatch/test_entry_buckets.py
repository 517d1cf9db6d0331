"""Entry buckets: the table, the spread, and the order of each bucket over any turnover."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.topics.consumer import Consumer, KeySharedMode, KeySharedPolicy, SubscriptionType
from broker.topics.dispatch.entry_bucket_dispatcher import EntryBucketDispatcher
from broker.topics.dispatch.entry_buckets import EntryBuckets
from broker.topics.dispatch.errors import ConsumerAssignError, ConsumerBusy
from broker.topics.subscription import Subscription
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import HashRange, sticky_hash
from magnetar.protocol.pulsar_pb2 import BaseCommand
from tests.support.bounds import set_bound
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, attach, entry_bytes, settle

EXCLUSIVE, KEY_SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.KEY_SHARED
SEGMENT = "segment://public/default/x/0000-ffff-0"
FOUR = ((0, 16383), (16384, 32767), (32768, 49151), (49152, 65535))


@dataclass(frozen=True)
class Sharer:
    name: str
    consumer_id: int = 1
    priority_level: int = 0


UNSTAMPED = 4
"""Stands for the bucket of a batch that may have messages of any."""


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def sharing(table: tuple[HashRange, ...] = FOUR) -> KeySharedPolicy:
    return KeySharedPolicy(mode=KeySharedMode.STICKY, ranges=table, entry_buckets=True)


def stamped(number: int, entry_hash: int, **fields: int) -> bytes:
    stamps = {"entry_hash_min": entry_hash, "entry_hash_max": entry_hash}
    return entry_bytes(number, None, 1, **stamps, **fields)


def ack(consumer: Consumer, *entry_ids: int) -> None:
    consumer.subscription.acknowledge(consumer, [(at(entry_id), (), 0) for entry_id in entry_ids])


async def share(
    subscription: Subscription, name: str, *, permits: int = 100, consumer_id: int = 1
) -> tuple[Consumer, FakeConnection]:
    return await attach(
        subscription,
        KEY_SHARED,
        name,
        permits=permits,
        consumer_id=consumer_id,
        key_shared=sharing(),
    )


# The table


@pytest.mark.parametrize(
    "table",
    [
        (),
        ((0, 65534),),
        ((1, 65535),),
        ((0, 0), (1, 65535)),
        ((0, 100), (102, 65535)),
        ((0, 100), (100, 65535)),
        ((0, 100), (101, 90), (91, 65535)),
        ((32768, 65535), (0, 32767)),
        ((0, 65536),),
        tuple((n, n) if n else (0, 1) for n in range(1025)),
    ],
)
def test_table_that_does_not_divide_the_hashes_is_refused(table: tuple[HashRange, ...]) -> None:
    buckets = EntryBuckets[Sharer]()
    with pytest.raises(ConsumerAssignError):
        buckets.add(Sharer("a"), table)
    buckets.add(Sharer("a"), FOUR)
    assert buckets.owner(5) == Sharer("a")


def test_table_is_that_of_the_first_sharer_until_all_have_left() -> None:
    buckets = EntryBuckets[Sharer]()
    buckets.add(Sharer("a"), FOUR)
    with pytest.raises(ConsumerAssignError):
        buckets.add(Sharer("b"), ((0, 32767), (32768, 65535)))
    assert {buckets.owner(start) for start, _ in FOUR} == {Sharer("a")}
    buckets.remove(Sharer("a"))
    buckets.add(Sharer("b"), ((0, 32767), (32768, 65535)))
    assert buckets.bucket(40000) == 32768


@settings(deadline=None)
@given(
    st.lists(
        st.builds(Sharer, st.text("abc", min_size=1, max_size=3), st.integers(1, 9)),
        min_size=1,
        max_size=9,
        unique=True,
    )
)
def test_buckets_are_spread_by_name_and_id(consumers: list[Sharer]) -> None:
    buckets = EntryBuckets[Sharer]()
    for consumer in consumers:
        buckets.add(consumer, FOUR)
    ranked = sorted(consumers, key=lambda each: (each.name, each.consumer_id))
    owned = [[start for start, _ in FOUR if buckets.owner(start) is each] for each in ranked]
    sharers = len(ranked)
    assert owned == [
        [FOUR[n][0] for n in range(j * 4 // sharers, (j + 1) * 4 // sharers)]
        for j in range(sharers)
    ]


def test_a_bucket_is_known_by_its_first_hash_and_the_first_one_by_1() -> None:
    buckets = EntryBuckets[Sharer]()
    buckets.add(Sharer("a"), FOUR)
    hashes = (0, 1, 16383, 16384, 49152, 65535, 2**32 - 1)
    assert [buckets.bucket(each) for each in hashes] == [1, 1, 1, 16384, 49152, 49152, 49152]


# Dispatch


async def test_entries_go_to_the_owners_of_their_buckets() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    _, one = await share(subscription, "a")
    _, two = await share(subscription, "b")
    unstamped = next(key for key in "pqrstuvw" if sticky_hash(key.encode()) < 32768)
    # The stamp counts, not the key; an entry without one goes by the hash of its key.
    stamp = {"entry_hash_min": 60000, "entry_hash_max": 60000}
    topic.ledger.put(stamped(0, 0), stamped(1, 16384), stamped(2, 32768), stamped(3, 65535))
    topic.ledger.put(entry_bytes(4, unstamped), entry_bytes(5, unstamped, **stamp))
    await settle()
    assert (one.got(), two.got()) == ([0, 1, 4], [2, 3, 5])


async def test_plain_key_shared_goes_by_key_whatever_the_stamp() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    peers = [(await attach(subscription, KEY_SHARED, name, permits=100))[1] for name in "abc"]
    topic.ledger.put(*(entry_bytes(n, "k", entry_hash_min=n * 9000) for n in range(7)))
    await settle()
    assert sorted(peer.got() for peer in peers) == [[], [], [0, 1, 2, 3, 4, 5, 6]]


async def test_a_bucket_that_moves_waits_for_the_acknowledgements_of_its_former_owner() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    old, old_peer = await share(subscription, "a")
    topic.ledger.put(stamped(0, 50000), stamped(1, 5), stamped(2, 50001))
    await settle()
    _, new_peer = await share(subscription, "b")
    topic.ledger.put(stamped(3, 50002), stamped(4, 40000), stamped(5, 5))
    await settle()
    assert (old_peer.got(), new_peer.got()) == ([0, 1, 2, 5], [4])
    ack(old, 0)
    await settle()
    assert new_peer.got() == [4]
    ack(old, 2)
    await settle()
    assert new_peer.got() == [4, 3]


async def test_messages_of_sharers_carry_the_epoch_of_their_last_redelivery() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    consumer, peer = await share(subscription, "a")
    topic.ledger.put(stamped(0, 0), stamped(1, 50000))
    await settle()
    subscription.redeliver(consumer, None, 1)
    await settle()
    sent = [each.message for each in peer.commands(BaseCommand.MESSAGE)]
    found = [(each.message_id.entry_id, each.consumer_epoch) for each in sent]
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1)]


async def test_delayed_messages_come_at_once_in_the_order_of_their_bucket() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    _, peer = await share(subscription, "a")
    topic.ledger.put(stamped(0, 0, deliver_at_time=topic.now_ms + 60_000), stamped(1, 0))
    await settle()
    assert peer.got() == [0, 1]


async def test_batches_are_acknowledged_message_by_message() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    old, _ = await share(subscription, "a")
    topic.ledger.put(stamped(0, 50000, num_messages_in_batch=3))
    await settle()
    _, peer = await share(subscription, "b")
    topic.ledger.put(stamped(1, 50000))
    subscription.acknowledge(old, [(at(0), [0b100], 3)])
    await settle()
    assert (old.unacked, peer.got()) == (1, [])
    subscription.acknowledge(old, [(at(0), (), 3)])
    await settle()
    assert (old.unacked, peer.got()) == (0, [1])


async def test_an_unstamped_batch_comes_after_all_before_it_and_before_all_behind_it() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    one, one_peer = await share(subscription, "a")
    two, two_peer = await share(subscription, "b")
    topic.ledger.put(stamped(0, 5), stamped(1, 50000))
    topic.ledger.put(entry_bytes(2, "k", count=3), stamped(3, 5), stamped(4, 50000))
    await settle()
    assert ("unstamped",) in topic.events
    assert (one_peer.got(), two_peer.got()) == ([0], [1])
    ack(one, 0)
    ack(two, 1)
    await settle()
    owner, peer = (one, one_peer) if 2 in one_peer.got() else (two, two_peer)
    assert sorted(one_peer.got() + two_peer.got()) == [0, 1, 2]
    ack(owner, 2)
    await settle()
    assert (3 in one_peer.got(), 4 in two_peer.got()) == (True, True)
    assert peer.got()[1] == 2


async def test_a_sole_consumer_does_not_wait_for_unstamped_batches() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    _, peer = await share(subscription, "a")
    topic.ledger.put(stamped(0, 5), entry_bytes(1, "k", count=2), stamped(2, 50000))
    await settle()
    assert peer.got() == [0, 1, 2]
    _, other = await share(subscription, "b")
    topic.ledger.put(stamped(3, 50000))
    await settle()
    assert other.got() == []


async def test_unstamped_batches_behind_a_stuck_one_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "UNSTAMPED_BATCHES_KEPT", 3)
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    consumer, _ = await share(subscription, "a", permits=1000)
    topic.ledger.put(*(entry_bytes(number, "k", count=2) for number in range(40)))
    await settle()
    dispatcher = subscription.dispatcher
    assert isinstance(dispatcher, EntryBucketDispatcher)
    assert len(dispatcher.unstamped) <= 5, "those of a consumer that acknowledges nothing"
    ack(consumer, *range(1, 40))
    await settle()
    topic.ledger.put(*(entry_bytes(number, "k", count=2) for number in range(40, 50)))
    await settle()
    ack(consumer, *range(40, 50))
    assert len(dispatcher.unstamped) <= 5, "those behind one that is never acknowledged"


async def test_sharers_get_one_entry_at_a_time_where_unstamped_batches_are_not_known_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "UNSTAMPED_BATCHES_KEPT", 1)
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    one, _ = await share(subscription, "a", permits=1000)
    topic.ledger.put(*(entry_bytes(number, "k", count=2) for number in range(4)))
    await settle()
    await share(subscription, "b")
    topic.ledger.put(stamped(4, 5), stamped(5, 50000))
    await settle()
    for number in range(4):
        assert 4 not in [entry_id for _, entry_id in one.pending]
        ack(one, number)
        await settle()
    assert sum(len(each.pending) for each in subscription.consumers) == 2


# Attaching


@pytest.mark.parametrize("first", [EXCLUSIVE, KEY_SHARED])
async def test_exclusive_and_shared_use_wait_for_each_other(first: SubscriptionType) -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    second = KEY_SHARED if first is EXCLUSIVE else EXCLUSIVE

    async def of(kind: SubscriptionType, name: str) -> tuple[Consumer, FakeConnection]:
        policy = sharing() if kind is KEY_SHARED else None
        return await attach(subscription, kind, name, permits=9, key_shared=policy)

    before = [(await of(first, name))[0] for name in ("a" if first is EXCLUSIVE else "ab")]
    waiting = asyncio.create_task(of(second, "z"))
    await settle()
    assert not waiting.done()
    for consumer in before:
        assert not waiting.done()
        consumer.close()
        await settle()
    await waiting
    assert subscription.type is second


async def test_waiting_for_the_other_use_is_bounded() -> None:
    subscription = FakeTopic(SEGMENT).subscription(handover_wait_s=0.01)
    await share(subscription, "a")
    with pytest.raises(ConsumerBusy):
        await attach(subscription, EXCLUSIVE, "b")
    with pytest.raises(ConsumerBusy):
        await attach(subscription, KEY_SHARED, "b")


async def test_a_silent_connection_of_the_same_consumer_is_removed() -> None:
    topic = FakeTopic(SEGMENT)
    subscription = topic.subscription()
    _, lost = await share(subscription, "a")
    _, other = await share(subscription, "b")
    topic.ledger.put(stamped(0, 0))
    await settle()
    lost.alive = False
    _, back = await share(subscription, "a")
    await settle()
    assert (lost.closing, back.got()) == (True, [0])
    await share(subscription, "b", consumer_id=2)
    assert not other.closing
    assert len(subscription.consumers) == 3


# Order over any turnover


class Watched:
    """A shared segment; every delivery is checked against what its bucket has unacknowledged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic = FakeTopic(SEGMENT)
        self.subscription = self.topic.subscription()
        self.buckets: list[int] = []
        self.acked: set[int] = set()
        self.made = 0
        self.consumers: list[tuple[Consumer, FakeConnection]] = []
        deliver = Consumer.deliver

        def checked(consumer: Consumer, position: Position, *rest: object) -> None:
            for earlier in range(position.entry_id):
                if earlier not in self.acked and self.may_share_a_key(earlier, position.entry_id):
                    assert at(earlier) in consumer.pending, (earlier, position)
            deliver(consumer, position, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(Consumer, "deliver", checked)

    def may_share_a_key(self, one: int, other: int) -> bool:
        buckets = {self.buckets[one], self.buckets[other]}
        return len(buckets) == 1 or UNSTAMPED in buckets

    def put(self, entry_hash: int) -> None:
        number = len(self.buckets)
        self.buckets.append(entry_hash // 16384)
        unstamped = entry_hash // 16384 == UNSTAMPED
        self.topic.ledger.put(
            entry_bytes(number, "k", count=2) if unstamped else stamped(number, entry_hash)
        )

    async def join(self) -> None:
        self.made += 1
        name = "hgfedcba"[self.made % 8]
        self.consumers.append(
            await share(self.subscription, name, permits=3, consumer_id=self.made)
        )

    def leave(self, index: int, *, crash: bool) -> None:
        consumer, connection = self.consumers.pop(index)
        connection.lose() if crash else consumer.close()

    def acknowledge(self, consumer: Consumer, position: Position) -> None:
        self.acked.add(position.entry_id)
        ack(consumer, position.entry_id)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_buckets_stay_in_order_over_joins_leaves_and_crashes(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_bound(monkeypatch, "UNSTAMPED_BATCHES_KEPT", data.draw(st.sampled_from([1, 2, 1000])))
        asyncio.run(turn_over(monkeypatch, data))


async def turn_over(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    """Let consumers come and go, acknowledge and request again; in the end all is acknowledged."""
    world = Watched(monkeypatch)
    await world.join()
    acts = ["put", "put", "put", "ack", "ack", "nack", "again", "join", "leave", "crash"]
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(st.sampled_from(acts))
        busy = [each for each, _ in world.consumers if each.pending]
        if act == "put":
            # One in ten is a batch without hashes.
            world.put(data.draw(st.integers(0, 65535) | st.sampled_from([UNSTAMPED * 16384])))
        elif act == "join" and len(world.consumers) < 5:
            await world.join()
        elif act in ("leave", "crash") and world.consumers:
            index = data.draw(st.integers(0, len(world.consumers) - 1))
            world.leave(index, crash=act == "crash")
        elif busy and act in ("ack", "nack", "again"):
            consumer = data.draw(st.sampled_from(busy))
            position = data.draw(st.sampled_from(sorted(consumer.pending)))
            if act == "ack":
                world.acknowledge(consumer, position)
                consumer.flow(1)
            else:
                chosen = {position: -1} if act == "nack" else None
                world.subscription.redeliver(consumer, chosen, None)
                consumer.flow(3)
        await settle(6)
    await world.join()
    while len(world.acked) < len(world.buckets):
        before = len(world.acked)
        for consumer, _ in world.consumers:
            consumer.flow(10)
            for position in sorted(consumer.pending):
                world.acknowledge(consumer, position)
        await settle(6)
        assert len(world.acked) > before or any(c.pending for c, _ in world.consumers)
