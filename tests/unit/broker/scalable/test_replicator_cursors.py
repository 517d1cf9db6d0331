"""Cursors of replicators in segments: children have them, sealed segments wait for them."""

from collections.abc import Callable

import pytest

from broker.policies.namespaces import Namespaces
from broker.replication.batch_opener import BatchOpener
from broker.replication.errors import RemoteRefused
from broker.replication.list_checks import ListChecks, ReplicationList
from broker.replication.remote_cluster import RemoteCluster
from broker.replication.replicated_segment import ReplicatedSegment
from broker.replication.segment_subscriptions import Exchange
from broker.replication.subscription_backlog import EntryRoom
from broker.scalable.records import topic_path
from broker.scalable.segment_requests import CreateSubscription
from broker.topics.compaction.reserved import ReservedSubscription
from broker.topics.replication import TopicReplication
from broker.topics.source_topics import SourceTopics
from broker.topics.topic import Topic
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import NamespaceName, SegmentName, TopicName
from storage.callbacks import ignore
from storage.managed_ledger.ledger import ManagedLedger
from storage.metadata.store import MetadataError
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.scalable.node import TOPIC, Node, World
from tests.unit.broker.scalable.several import hold, take_lead
from tests.unit.broker.scalable.stored import nothing_is_noted

WHOLE = SegmentName(TOPIC, 0, 0xFFFF, 0)
LEDGERS = "/managed-ledgers/public/default/segment/t"
EAST, WEST = "pulsar.repl.east", "pulsar.repl.west"


async def finished(node: Node) -> None:
    """Return when the layout's changes are all done."""
    live = await node.live()
    await until(lambda: not live.work.busy)


async def cursors(node: Node, segment_id: int) -> dict[str, int]:
    """The backlogs of the cursors in a segment."""
    found = (await node.segment(segment_id)).replicator_cursors
    return {name: cursor.backlog for name, cursor in found.items()}


async def drain(node: Node, segment_id: int, name: str) -> None:
    """Let a cluster have all of a segment."""
    segment = await node.segment(segment_id)
    segment.replicator_cursors[name].cursor.acknowledge_up_to(segment.ledger.last_confirmed)


@pytest.fixture
async def parent(node: Node) -> Topic:
    """Segment 0, with a cursor at its start, and three messages."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    await segment.open_replicator_cursor(WEST, EARLIEST)
    await node.fill(0, 3)
    return segment


async def test_children_of_a_split_have_positions_before_their_layout_is_published(
    node: Node, parent: Topic
) -> None:
    node.mortal.writes.clear()
    await node.scalable.split(TOPIC, 0)
    writes = node.mortal.writes
    made = [
        writes.index(f"put {LEDGERS}/{child}/{WEST}") for child in ("0000-7fff-1", "8000-ffff-2")
    ]
    assert max(made) < writes.index(f"put {topic_path(TOPIC)}")
    await node.fill(1, 2)
    assert await cursors(node, 1) == {WEST: 2}
    assert not (await node.segment(1)).subscriptions
    await finished(node)
    assert await cursors(node, 0) == {WEST: 3}


async def test_position_where_replicator_began_is_noted_with_its_cursor(
    node: Node, parent: Topic
) -> None:
    await parent.open_replicator_cursor(EAST, LATEST)
    first = parent.ledger.entry_at(0)
    began = {name: each.cursor.began for name, each in parent.replicator_cursors.items()}
    assert began == {WEST: EARLIEST, EAST: first._replace(entry_id=2)}
    await node.scalable.split(TOPIC, 0)
    await node.fill(1, 2)
    child = await node.segment(1)
    for each in child.replicator_cursors.values():
        assert each.cursor.began is not None
        assert each.cursor.began < child.ledger.entry_at(0)


async def test_entries_that_are_skipped_count_as_not_sent(node: Node, parent: Topic) -> None:
    west = parent.replicator_cursors[WEST]
    west.skip(parent.ledger.entry_at(0))
    assert west.cursor.began == EARLIEST
    assert await west.skip_oldest(1) == 1
    assert west.cursor.began == parent.ledger.entry_at(1)
    # As an eviction by a backlog quota does.
    assert await west.expire_before(LATEST) == 1
    assert west.cursor.began == parent.ledger.entry_at(2)
    after = await node.kill()
    found = (await after.segment(0)).replicator_cursors[WEST].cursor
    assert found.began is not None
    assert found.began <= found.mark_delete


async def test_a_merged_segment_has_the_positions_of_all_its_parents(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    for segment_id, name in enumerate((EAST, WEST)):
        await (await node.segment(segment_id)).open_replicator_cursor(name, LATEST)
    await node.scalable.merge(TOPIC, (0, 1))
    await finished(node)
    assert await cursors(node, 2) == {EAST: 0, WEST: 0}


async def test_a_cursor_made_while_the_parent_is_sealed_reaches_the_children(
    node: Node, parent: Topic
) -> None:
    producer = await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    await node.fill(1, 2)
    await parent.open_replicator_cursor(EAST, LATEST)
    assert EAST not in await cursors(node, 1)
    await producer.close()
    await finished(node)
    assert await cursors(node, 1) == {EAST: 2, WEST: 2}


async def test_a_killed_process_leaves_the_positions_of_children_to_its_successor(
    node: Node, world: World, parent: Topic
) -> None:
    await node.scalable.split(TOPIC, 0)
    after = await node.kill()
    await finished(after)
    for segment_id in (1, 2):
        assert await cursors(after, segment_id) == {WEST: 0}
    assert await cursors(after, 0) == {WEST: 3}
    await after.stop()


async def test_a_sealed_segment_stays_until_the_other_cluster_has_it(
    node: Node, parent: Topic
) -> None:
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    await node.scalable.prune_all()
    assert 0 in await node.states()
    await drain(node, 0, WEST)
    await node.scalable.prune_all()
    assert set(await node.states()) == {1, 2}


async def test_a_deleted_cursor_holds_a_sealed_segment_no_longer(node: Node, parent: Topic) -> None:
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    await parent.delete_replicator_cursor(WEST)
    await node.scalable.prune_all()
    assert set(await node.states()) == {1, 2}


# The list of clusters


class NoClusters:
    """`SegmentRemotes` that reach none."""

    local = "standalone"
    start = LATEST
    exchange = Exchange(True, 1.0, ignore, EntryRoom())

    def __init__(self, node: Node) -> None:
        self.schemas = node.schemas
        self.batches = BatchOpener()
        self.lists = ListChecks(self.local, list, self._list_there, BackgroundTasks())

    def list_of(self, namespace: NamespaceName) -> frozenset[str]:
        return frozenset()

    async def partitions(self, topic: TopicName) -> int:
        return 0

    async def _list_there(self, remote: str, here: ReplicationList) -> frozenset[str] | None:
        return None

    def cluster(self, name: str) -> RemoteCluster:
        raise RemoteRefused(f"The test has no cluster {name}.")

    def source_topics(self) -> SourceTopics:
        raise AssertionError("no replicator is made")


def replicating(node: Node) -> Callable[[Topic], TopicReplication]:
    return lambda topic: ReplicatedSegment(topic, NoClusters(node), ignore)


def listing(*clusters: str) -> Callable[[dict[str, object]], None]:
    """Puts a list of clusters into the record of a namespace."""

    def change(record: dict[str, object]) -> None:
        record["replication_clusters"] = list(clusters)

    return change


async def replicate(node: Node, *clusters: str) -> None:
    """Set the namespace's list, and have loaded segments apply it."""
    namespaces: Namespaces = node.namespaces
    await namespaces.change(TOPIC.namespace_name, listing(*clusters))
    for topic in node.topics.loaded().values():
        topic.apply_policies(node.policies.of(topic.name))


