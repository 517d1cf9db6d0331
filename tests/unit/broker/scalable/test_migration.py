"""Migration: an ordinary topic becomes scalable in place, and every crash in between."""

import asyncio
from dataclasses import replace

import pytest

from broker.scalable.layout import IllegalSegmentCount, migrated
from broker.scalable.migration import IllegalMigration, UnmanagedClientsAttached
from broker.scalable.records import ScalableTopicRecord, decode_topic, encode_topic
from broker.scalable.segment_requests import ViewSegment
from broker.scalable.segment_view import SegmentView
from broker.scalable.topic_store import ScalableTopicExists
from broker.topics.consumer import Consumer, SubscribeRequest, SubscriptionType
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.topic import Topic, TopicNotFound, TopicState, TopicTerminated
from config.bounds import MAX_MIGRATED_PARTITIONS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.message import build_entry
from magnetar.protocol.names import TopicName, parse_topic_name
from storage.metadata.store import MetadataError
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World

ORDINARY = parse_topic_name("persistent://public/default/t")
MANAGED = {MANAGED_PROPERTY: "true"}


async def ordinary(node: Node, partitions: int = 0) -> list[Topic]:
    """An ordinary topic with two entries and a subscription `s` in each partition."""
    if partitions:
        await node.topics.partitioned.create(ORDINARY, partitions, {"team": "a"})
    names = [ORDINARY.partition(index) for index in range(partitions)] or [ORDINARY]
    topics = [await node.topics.get(name, create=True) for name in names]
    for topic in topics:
        await topic.create_subscription("s", EARLIEST)
        await fill(topic, 2)
    return topics


async def fill(topic: Topic, count: int) -> None:
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = [count]

    def done(position: object, error: Exception | None) -> None:
        left[0] -= 1
        if not left[0]:
            written.set_result(None)

    for number in range(count):
        metadata = pb.MessageMetadata(producer_name="p", sequence_id=number, publish_time=1)
        topic.ledger.append(build_entry(metadata, b"m"), done)
    await written


async def settled(node: Node) -> None:
    """Return when the migration has nothing left to do."""
    live = await node.scalable._topics.get(TOPIC)
    await until(lambda: not live.work.busy)
    assert await node.world.steps() == []


async def produce(peer: Peer, topic: Topic, *, managed: bool) -> Producer:
    properties = MANAGED if managed else {}
    return await topic.add_producer(
        ProducerRequest(peer.as_connection(), peer.new_id(), properties=properties)
    )


async def consume(peer: Peer, topic: Topic, name: str, *, managed: bool) -> None:
    await topic.subscribe(
        SubscribeRequest(
            connection=peer.as_connection(),
            consumer_id=peer.new_id(),
            subscription="s",
            type=SubscriptionType.SHARED,
            consumer_name=name,
            metadata=MANAGED if managed else {},
        )
    )


# The layout


def test_partitions_are_sealed_parents_of_as_many_children() -> None:
    made = migrated(["persistent://t/n/x-partition-0", "persistent://t/n/x-partition-1"], now_ms=5)
    parents, children = made.layout.sealed, made.layout.active
    assert made.layout.epoch == 1
    assert [(p.segment_id, p.hash_start, p.hash_end) for p in parents] == [
        (0, 0, 65535),
        (1, 0, 65535),
    ]
    assert [(c.segment_id, c.hash_start, c.hash_end) for c in children] == [
        (2, 0, 32767),
        (3, 32768, 65535),
    ]
    assert {c.parent_ids for c in children} == {(0, 1)}
    assert {p.child_ids for p in parents} == {(2, 3)}


def test_a_topic_of_too_many_partitions_is_refused() -> None:
    names = [f"persistent://t/n/x-partition-{n}" for n in range(MAX_MIGRATED_PARTITIONS + 1)]
    with pytest.raises(IllegalSegmentCount):
        migrated(names, now_ms=0)


def test_the_largest_record_fits() -> None:
    names = [f"persistent://t/n/{'x' * 200}-partition-{n}" for n in range(MAX_MIGRATED_PARTITIONS)]
    record = ScalableTopicRecord(migrated(names, now_ms=0).layout)
    value = encode_topic(record)
    assert len(value) < 300_000
    assert decode_topic(value) == record


# What becomes of the topic


