"""Backlogs of segments that are old, that expire, or that cannot be sent for a while."""

from collections.abc import Sequence

import pytest

from broker.replication.segment_replicator import SegmentReplicator
from broker.topics.replicated_ranges import EVERYTHING, ReplicatedRanges
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import payload_of
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster
from tests.unit.broker.replication.test_scalable_topics import (
    TOPIC,
    entries_of,
    failure_of,
    is_done,
    make,
    segments_of,
    split,
)

SEGMENT = "segment://public/default/t/0000-ffff-0"
Pair = tuple[Cluster, Cluster]


async def publish(
    cluster: Cluster, payloads: Sequence[bytes], metadata: Sequence[pb.MessageMetadata] = ()
) -> None:
    """Write messages to the first segment."""
    client = await cluster.client()
    producer = await client.create_producer(SEGMENT)
    for number, payload in enumerate(payloads):
        await producer.send(payload, metadata=metadata[number] if metadata else None)
    await client.close()


def replicator_of(cluster: Cluster) -> SegmentReplicator:
    """The one that sends the first segment to the west."""
    topic = cluster.broker.topics.loaded()[SEGMENT]
    replicator = topic.replication.replicators["west"]  # type: ignore[attr-defined]
    assert isinstance(replicator, SegmentReplicator)
    return replicator


async def payloads_of(cluster: Cluster) -> list[bytes]:
    """The entries of the first segment."""
    topic = await cluster.broker.topics.get(parse_topic_name(SEGMENT), create=True)
    return [bytes(payload_of(each.data)) for each in await entries_of(topic)]


async def hold_back(east: Cluster, west: Cluster) -> SegmentReplicator:
    """Have two messages of which one is sent, and the other one has to wait for an hour."""
    rate = {"dispatchThrottlingRateInMsg": 1, "ratePeriodInSecond": 3600}
    await east.ask("POST", f"{NAMESPACE}/replicatorDispatchRate", rate)
    await make(east)
    await make(west)
    await publish(east, [b"1", b"2"])
    replicator = replicator_of(east)
    await until(lambda: replicator.subscription.backlog == 1)
    return replicator


async def test_chunks_that_were_published_long_ago_are_sent(pair: Pair) -> None:
    east, west = pair
    await make(east)
    await make(west)
    chunks = [
        pb.MessageMetadata(
            publish_time=1,
            uuid="u",
            chunk_id=number,
            num_chunks_from_msg=3,
            total_chunk_msg_size=3,
        )
        for number in range(3)
    ]
    await publish(east, [b"a", b"b", b"c"], chunks)
    await until(lambda: is_done(east))
    assert await payloads_of(west) == [b"a", b"b", b"c"]


async def test_a_message_whose_last_chunk_never_comes_holds_the_cursor_for_a_time_only(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_CHUNKS_WAIT_S", -1)
    east, west = pair
    await make(east)
    await make(west)
    first = pb.MessageMetadata(
        uuid="u", chunk_id=0, num_chunks_from_msg=2, total_chunk_msg_size=2, publish_time=1
    )
    await publish(east, [b"a"], [first])
    await until(lambda: is_done(east))
    assert await payloads_of(west) == []


async def test_a_sender_whose_backlog_expired_while_the_cluster_was_away_sends_what_comes_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
    east, west = pair
    await make(east)
    await make(west)
    await west.stop()
    await publish(east, [b"expired"])
    replicator = replicator_of(east)
    await until(lambda: bool(failure_of(segments_of(east)[0])))
    await replicator.subscription.skip_oldest(100)
    await until(lambda: replicator.resting)
    await west.start()
    await publish(east, [b"later"])
    await until(lambda: is_done(east))
    assert await payloads_of(west) == [b"later"]


async def test_a_sealed_segment_whose_backlog_expired_is_drained_although_it_may_not_send(
    pair: Pair,
) -> None:
    east, west = pair
    replicator = await hold_back(east, west)
    await replicator.subscription.skip_oldest(100)
    await split(east, 0)
    await until(lambda: replicator.resting)


async def test_a_sealed_segment_whose_backlog_expired_is_not_taken_for_a_restored_one(
    pair: Pair,
) -> None:
    east, west = pair
    replicator = await hold_back(east, west)
    await split(east, 0)
    await until(lambda: east.broker.topics.loaded()[SEGMENT].sealed)
    before = await east.broker.scalable.get(parse_topic_name(TOPIC))
    await replicator.subscription.skip_oldest(100)
    # Its children were told that it is drained, and have told the other cluster so.
    told = ReplicatedRanges.nothing(0, 0xFFFF).all_raised(EVERYTHING)
    await replicator.accept(0, told)
    after = await east.broker.scalable.get(parse_topic_name(TOPIC))
    assert after.incarnation == before.incarnation
