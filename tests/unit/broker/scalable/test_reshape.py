"""Splits and merges: what is carried over, what is pushed when, and every crash in between."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace

import pytest

from broker.scalable import layout, steps
from broker.scalable.layout import IllegalReshape, UnknownSegment
from broker.scalable.local_segments import SegmentNamed
from broker.scalable.records import ScalableTopicRecord, segment_of
from broker.scalable.reshape import step_of
from broker.scalable.segment_requests import DeleteSegment
from broker.scalable.segment_view import CarriedSubscription
from broker.scalable.segments import Segments
from broker.scalable.steps import Step, StepKind
from broker.scalable.topic_store import ConcurrentChange, ScalableTopicNotFound, StoredTopic
from broker.topics.carried_ids import last_carried
from broker.topics.completeness import Completeness
from broker.topics.deduplication import NO_POSITION
from broker.topics.sequence_store import awaited_property
from broker.topics.topic import TopicNotFound, TopicState, TopicTerminated
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name, segment_name
from storage.metadata.store import MetadataError
from tests.support.waiting import until, until_awaited
from tests.unit.broker.scalable.node import TOPIC, Node, World


async def sealed(node: Node, *segments: int) -> None:
    """Return when these segments are terminated and nothing is left to do."""
    found = [await node.segment(segment_id) for segment_id in segments]
    await until(lambda: all(segment.sealed for segment in found))
    live = await node.scalable._topics.get(TOPIC)
    await until(lambda: not live.work.busy)
    assert await node.world.steps() == []


async def test_children_have_the_parents_subscriptions_at_earliest(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    parent = await node.segment(0)
    await parent.create_subscription("all", EARLIEST, properties={"who": "me"})
    await parent.create_subscription("late", LATEST)
    await node.fill(0, 5)
    await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    await node.fill(1, 3)
    for segment_id in (1, 2):
        child = await node.segment(segment_id)
        assert set(child.subscriptions) == {"all", "late"}
        assert child.subscriptions["all"].cursor.properties == {"who": "me"}
    assert await node.backlog(1, "late") == 3
    assert await node.backlog(0, "all") == 5


async def test_children_have_the_replicated_flag_of_their_parents_subscriptions(
    node: Node,
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    parent = await node.segment(0)
    for name in ("replicated", "local"):
        subscription = await parent.create_subscription(name, EARLIEST, properties={"who": "me"})
        await subscription.cursor.set_replicated(name == "replicated")
    await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    # Of two parents one is enough.
    await (await node.segment(1)).subscriptions["local"].cursor.set_replicated(True)
    await node.scalable.merge(TOPIC, (1, 2))
    await sealed(node, 1, 2)
    for segment_id, replicated in ((2, {"replicated"}), (3, {"replicated", "local"})):
        cursors = {n: s.cursor for n, s in (await node.segment(segment_id)).subscriptions.items()}
        assert {name for name, cursor in cursors.items() if cursor.replicated} == replicated
        assert all(cursor.properties == {"who": "me"} for cursor in cursors.values())


async def test_children_are_complete_of_the_clusters_that_all_parents_are(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    for segment_id, clusters in ((0, {"east", "west"}), (1, {"west"})):
        parent = await node.segment(segment_id)
        noted = Completeness(clusters=frozenset(clusters))
        await parent.create_subscription("s", EARLIEST, replicated=True, completeness=noted)
    await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    split = (await node.segment(2)).subscriptions["s"].cursor.replication_note
    assert Completeness.parse(split) == Completeness(True, "", frozenset({"east", "west"}), {})
    await node.scalable.merge(TOPIC, (3, 1))
    await sealed(node, 1, 3)
    merged = (await node.segment(4)).subscriptions["s"].cursor.replication_note
    assert Completeness.parse(merged) == Completeness(True, "", frozenset({"west"}), {})


async def test_readers_are_not_carried_over(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.peer().attach(0, "c", "reader-1", durable=False)
    await node.scalable.split(TOPIC, 0)
    assert not (await node.segment(1)).subscriptions


async def test_a_merged_child_has_the_subscriptions_of_both(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    await (await node.segment(0)).create_subscription("a", EARLIEST)
    await (await node.segment(1)).create_subscription("b", EARLIEST)
    await node.scalable.merge(TOPIC, (1, 0))
    assert set((await node.segment(2)).subscriptions) == {"a", "b"}
    await sealed(node, 0, 1)


async def test_rebucket_of_several_segments_gives_each_child_its_own_parent(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    peer = node.peer()
    await peer.watch()
    for segment_id, name in enumerate("ab"):
        await (await node.segment(segment_id)).create_subscription(name, EARLIEST)
        producer = await peer.produce(segment_id)
        await producer.close()
    awaited: dict[int, str] = {}
    prepare = node.scalable._segments.prepare

    async def noting(
        child: SegmentName,
        parents: Iterable[SegmentName],
        subscriptions: Mapping[str, CarriedSubscription],
    ) -> None:
        parents = list(parents)
        awaited[child.segment_id] = awaited_property(parents)
        await prepare(child, parents, subscriptions)

    node.scalable._segments.prepare = noting  # type: ignore[method-assign]
    await node.scalable.rebucket(TOPIC, (1, 0), 5)
    await sealed(node, 0, 1)
    assert [update.dag.epoch for update in peer.layouts()] == [0, 1], "one change, one push"
    live = await node.live()
    assert [s.entry_buckets for s in live.layout.active] == [5, 5]
    for segment_id, name in ((2, "a"), (3, "b")):
        child = await node.segment(segment_id)
        assert set(child.subscriptions) == {name}
        assert not child.sequence_store.awaits_parents
        parent = segment_of(TOPIC, live.layout.segments[segment_id - 2])
        assert awaited[segment_id] == awaited_property([parent])
    entries = await node.scalable.history(TOPIC)
    assert [(e.kind.value, e.parents, e.children) for e in entries][1:] == [
        ("rebucket", (0, 1), (2, 3))
    ]


async def test_layout_is_sent_before_the_parent_refuses_producers(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer, publisher = node.peer(), node.peer()
    await peer.watch()
    producer = await publisher.produce(0)
    states: list[TopicState] = []
    parent = await node.segment(0)
    send = peer.send

    def noting(command: pb.BaseCommand) -> None:
        states.append(parent.state)
        send(command)

    peer.send = noting  # type: ignore[method-assign]
    await node.scalable.split(TOPIC, 0)
    assert states[0] is TopicState.OPEN
    assert parent.state is TopicState.SEALING
    assert [update.dag.epoch for update in peer.layouts()] == [0, 1]
    with pytest.raises(TopicTerminated):
        await peer.produce(0)
    assert not parent.sealed, "an attached producer may finish"
    await producer.close()
    await sealed(node, 0)


async def test_a_client_whose_producer_is_sealed_gets_the_layout_in_a_pause(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    peer, elsewhere = node.peer(), node.peer()
    for each, segment_id in ((peer, 0), (elsewhere, 1)):
        await each.watch()
        await each.watch()
        await each.produce(segment_id)
    peer.sent.clear()
    epochs: list[int] = []
    at_others: list[list[int]] = []
    send = elsewhere.send

    def noting(command: pb.BaseCommand) -> None:
        epochs.extend(update.dag.epoch for update in peer.layouts())
        at_others.append(list(epochs))
        send(command)

    elsewhere.send = noting  # type: ignore[method-assign]
    await node.scalable.split(TOPIC, 0)
    assert at_others == [[], []], "the others have it before"

    def both_sessions_have_it() -> bool:
        epochs.extend(update.dag.epoch for update in peer.layouts())
        return epochs == [1, 1]

    await until(both_sessions_have_it)


async def test_a_subscription_made_while_sealing_is_carried_over(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer = node.peer()
    producer = await peer.produce(0)
    await node.scalable.split(TOPIC, 0)
    child = segment_name((await node.segment(1)).name)
    assert not await node.scalable.inherits_subscription(child, "new")
    made = await (await node.segment(0)).create_subscription(
        "new", EARLIEST, properties={"who": "me"}
    )
    await made.cursor.set_replicated(True)
    assert await node.scalable.inherits_subscription(child, "new")
    await node.fill(1, 2)
    await producer.close()
    await sealed(node, 0)
    assert await node.backlog(1, "new") == 2
    cursor = (await node.segment(1)).subscriptions["new"].cursor
    assert (cursor.properties, cursor.replicated) == ({"who": "me"}, True)
    await (await node.segment(0)).create_subscription("later", LATEST)
    assert not await node.scalable.inherits_subscription(child, "later")


async def test_subscription_is_carried_over_to_grandchildren(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    producer = await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    await node.scalable.split(TOPIC, 1)
    await (await node.segment(0)).create_subscription("new", EARLIEST)
    await producer.close()
    await sealed(node, 0, 1)
    for segment_id in (1, 2, 3, 4):
        assert "new" in (await node.segment(segment_id)).subscriptions


async def test_requests_at_once_queue_up(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=4, properties={})
    results = await asyncio.gather(
        node.scalable.split(TOPIC, 0),
        node.scalable.split(TOPIC, 0),
        node.scalable.merge(TOPIC, (2, 3)),
        return_exceptions=True,
    )
    assert results[0] is None
    assert isinstance(results[1], IllegalReshape)
    assert results[2] is None
    await sealed(node, 0, 2, 3)
    assert await node.states() == {
        0: "SEALED",
        1: "ACTIVE",
        2: "SEALED",
        3: "SEALED",
        4: "ACTIVE",
        5: "ACTIVE",
        6: "ACTIVE",
    }


async def test_children_just_made_can_be_merged_again(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    await node.scalable.split(TOPIC, 0)
    await node.scalable.merge(TOPIC, (1, 2))
    await sealed(node, 0, 1, 2)
    assert await node.backlog(3) == 0
    kinds = [(entry.kind.value, entry.epoch) for entry in await node.scalable.history(TOPIC)]
    assert kinds == [("create", 0), ("split", 1), ("merge", 2)]


async def test_refusals(node: Node) -> None:
    with pytest.raises(ScalableTopicNotFound):
        await node.scalable.split(TOPIC, 0)
    await node.scalable.create(TOPIC, segments=1, properties={})
    with pytest.raises(UnknownSegment):
        await node.scalable.split(TOPIC, 9)
    assert await node.world.steps() == []


async def test_only_what_the_layout_names_can_be_opened(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    for text in (
        "segment://public/default/t/0000-7fff-0",
        "segment://public/default/t/0000-7fff-1",
        "segment://public/default/other/0000-ffff-0",
    ):
        with pytest.raises(TopicNotFound):
            await node.topics.get(parse_topic_name(text), create=True)


async def test_a_failed_write_leaves_nothing_behind(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.segment(0)
    node.mortal.faults = {"-1/": False, "0000-7fff-1": False}
    with pytest.raises(MetadataError):
        await node.scalable.split(TOPIC, 0)
    await node.scalable.prune_all()
    assert await node.world.steps() == []
    assert await node.world.stored_segments() == ["0000-ffff-0"]
    await node.scalable.split(TOPIC, 0)
    assert await node.states() == {0: "SEALED", 1: "ACTIVE", 2: "ACTIVE"}


async def test_leftovers_of_a_failed_split_are_removed_at_once(
    node: Node,
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    node.mortal.faults = {"-1/": False, "0000-7fff-1": False}
    with pytest.raises(MetadataError):
        await node.scalable.split(TOPIC, 0)
    await until_awaited(lambda: is_cleared_away(node))


async def is_cleared_away(node: Node) -> bool:
    stored = await node.world.stored_segments()
    return not await node.world.steps() and stored in ([], ["0000-ffff-0"])


@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_outcome_is_settled_by_reading(node: Node, applied: bool) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    node.mortal.faults = {"/topics/public/default/t": applied}
    if applied:
        await node.scalable.split(TOPIC, 0)
    else:
        with pytest.raises(MetadataError):
            await node.scalable.split(TOPIC, 0)
        await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    assert "s" in (await node.segment(2)).subscriptions


async def test_a_segment_unloaded_while_it_is_sealed_is_sealed_all_the_same(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    await node.topics.unload((await node.segment(0)).name)
    await sealed(node, 0)


async def check_whole(node: Node, world: World) -> None:
    """No step is open, ledgers and layout agree, the history is complete, nothing is lost.

    Subscription `s` and the ids of producer `p` are on every segment below a sealed one.
    """
    layout = (await node.scalable.get(TOPIC)).layout
    assert await world.steps() == []
    for segment in layout.sealed:
        assert (await node.segment(segment.segment_id)).sealed
    if layout.sealed:
        for segment in layout.active:
            child = await node.segment(segment.segment_id)
            assert "s" in child.subscriptions
            assert not child.sequence_store.awaits_parents
            known = child.sequences.get("p")
            assert known is not None
            assert known.position != NO_POSITION or last_carried(known.carried) == 1
    names = {
        f"{s.hash_start:04x}-{s.hash_end:04x}-{s.segment_id}" for s in layout.segments.values()
    }
    assert set(await world.stored_segments()) <= names
    history = await node.scalable.history(TOPIC)
    assert [entry.epoch for entry in history] == list(range(layout.epoch + 1))


@pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", ["split", "merge", "rebucket"])
async def test_a_crash_after_any_write_is_finished_by_the_next_start(change: str) -> None:
    finished = False
    died_at = 0
    outcomes: set[int] = set()
    while not finished:
        died_at += 1
        world = World()
        node = await Node(world).start()
        await node.scalable.create(TOPIC, segments=2, properties={})
        for segment_id in (0, 1):
            await (await node.segment(segment_id)).create_subscription("s", EARLIEST)
            await node.fill(segment_id, 2)
        node.mortal.writes.clear()
        node.mortal.dies_at = died_at
        scalable = node.scalable
        changes: dict[str, Callable[[], Coroutine[object, object, None]]] = {
            "split": lambda: scalable.split(TOPIC, 0),  # noqa: B023
            "merge": lambda: scalable.merge(TOPIC, (0, 1)),  # noqa: B023
            "rebucket": lambda: scalable.rebucket(TOPIC, (0, 1), 3),  # noqa: B023
        }
        work = asyncio.ensure_future(changes[change]())
        process, live = node.process, await node.scalable._topics.get(TOPIC)
        await until(lambda: process.dead or (work.done() and not live.work.busy))  # noqa: B023
        finished = not process.dead
        node = await node.kill()
        await check_whole(node, world)
        outcomes.add((await node.scalable.get(TOPIC)).layout.epoch)
        assert await node.backlog(0) == 2
        await node.scalable.split(TOPIC, max(await node.states()))
        live = await node.scalable._topics.get(TOPIC)
        await until(lambda: not live.work.busy)  # noqa: B023
        await check_whole(node, world)
        await node.stop()
    assert died_at > 8, "the change is more than a few writes"
    assert outcomes == {0, 1}, "some crashes are undone, some finished"


async def test_a_leftover_leaves_the_note_of_a_later_step_in_its_place(
    world: World, node: Node
) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    node.mortal.faults = {"/topics/public/default/t": False}
    with pytest.raises(MetadataError):
        await node.scalable.split(TOPIC, 1)
    await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    noted = await world.steps()
    assert noted, "the segment is being sealed"
    await node.scalable.prune_all()
    assert await world.steps() == noted
    node = await node.kill()
    await sealed(node, 0)
    await node.stop()


async def test_a_late_note_is_found_while_another_step_is_under_way(
    world: World, node: Node
) -> None:
    """The other step may wait for the segments of the late one, so it must not hide it.

    The late note is of an earlier process: this one has read the notes at its start.
    """
    await node.scalable.create(TOPIC, segments=2, properties={})
    now = (await node.scalable.get(TOPIC)).layout
    await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    noted = await world.steps()
    assert noted, "the segment is being sealed"
    late = step_of(TOPIC, layout.split(now, 1, now_ms=1))
    await node.scalable._store.begin(replace(late, epoch=late.epoch + 1))
    await node.scalable.prune_all()
    assert await world.steps() == noted
    await node.scalable._store.begin(replace(late, epoch=late.epoch + 1))
    async with node.scalable._topics.lock(TOPIC):
        pruning = asyncio.create_task(node.scalable.prune_all())
        await asyncio.sleep(0.05)
    await pruning
    assert await world.steps() == noted
    await node.stop()


async def test_late_write_of_an_undone_split_is_refused(world: World, node: Node) -> None:
    """A change of the record may still be on its way when the next process undoes its step."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    before = await node.scalable._store.load(TOPIC)
    assert before is not None
    change = layout.split(before.record.layout, 0, now_ms=1)
    await node.scalable._store.begin(step_of(TOPIC, change))
    node = await node.kill()
    assert await world.steps() == []
    with pytest.raises(ConcurrentChange):
        await node.scalable._store.change(before, replace(before.record, layout=change.layout))
    await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    await node.stop()