@pytest.mark.parametrize("partitions", [0, 3])
async def test_an_ordinary_topic_becomes_scalable(node: Node, partitions: int) -> None:
    topics = await ordinary(node, partitions)
    count = len(topics)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    record = await node.scalable.get(TOPIC)
    assert [s.legacy_topic_name for s in record.layout.sealed] == [str(t.name) for t in topics]
    assert len(record.layout.active) == count
    assert record.properties == ({"team": "a"} if partitions else {})
    assert all(topic.sealed for topic in topics)
    for segment_id in range(count):
        assert await node.backlog(segment_id) == 2, "positions stay"
    for segment_id in range(count, 2 * count):
        child = await node.segment(segment_id)
        assert child.subscriptions["s"].backlog == 0
        await node.fill(segment_id, 1)
        assert child.subscriptions["s"].backlog == 1, "it begins at Earliest"
    kinds = [entry.kind.value for entry in await node.scalable.history(TOPIC)]
    assert kinds == ["create", "migrate"]


async def test_properties_of_an_unpartitioned_topic_come_along(node: Node) -> None:
    await node.topics.create(ORDINARY, {"team": "a"})
    await node.scalable.migrate(TOPIC, force=False)
    assert (await node.scalable.get(TOPIC)).properties == {"team": "a"}
    await settled(node)


async def test_partitions_that_were_never_used_are_created(node: Node) -> None:
    await node.topics.partitioned.create(ORDINARY, 2)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    for index in (0, 1):
        assert (await node.topics.get(ORDINARY.partition(index), create=False)).sealed


async def test_what_cannot_be_migrated_is_refused(node: Node) -> None:
    with pytest.raises(TopicNotFound):
        await node.scalable.migrate(TOPIC, force=False)
    await ordinary(node, 2)
    with pytest.raises(IllegalMigration):
        await node.scalable.migrate(ORDINARY.partition(0), force=False)
    await node.scalable.migrate(ORDINARY, force=False)
    with pytest.raises(ScalableTopicExists):
        await node.scalable.migrate(TOPIC, force=False)
    await settled(node)


# Clients


async def test_a_v5_client_of_the_ordinary_topic_is_sent_the_layout(node: Node) -> None:
    (topic,) = await ordinary(node)
    peer = node.peer()
    await peer.watch(ORDINARY)
    (first,) = peer.layouts()
    assert first.dag.segments[0].legacy_topic_name == str(ORDINARY)
    producer = await produce(peer, topic, managed=True)
    await consume(peer, topic, "c", managed=True)
    await node.scalable.migrate(TOPIC, force=False)
    await until(lambda: bool(peer.sent))
    (pushed,) = peer.layouts()
    assert pushed.resolved_topic_name == str(TOPIC)
    assert pushed.dag.epoch == 1
    assert [(s.segment_id, s.state) for s in pushed.dag.segments] == [
        (0, pb.SEALED),
        (1, pb.ACTIVE),
    ]
    assert topic.state is TopicState.SEALING, "the producer may finish"
    with pytest.raises(TopicTerminated):
        await produce(peer, topic, managed=True)
    await producer.close()
    await settled(node)
    assert topic.sealed
    await node.scalable.split(TOPIC, 1)
    assert [update.dag.epoch for update in peer.layouts()] == [2], "later layouts come too"
    await settled(node)


async def test_a_session_that_is_being_opened_gets_the_real_layout_once(node: Node) -> None:
    await ordinary(node)
    peer = node.peer()
    count = node.scalable.sessions._partition_count

    async def migrating(name: TopicName) -> int:
        await node.scalable.migrate(TOPIC, force=False)
        return await count(name)

    node.scalable.sessions._partition_count = migrating
    await peer.watch(ORDINARY)
    (only,) = peer.layouts()
    assert only.dag.epoch == 1
    await settled(node)


async def test_a_scalable_topic_beside_an_ordinary_one_leaves_its_sessions_alone(
    node: Node,
) -> None:
    await ordinary(node)
    peer = node.peer()
    await peer.watch(ORDINARY)
    peer.layouts()
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.scalable.split(TOPIC, 0)
    assert peer.layouts() == []
    assert not peer.closing
    await settled(node)


@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_v4_clients_prevent_a_migration_unless_forced(node: Node, role: str) -> None:
    topics = await ordinary(node, 2)
    peer = node.peer()
    if role == "producer":
        producer = await produce(peer, topics[1], managed=False)
    else:
        await consume(peer, topics[1], "c", managed=False)
    with pytest.raises(UnmanagedClientsAttached, match=role):
        await node.scalable.migrate(TOPIC, force=False)
    assert await node.world.steps() == []
    assert await node.world.stored_segments() == []
    assert not await node.scalable.exists(TOPIC)
    assert topics[1].state is TopicState.OPEN
    await node.scalable.migrate(TOPIC, force=True)
    if role == "producer":
        await producer.close()
    await settled(node)
    with pytest.raises(TopicTerminated):
        await produce(peer, topics[1], managed=False)


