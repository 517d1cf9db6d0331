"""Chunked messages where a subscription has several consumers: one gets all chunks of a message."""

import pytest

from broker.topics.consumer import KeySharedMode, KeySharedPolicy, SubscriptionType
from broker.topics.deduplication import Chunk
from broker.topics.dispatch.chunk_owners import ChunkOwners
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from tests.support.bounds import set_bound
from tests.unit.broker.topics.fakes import FakeTopic, attach, entry_bytes, settle

SHARED, KEY_SHARED = SubscriptionType.SHARED, SubscriptionType.KEY_SHARED
KEYS = 8
BUCKETS = tuple((start, start + 0xFFF) for start in range(0, 0x10000, 0x1000))
POLICIES = [
    KeySharedPolicy(),
    KeySharedPolicy(allow_out_of_order=True),
    KeySharedPolicy(KeySharedMode.STICKY, ranges=BUCKETS, entry_buckets=True),
]


def chunk(
    sequence_id: int, chunk_id: int, of: int, message: str = "m", key: str | None = None
) -> bytes:
    metadata = MessageMetadata(
        producer_name="p",
        sequence_id=sequence_id,
        publish_time=1000,
        uuid=message,
        chunk_id=chunk_id,
        num_chunks_from_msg=of,
    )
    if key is not None:
        metadata.partition_key = key
    return build_entry(metadata, b"x")


async def test_all_chunks_of_a_message_go_to_one_consumer() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    _, one = await attach(subscription, SHARED, "a", permits=100)
    _, two = await attach(subscription, SHARED, "b", permits=100)
    for number in range(12):
        # Those of two producers come in turns, each by itself, and whole messages between them.
        name, at = "mn"[number % 2], number // 2
        topic.ledger.put(chunk(2 * number, at, 6, name), entry_bytes(2 * number + 1))
        await settle()
    got = [set(one.got()), set(two.got())]
    for first in (0, 2):
        chunks = set(range(first, 24, 4))
        assert sum(chunks <= each for each in got) == 1, got
        assert sum(bool(chunks & each) for each in got) == 1, got
    assert got[0] | got[1] == set(range(24))
    assert all(each & set(range(1, 24, 2)) for each in got), "whole messages take turns"


async def test_chunks_wait_for_their_consumer_and_others_do_not() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, one = await attach(subscription, SHARED, "a", permits=1)
    topic.ledger.put(chunk(0, 0, 3))
    await settle()
    _, two = await attach(subscription, SHARED, "b", permits=100)
    topic.ledger.put(chunk(1, 1, 3), chunk(2, 2, 3), entry_bytes(3))
    await settle()
    assert (one.got(), two.got()) == ([0], [3])
    first.flow(1)
    await settle()
    first.flow(1)
    await settle()
    assert (one.got(), two.got()) == ([0, 1, 2], [3])
    assert subscription.dispatcher is not None
    assert subscription.dispatcher.waiting == 0


async def test_when_a_consumer_leaves_another_one_gets_all_chunks() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, one = await attach(subscription, SHARED, "a", permits=2)
    topic.ledger.put(chunk(0, 0, 4), chunk(1, 1, 4), chunk(2, 2, 4))
    await settle()
    others = [(await attach(subscription, SHARED, name, permits=100))[1] for name in "bc"]
    await settle()
    assert one.got() == [0, 1]
    assert [each.got() for each in others] == [[], []], "the third one is set aside"
    first.close()
    topic.ledger.put(chunk(3, 3, 4))
    await settle()
    assert sorted(each.got() for each in others) == [[], [0, 1, 2, 3]]


async def test_a_chunk_that_was_set_aside_and_acknowledged_is_not_sent() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, one = await attach(subscription, SHARED, "a", permits=1)
    topic.ledger.put(chunk(0, 0, 2), chunk(1, 1, 2))
    await settle()
    subscription.acknowledge(first, [(Position(1, 1), (), 0)])
    first.flow(5)
    await settle()
    assert one.got() == [0]
    assert subscription.dispatcher is not None
    assert subscription.dispatcher.waiting == 0


async def test_reading_stops_where_too_many_chunks_are_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "KEY_SHARED_LOOK_AHEAD_ENTRIES", 2)
    topic = FakeTopic()
    subscription = topic.subscription()
    first, one = await attach(subscription, SHARED, "a", permits=1)
    topic.ledger.put(chunk(0, 0, 4))
    await settle()
    _, two = await attach(subscription, SHARED, "b", permits=100)
    topic.ledger.put(*(chunk(number, number, 4) for number in (1, 2, 3)), entry_bytes(4))
    await settle()
    assert two.got() == []
    first.flow(2)
    await settle()
    assert (one.got(), two.got()) == ([0, 1, 2], [4])
    first.flow(1)
    await settle()
    assert one.got() == [0, 1, 2, 3]


def of_each_key(chunk_id: int) -> list[bytes]:
    """That chunk of a message of three, of each key."""
    return [
        chunk(chunk_id * KEYS + number, chunk_id, 3, f"m{number}", f"k{number}")
        for number in range(KEYS)
    ]


@pytest.mark.parametrize("policy", POLICIES, ids=["split", "out of order", "buckets"])
@pytest.mark.parametrize("permits", [KEYS, 100])
async def test_a_key_that_moves_takes_no_message_apart(
    policy: KeySharedPolicy, permits: int
) -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, one = await attach(subscription, KEY_SHARED, "a", permits=permits, key_shared=policy)
    topic.ledger.put(*of_each_key(0))
    await settle()
    _, two = await attach(subscription, KEY_SHARED, "b", permits=100, key_shared=policy)
    topic.ledger.put(*of_each_key(1), *of_each_key(2))
    await settle()
    first.flow(100)
    await settle()
    assert one.got() == list(range(3 * KEYS))
    assert two.got() == []
    subscription.acknowledge(first, [(Position(1, at), (), 0) for at in range(3 * KEYS)])
    topic.ledger.put(*of_each_key(0))
    await settle()
    assert two.got(), "some keys are its own"
    assert len(one.got()) + len(two.got()) == 4 * KEYS


async def test_a_key_goes_on_at_another_consumer_if_that_of_the_first_chunks_leaves() -> None:
    topic = FakeTopic()
    subscription = topic.subscription()
    first, _ = await attach(subscription, KEY_SHARED, "a", permits=KEYS)
    topic.ledger.put(*of_each_key(0))
    await settle()
    _, two = await attach(subscription, KEY_SHARED, "b", permits=100)
    topic.ledger.put(*of_each_key(1), *of_each_key(2))
    await settle()
    assert two.got() == []
    first.close()
    await settle()
    assert two.got() == list(range(3 * KEYS))
    assert subscription.dispatcher is not None
    assert subscription.dispatcher.waiting == 0


def test_messages_that_never_end_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "CHUNKED_MESSAGES_BEGUN", 2)
    owners: ChunkOwners[str] = ChunkOwners()
    for name in "mno":
        owners.sent(Chunk(name, 0, last=False), "a")
    found = [owners.owner(Chunk(name, 1, last=False)) for name in "mno"]
    assert found == [None, "a", "a"]
    owners.sent(Chunk("n", 1, last=True), "a")
    owners.sent(Chunk("p", 0, last=False), "b")
    owners.left("a")
    assert len(owners) == 1
    assert owners.owner(Chunk("p", 1, last=True)) == "b"