async def test_a_split_that_a_former_process_publishes_late_is_finished(
    world: World, node: Node
) -> None:
    """It went on running beside its successor, and died before it had sealed the parent."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    await node.fill(0, 1)
    node = await node.kill()
    store = node.scalable._store
    before = await store.load(TOPIC)
    assert before is not None
    change = layout.split(before.record.layout, 0, now_ms=1)
    step = step_of(TOPIC, change)
    await store.begin(step)
    for child in step.makes:
        await node.scalable._segments.prepare(child, step.ends, {})
    await store.change(before, replace(before.record, layout=change.layout))
    await node.scalable.prune_all()
    await sealed(node, 0)
    assert "s" in (await node.segment(1)).subscriptions
    await node.stop()


async def test_children_get_their_ids_after_an_earlier_version_was_started(
    world: World, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier version finishes the split without carrying ids, so it must not end its note."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.fill(0, 2)
    await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    with monkeypatch.context() as patch:
        become_an_earlier_version(patch)
        node = await node.kill()
        assert (await node.segment(0)).sealed
        assert (await node.segment(1)).sequence_store.awaits_parents
    node = await node.kill()
    await sealed(node, 0)
    for segment_id in (1, 2):
        child = await node.segment(segment_id)
        assert not child.sequence_store.awaits_parents
        known = child.sequences.get("p")
        assert known is not None
        assert last_carried(known.carried) == 1
    await node.stop()


def become_an_earlier_version(patch: pytest.MonkeyPatch) -> None:
    """Carry no sequence ids, and ignore the member of a note that says that they are carried."""
    encode = steps.encode

    def encode_known(step: Step) -> bytes:
        members = json.loads(encode(step))
        members.pop("carriesSequences", None)
        return json.dumps(members, separators=(",", ":")).encode()

    async def carry_nothing(*arguments: object) -> None:
        pass

    patch.setattr(steps, "encode", encode_known)
    patch.setattr(Segments, "carry_sequences", carry_nothing)


async def test_a_note_of_a_topic_that_is_gone_is_cleared(world: World, node: Node) -> None:
    name = segment_name(parse_topic_name("segment://public/default/gone/0000-7fff-1"))
    await node.managed_ledgers.open(name.ledger_path)
    await node.scalable._store.begin(Step(name.parent, StepKind.SPLIT, 1, (), (name,)))
    node = await node.kill()
    assert await world.steps() == []
    assert await world.stored_segments(name.parent) == []
    await node.stop()


async def noted(world: World) -> list[Step]:
    """The steps that are begun and not ended."""
    keys = [f"{steps.STEPS_ROOT}/{part}" for part in await world.steps()]
    records = await world.metadata.get_many(keys)
    return [steps.decode(record.value) for record in records if record is not None]


async def cursors_of(world: World, child: SegmentName) -> list[str]:
    """The durable subscriptions that are stored for a segment."""
    return await world.metadata.children(f"/managed-ledgers/{child.ledger_path}")


async def split_held_before_its_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A split whose children are prepared; it changes the record once the event is set."""
    change, reached, go_on = node.scalable._store.change, asyncio.Event(), asyncio.Event()

    async def held(stored: StoredTopic, record: ScalableTopicRecord) -> StoredTopic:
        reached.set()
        await go_on.wait()
        return await change(stored, record)

    monkeypatch.setattr(node.scalable._store, "change", held)
    task = asyncio.create_task(node.scalable.split(TOPIC, 0))
    await reached.wait()
    return task, go_on