async def test_a_v4_client_that_attaches_meanwhile_has_the_migration_undone(node: Node) -> None:
    (topic,) = await ordinary(node)
    prepare = node.scalable._segments.prepare
    peer = node.peer()

    async def attaching(*arguments: object) -> None:
        await prepare(*arguments)  # type: ignore[arg-type]
        await produce(peer, topic, managed=False)

    node.scalable._segments.prepare = attaching  # type: ignore[assignment,method-assign]
    with pytest.raises(UnmanagedClientsAttached):
        await node.scalable.migrate(TOPIC, force=False)
    assert await node.world.steps() == []
    assert await node.world.stored_segments() == []
    assert topic.state is TopicState.OPEN


# Ordered consumers, pruning and deletion


async def test_ordered_consumers_read_the_old_partitions_first(node: Node) -> None:
    await ordinary(node, 2)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    peer = node.peer()
    _, answer = await peer.register("c")
    topics = [s.segment_topic for s in answer.assignment.segments]
    assert topics == [str(ORDINARY.partition(0)), str(ORDINARY.partition(1))]
    await node.drain(0)
    assert peer.assignments()[-1][1] == [1], "children wait for every partition"
    await node.drain(1)
    await until(lambda: bool(peer.sent))
    assert peer.assignments()[-1][1] == [2, 3]


async def test_drained_partitions_are_pruned_with_the_partitioned_topic(node: Node) -> None:
    await ordinary(node, 2)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    await node.drain(0)
    await node.scalable.prune_all()
    assert set(await node.states()) == {1, 2, 3}
    assert await node.topics.partitioned.count(ORDINARY) == 2
    with pytest.raises(TopicNotFound):
        await node.topics.get(ORDINARY.partition(0), create=True)
    await node.drain(1)
    await node.scalable.prune_all()
    assert set(await node.states()) == {2, 3}
    assert await node.topics.partitioned.count(ORDINARY) == 0
    assert not await node.topics.exists(ORDINARY.partition(1))
    with pytest.raises(TopicNotFound):
        await node.topics.get(ORDINARY.partition(1), create=True)
    with pytest.raises(TopicNotFound):
        await node.topics.get(ORDINARY, create=True)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_deletion_takes_the_old_partitions_along(node: Node, partitions: int) -> None:
    topics = await ordinary(node, partitions)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    await node.scalable.delete(TOPIC, force=False)
    assert await node.topics.partitioned.count(ORDINARY) == 0
    for topic in topics:
        assert not await node.topics.exists(topic.name)
    assert await node.world.steps() == []
    again = await node.topics.get(ORDINARY, create=True)
    assert not again.sealed


# Crashes


async def check_whole(node: Node, partitions: int) -> bool:
    """Everything agrees; whether the topic is scalable."""
    assert await node.world.steps() == []
    names = [ORDINARY.partition(index) for index in range(partitions)] or [ORDINARY]
    topics = [await node.topics.get(name, create=False) for name in names]
    scalable = await node.scalable.exists(TOPIC)
    assert [topic.sealed for topic in topics] == [scalable] * len(topics)
    for topic in topics:
        assert topic.subscriptions["s"].backlog == 2
    if not scalable:
        assert await node.world.stored_segments() == []
        return False
    layout = (await node.scalable.get(TOPIC)).layout
    for segment in layout.active:
        assert "s" in (await node.segment(segment.segment_id)).subscriptions
    history = await node.scalable.history(TOPIC)
    assert [entry.epoch for entry in history] == [0, 1]
    return True


@pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_crash_after_any_write_is_undone_or_finished(partitions: int) -> None:
    finished, died_at = False, 0
    outcomes: set[bool] = set()
    while not finished:
        died_at += 1
        node = await Node(World()).start()
        await ordinary(node, partitions)
        node.mortal.writes.clear()
        node.mortal.dies_at = died_at
        work = asyncio.ensure_future(node.scalable.migrate(TOPIC, force=False))
        await until(lambda: node.process.dead or is_done(node, work))  # noqa: B023
        finished = not node.process.dead
        node = await node.kill()
        outcomes.add(await check_whole(node, partitions))
        if not await node.scalable.exists(TOPIC):
            await node.scalable.migrate(TOPIC, force=False)
        await settled(node)
        assert await check_whole(node, partitions)
        await node.stop()
    assert died_at > 6, "the migration is more than a few writes"
    assert outcomes == {False, True}, "some crashes are undone, some finished"