async def test_positions_of_clusters_that_left_the_list_are_deleted(node: Node) -> None:
    node.topics.replicate = replicating(node)
    await replicate(node, "standalone", "east", "west")
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    for name in (EAST, WEST):
        await segment.open_replicator_cursor(name, EARLIEST)
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    loaded = [await node.segment(segment_id) for segment_id in (0, 1, 2)]
    await replicate(node, "standalone", "east")
    await until(lambda: all(set(each.replicator_cursors) == {EAST} for each in loaded))
    assert all(set(each.ledger.cursors) == {EAST} for each in loaded)


async def test_a_child_deletes_at_its_load_what_left_the_list_meanwhile(node: Node) -> None:
    node.topics.replicate = replicating(node)
    await replicate(node, "standalone", "west")
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).open_replicator_cursor(WEST, EARLIEST)
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    assert await cursors(node, 1) == {WEST: 0}
    for topic in list(node.topics.loaded().values()):
        await node.topics.unload(topic.name)
    await replicate(node)
    child = await node.segment(1)
    await until(lambda: not child.replicator_cursors)


async def test_a_cursor_carried_over_late_is_deleted_if_the_list_does_not_name_it(
    node: Node,
) -> None:
    node.topics.replicate = replicating(node)
    await replicate(node, "standalone", "east")
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    for name in (WEST, EAST):
        await node.ask(CreateSubscription(WHOLE, name, EARLIEST))
    await until(lambda: set(segment.replicator_cursors) == {EAST})
    assert set(segment.ledger.cursors) == {EAST}


async def test_a_cursor_that_cannot_be_deleted_is_tried_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.replication.cluster_replicators.REPLICATION_RETRY_MIN_S", 0.001)
    node.topics.replicate = replicating(node)
    await replicate(node, "standalone", "west")
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    await segment.open_replicator_cursor(WEST, EARLIEST)
    delete, failures = ManagedLedger.delete_cursor, [MetadataError("The test says no.")]

    async def failing(ledger: ManagedLedger, name: str) -> None:
        if failures:
            raise failures.pop()
        await delete(ledger, name)

    monkeypatch.setattr(ManagedLedger, "delete_cursor", failing)
    await replicate(node)
    await until(lambda: not segment.replicator_cursors)
    assert not failures


# Several brokers


async def test_children_on_other_brokers_have_the_positions_of_their_parent(
    cluster: Cluster,
) -> None:
    a, b = await cluster.add(), await cluster.add()
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await a.broker.namespaces.change(TOPIC.namespace_name, listing("standalone", "west"))
    await hold(b, str(WHOLE))
    await until(lambda: "west" in b.broker.policies.of(WHOLE.topic_name).replication_clusters)
    await take_lead(a)
    await b.broker.topics.loaded()[str(WHOLE)].open_replicator_cursor(WEST, EARLIEST)
    await a.broker.scalable.split(TOPIC, 0)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    for child in ("0000-7fff-1", "8000-ffff-2"):
        assert await cluster.metadata.children(f"{LEDGERS}/{child}") == [WEST]
    await a.broker.namespaces.change(TOPIC.namespace_name, listing("standalone"))
    loaded = [topic for each in (a, b) for topic in each.broker.topics.loaded().values()]
    await until(lambda: not any(topic.replicator_cursors for topic in loaded))


# Names


async def test_no_subscription_of_a_scalable_topic_has_the_name_of_a_cursor(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    with pytest.raises(ReservedSubscription, match="the name of a replicator's cursor"):
        await node.scalable.create_subscription(TOPIC, WEST, kind="QUEUE", start=EARLIEST)
    _, answer = await node.peer().register("consumer", WEST)
    assert answer.error == pb.NotAllowedError
    assert not (await node.segment(0)).replicator_cursors