@pytest.mark.parametrize("published", [False, True])
async def test_replaced_process_leaves_the_equal_split_of_its_successor(
    world: World, node: Node, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """It is refused its change of the record while the successor does the same split."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    former, release_former = await split_held_before_its_change(node, monkeypatch)
    (first,) = await noted(world)
    successor = await Node(world, seed=2).start()
    assert await noted(world) == [], "the start has undone the former one's split"
    producer = await successor.peer().produce(0)
    later, release_later = await split_held_before_its_change(successor, monkeypatch)
    (second,) = await noted(world)
    assert replace(second, attempt=first.attempt) == first != second
    if published:
        release_later.set()
        await later
    release_former.set()
    with pytest.raises(ConcurrentChange):
        await former
    await until(lambda: not node.scalable._housekeeping._leftovers.all())
    assert await noted(world) == [second]
    assert [await cursors_of(world, child) for child in second.makes] == [["s"], ["s"]]
    release_later.set()
    await later
    await producer.close()
    await sealed(successor, 0)
    await successor.stop()


async def test_owner_reads_the_notes_before_the_record(
    world: World, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is published, and ends, between the two reads keeps its children."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    store, refresh = node.scalable._store, node.scalable._topics.refresh
    before = await store.load(TOPIC)
    assert before is not None
    change = layout.split(before.record.layout, 0, now_ms=1)
    step = replace(step_of(TOPIC, change), attempt="later")
    await store.begin(step)

    async def then_it_ends(name: TopicName) -> StoredTopic | None:
        found = await refresh(name)
        monkeypatch.undo()
        await store.change(before, replace(before.record, layout=change.layout))
        await store.end(step)
        return found

    monkeypatch.setattr(node.scalable._topics, "refresh", then_it_ends)
    assert await node.scalable._is_named(step.makes[0], "earlier")
    assert await noted(world) == []


async def test_children_of_a_noted_split_are_deleted_by_its_own_attempt_only(
    world: World, node: Node
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    change = layout.split((await node.scalable.get(TOPIC)).layout, 0, now_ms=1)
    step = replace(step_of(TOPIC, change), attempt="this")
    await node.scalable._store.begin(step)
    child = step.makes[0]
    await node.scalable._segments.prepare(child, step.ends, {"s": CarriedSubscription({})})
    for attempt in ("", "another"):
        with pytest.raises(SegmentNamed):
            await node.scalable._segments.ask(DeleteSegment(child, attempt))
    assert await cursors_of(world, child) == ["s"]
    await node.scalable._segments.ask(DeleteSegment(child, "this"))
    assert await world.stored_segments() == []
    await node.scalable.prune_all()
    assert await noted(world) == []


async def test_undo_leaves_the_note_of_an_equal_later_step(world: World, node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    change = layout.split((await node.scalable.get(TOPIC)).layout, 0, now_ms=1)
    first, second = (replace(step_of(TOPIC, change), attempt=each) for each in "ab")
    assert await node.scalable._store.begin(second) is None
    assert await node.scalable._store.begin(second) is None, "its own note, as of a lost answer"
    assert await node.scalable._store.begin(first) == second
    await node.scalable._store.end(first)
    assert await noted(world) == [second]
    await node.scalable._reshaper._undo(first)
    assert await noted(world) == [second]
    await node.scalable._reshaper._undo(second)
    assert await noted(world) == []


async def test_two_steps_that_make_the_same_children_are_both_undone(
    world: World, node: Node
) -> None:
    """The first was left behind, and the epoch rose by a prune before the second."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    change = layout.split((await node.scalable.get(TOPIC)).layout, 0, now_ms=1)
    first, second = (replace(step_of(TOPIC, change), attempt=each) for each in "ab")
    second = replace(second, epoch=2)
    for step in (first, second):
        await node.scalable._store.begin(step)
    for child in first.makes:
        await node.scalable._segments.prepare(child, step.ends, {"s": CarriedSubscription({})})
    with pytest.raises(SegmentNamed):
        await node.scalable._reshaper._undo(second)
    assert await noted(world) == [first, second]
    await node.scalable._reshaper._undo(first)
    assert await noted(world) == [second]
    assert [await cursors_of(world, child) for child in second.makes] == [["s"], ["s"]]
    await node.scalable._reshaper._undo(second)
    assert await noted(world) == []
    assert await world.stored_segments() == []


async def test_note_of_a_split_that_comes_after_a_child_was_pruned_is_ended(
    world: World, node: Node
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    change = layout.split((await node.scalable.get(TOPIC)).layout, 0, now_ms=1)
    await node.scalable.split(TOPIC, 0)
    await sealed(node, 0)
    await node.scalable.prune_all()
    await node.scalable.split(TOPIC, 1)
    await sealed(node, 1)
    await node.scalable.prune_all()
    assert set(await node.states()) == {2, 3, 4}
    await node.scalable._store.begin(replace(step_of(TOPIC, change), attempt="late"))
    await node.scalable.prune_all()
    assert await noted(world) == []
    assert set(await node.states()) == {2, 3, 4}