def is_done(node: Node, work: asyncio.Future[None]) -> bool:
    live = node.scalable._topics.known(TOPIC)
    return work.done() and live is not None and not live.work.busy


@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_outcome_is_settled_by_reading(node: Node, applied: bool) -> None:
    await ordinary(node)
    peer = node.peer()
    await peer.watch(ORDINARY)
    peer.layouts()
    node.mortal.faults = {"/topics/public/default/t": applied}
    if applied:
        await node.scalable.migrate(TOPIC, force=False)
    else:
        with pytest.raises(MetadataError):
            await node.scalable.migrate(TOPIC, force=False)
        await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    assert [update.dag.epoch for update in peer.layouts()] == [1]


async def test_a_migration_that_is_undone_spares_the_children_of_another(node: Node) -> None:
    await ordinary(node)
    made = migrated([str(ORDINARY)], now_ms=0)
    migrator = node.scalable._migrator
    own, other = migrator._step(TOPIC, made), migrator._step(TOPIC, made)
    assert own != other
    await node.scalable._store.begin(other)
    (child,) = own.makes
    await node.scalable._segments.prepare(child, own.ends, {})
    await node.scalable._reshaper._try_to_undo(own)
    assert await node.world.stored_segments() == [child.descriptor]
    await node.scalable._store.end(other)
    await node.scalable._reshaper._undo(replace(own))
    assert await node.world.stored_segments() == []


async def test_subscription_made_while_sealing_is_carried_over(node: Node) -> None:
    (topic,) = await ordinary(node)
    producer = await produce(node.peer(), topic, managed=True)
    await node.scalable.migrate(TOPIC, force=False)
    await topic.create_subscription("new", LATEST)
    await producer.close()
    await settled(node)
    assert "new" in (await node.segment(1)).subscriptions


async def test_a_reader_of_a_client_that_follows_the_layout_is_no_v4_client(node: Node) -> None:
    (topic,) = await ordinary(node)
    peer, other = node.peer(), node.peer()
    await peer.watch(ORDINARY)
    readers = [await read(each, topic) for each in (peer, other)]
    with pytest.raises(UnmanagedClientsAttached, match=readers[1].name):
        await node.scalable.migrate(TOPIC, force=False)
    readers[1].close()
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)


async def read(peer: Peer, topic: Topic) -> Consumer:
    number = peer.new_id()
    return await topic.subscribe(
        SubscribeRequest(
            connection=peer.as_connection(),
            consumer_id=number,
            subscription=f"reader-{id(peer)}",
            type=SubscriptionType.EXCLUSIVE,
            consumer_name=f"reader-{id(peer)}",
            durable=False,
        )
    )


async def test_migration_that_a_former_process_publishes_late_is_finished(node: Node) -> None:
    """It stood still while its step was undone, and died before it had sealed anything."""
    (topic,) = await ordinary(node)
    made = migrated([str(ORDINARY)], now_ms=1)
    step = node.scalable._migrator._step(TOPIC, made)
    await node.scalable._store.begin(step)
    await node.scalable.prune_all()
    assert await node.world.steps() == [], "it is undone"
    await node.scalable._store.create(TOPIC, ScalableTopicRecord(made.layout))
    assert not topic.sealed
    await node.scalable.prune_all()
    await settled(node)
    assert topic.sealed
    assert "s" in (await node.segment(1)).subscriptions
    await node.scalable.prune_all()
    assert set(await node.states()) == {0, 1}


async def test_partitions_that_are_known_to_be_sealed_are_not_asked_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ordinary(node, 3)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
    live = await node.live()
    asked: list[object] = []
    ask = node.scalable._segments.ask

    async def counting(request: ViewSegment) -> SegmentView:
        asked.append(request)
        return await ask(request)

    monkeypatch.setattr(node.scalable._segments, "ask", counting)
    await node.scalable._migrator.finish_late(live)
    assert len(asked) == 3
    await node.scalable._migrator.finish_late(live)
    assert len(asked) == 3


async def test_a_reader_beside_a_managed_client_of_its_connection_is_no_v4_client(
    node: Node,
) -> None:
    (topic,) = await ordinary(node)
    peer = node.peer()
    await read(peer, topic)
    with pytest.raises(UnmanagedClientsAttached):
        await node.scalable.migrate(TOPIC, force=False)
    await consume(peer, topic, "c", managed=True)
    await node.scalable.migrate(TOPIC, force=False)
    await settled(node)
