"""Segments that go to another broker while their leader asks another cluster of subscriptions."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import magnetar
from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster as Brokers
from tests.unit.broker.placement.cluster import Node
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster
from tests.unit.broker.replication.held_questions import HeldQuestions
from tests.unit.broker.replication.test_scalable_topics import TOPIC, Writer, Written, make
from tests.unit.broker.replication.test_scalable_topics_of_several import (
    replicate_back,
    two_brokers,
)
from tests.unit.broker.replication.test_segment_subscriptions import (
    SUB,
    acknowledge,
    segment,
    subscribe,
)
from tests.unit.broker.scalable.node import TOPIC as NAME
from tests.unit.broker.scalable.several import hold, take_lead

TO_WEST = REPLICATOR_PREFIX + "west"
SEGMENT = SegmentName(NAME, 0, 0xFFFF, 0)
QUICK = {"replicated_subscriptions_snapshot_frequency_ms": 50}
NEVER = {"replicated_subscriptions_snapshot_frequency_ms": 10**9}


def segment_of(node: Node) -> Topic:
    return node.broker.topics.loaded()[str(SEGMENT)]


def subscription_of(node: Node) -> Subscription:
    return segment_of(node).subscriptions[SUB]


async def acknowledge_at(node: Node, indexes: Sequence[int]) -> None:
    """Acknowledge the entries with these numbers."""
    positions = [segment_of(node).ledger.entry_at(each) for each in indexes]
    subscription_of(node).acknowledge(None, [(each, (), 0) for each in positions])


async def read_by(node: Node) -> None:
    """Have the owner of the segment read what its subscription has left."""
    await node.broker.scalable.local_segments.subscription_state(SEGMENT, "west")


async def write(node: Node) -> int:
    """Write entries of one message each; their number."""
    written: Written = {}
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{node.broker.port}") as client,
        client.producer(TOPIC, batching=False) as producer,
    ):
        await Writer(client, producer, "east", written).write(1)
    return sum(map(len, written.values()))


class East:
    """Two brokers: one leads the topic, the other one owns its segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, leader: Node, owner: Node) -> None:
        self.leader, self.owner = leader, owner
        self.held = HeldQuestions(monkeypatch, leader.broker)


@asynccontextmanager
async def east_and_west(
    monkeypatch: pytest.MonkeyPatch, brokers: Brokers, directory: Path, **settings: object
) -> AsyncIterator[tuple[East, Cluster]]:
    """Both have the subscription.  The questions of the east are held, and the west asks none."""
    west = Cluster(directory, "west", **NEVER)
    await west.start()
    leader, owner = await two_brokers(brokers, west, **QUICK, **settings)
    await replicate_back(west, leader)
    await make(west, 1)
    await subscribe(west)
    await leader.broker.scalable.create(NAME, segments=1, properties={})
    await take_lead(leader)
    await hold(owner, str(SEGMENT))
    both = East(monkeypatch, leader, owner)
    await segment_of(owner).create_subscription(SUB, EARLIEST, replicated=True)
    try:
        yield both, west
    finally:
        both.held.let_go()
        await west.stop()


async def skip_what_is_not_sent(owner: Node, west: Cluster) -> tuple[int, int]:
    """Write entries that the west gets, and some that are skipped; the numbers of both."""
    replicators = segment_of(owner).replicator_cursors
    await until(lambda: TO_WEST in replicators)
    sent = await write(owner)
    await until(lambda: not replicators[TO_WEST].backlog)
    # It takes nothing of what comes.
    await west.ask("POST", f"{NAMESPACE}/encryptionRequired", True)
    count = await write(owner)
    assert await replicators[TO_WEST].skip_oldest(count) == count
    return sent, count


async def test_owner_that_dies_before_its_skipped_replicator_is_durable_moves_nothing(
    cluster: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with east_and_west(monkeypatch, cluster, tmp_path, cursor_flush_ms=10**6) as (east, west):
        sent, count = await skip_what_is_not_sent(east.owner, west)
        await east.held.until_taken()
        await acknowledge_at(east.owner, range(sent))
        await east.held.until_answered()
        await east.owner.kill()
        await until(lambda: east.leader.placement.candidates == (east.leader.id,))
        await hold(east.leader, str(SEGMENT))
        # The acknowledgements were lost with their owner.
        assert subscription_of(east.leader).backlog == sent + count
        await read_by(east.leader)
        await east.held.until_taken()
        assert subscription_of(east.leader).backlog == sent + count


async def test_entries_skipped_by_a_dead_owner_are_consumed_at_home_alone(
    cluster: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = east_and_west(monkeypatch, cluster, tmp_path, cursor_flush_ms=10**6)
    async with stage as (east, west):
        sent, count = await skip_what_is_not_sent(east.owner, west)
        # The west is told that all up to here was answered.
        last = segment_of(east.owner).ledger.last_confirmed
        sources = (await segment(west)).sequence_store.sources
        assert sources is not None
        await until(
            lambda: all(
                run.mark.position >= last
                for each in sources.durable().values()
                for run in each.runs
            )
        )
        await east.owner.kill()
        await until(lambda: east.leader.placement.candidates == (east.leader.id,))
        await hold(east.leader, str(SEGMENT))
        replicators = segment_of(east.leader).replicator_cursors
        await until(lambda: TO_WEST in replicators and not replicators[TO_WEST].backlog)
        await acknowledge(west, range(sent))
        for number in range(2):
            await acknowledge_at(east.leader, [number])
            await east.held.until_taken()
        assert count <= subscription_of(east.leader).backlog <= sent + count - 2


async def test_next_owner_takes_an_answer_for_what_was_sent_before_the_question(
    cluster: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with east_and_west(monkeypatch, cluster, tmp_path) as (east, west):
        replicators = segment_of(east.owner).replicator_cursors
        await until(lambda: TO_WEST in replicators)
        sent = await write(east.owner)
        await until(lambda: not replicators[TO_WEST].backlog)
        await east.held.until_taken()
        await acknowledge(west, range(sent))
        await east.held.until_answered()
        await east.owner.stop()
        await until(lambda: east.leader.placement.candidates == (east.leader.id,))
        await hold(east.leader, str(SEGMENT))
        later = await write(east.leader)
        copies = (await segment(west)).ledger
        await until(lambda: copies.entry_count == sent + later)
        await acknowledge(west, range(sent, sent + later))
        await read_by(east.leader)
        assert subscription_of(east.leader).backlog == sent + later
        await east.held.until_taken()
        assert subscription_of(east.leader).backlog == later
        await east.held.until_taken()
        assert subscription_of(east.leader).backlog == 0
