"""Creation, deletion, listing; crashes in a deletion; names used again."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from broker.scalable.layout import CorruptLayout, IllegalSegmentCount, split
from broker.scalable.lifecycle import DeletionUnfinished, ScalableTopicInUse
from broker.scalable.records import segment_of
from broker.scalable.segment_view import CarriedSubscription
from broker.scalable.steps import Step, StepKind
from broker.scalable.topic_store import (
    ConcurrentChange,
    ScalableTopicExists,
    ScalableTopicNotFound,
    StoredTopic,
)
from broker.topics.topic import TopicNotFound
from config.bounds import (
    MAX_TOPIC_PROPERTIES,
    MAX_TOPIC_PROPERTIES_BYTES,
    METADATA_INDEX_ENTRIES,
)
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import InvalidTopicName, parse_namespace_name, parse_topic_name
from storage.ledger.store import LedgerError
from storage.metadata.store import MetadataError, RecordTooLarge
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, World
from tests.unit.broker.scalable.test_controller import until_told

NAMESPACE = parse_namespace_name("public/default")


async def leftovers(world: World) -> list[str]:
    """Keys below the topic's record and its ledgers, and steps."""
    found = [*await world.stored_segments(), *await world.steps()]
    for below in ("subscriptions", "history"):
        found += await world.metadata.children(f"/topics/public/default/t/{below}")
    return found


async def test_a_created_topic_has_the_requested_layout(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=3, properties={"team": "a"})
    record = await node.scalable.get(TOPIC)
    assert len(record.layout.active) == 3
    assert dict(record.properties) == {"team": "a"}
    twin = parse_topic_name("persistent://public/default/t")
    assert await node.scalable.get(twin) == record
    assert [e.to_json() for e in await node.scalable.history(TOPIC)] == [
        {
            "timeMs": node.clock.now_ms(),
            "kind": "create",
            "epoch": 0,
            "parents": [],
            "children": [0, 1, 2],
        }
    ]
    assert await node.world.stored_segments() == [], "segments are made when they are used"


def value_of_bytes(size: int) -> str:
    """A value with which {"k": value} is so many bytes as JSON."""
    return "x" * (size - len('{"k":""}'))


async def test_topic_with_largest_properties_can_be_split(node: Node) -> None:
    """What a topic was created with never keeps it from being split."""
    at_most = {f"k{n}": "v" for n in range(MAX_TOPIC_PROPERTIES)}
    assert len(at_most) < METADATA_INDEX_ENTRIES
    for properties in (at_most, {"k": value_of_bytes(MAX_TOPIC_PROPERTIES_BYTES)}):
        await node.scalable.create(TOPIC, segments=1, properties=properties)
        await node.scalable.split(TOPIC, 0)
        assert set(await node.states()) == {0, 1, 2}
        await node.scalable.delete(TOPIC, force=True)
    for properties in (
        {**at_most, "one": "more"},
        {"k": value_of_bytes(MAX_TOPIC_PROPERTIES_BYTES + 1)},
        {"k": "ä" * (MAX_TOPIC_PROPERTIES_BYTES // 6)},
    ):
        with pytest.raises(RecordTooLarge, match="propert"):
            await node.scalable.create(TOPIC, segments=1, properties=properties)
        with pytest.raises(ScalableTopicNotFound):
            await node.scalable.get(TOPIC)
    assert await leftovers(node.world) == []


async def test_refusals(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    with pytest.raises(ScalableTopicExists):
        await node.scalable.create(TOPIC, segments=1, properties={})
    with pytest.raises(IllegalSegmentCount):
        await node.scalable.create(TOPIC, segments=0, properties={})
    with pytest.raises(InvalidTopicName):
        await node.scalable.create(
            parse_topic_name("topic://public/default/x "), segments=1, properties={}
        )
    for missing in ("get", "stats", "history"):
        with pytest.raises(ScalableTopicNotFound):
            await getattr(node.scalable, missing)(parse_topic_name("topic://public/default/none"))
    with pytest.raises(ScalableTopicNotFound):
        await node.scalable.delete(parse_topic_name("none"), force=False)


async def test_a_failed_creation_can_be_tried_again(node: Node) -> None:
    node.mortal.faults = {"/topics/public/default/t": False}
    with pytest.raises(Exception, match="the test says no"):
        await node.scalable.create(TOPIC, segments=1, properties={})
    await node.scalable.create(TOPIC, segments=2, properties={})
    assert [e.children for e in await node.scalable.history(TOPIC)] == [(0, 1)]


async def test_listing_by_properties(node: Node) -> None:
    for name, properties in (
        ("a", {"team": "x", "tier": "1"}),
        ("b", {"team": "x"}),
        ("c/d", {"team": "y", "": "odd", "k/v": "slash", "empty": ""}),
    ):
        await node.scalable.create(
            parse_topic_name(f"topic://public/default/{name}"), segments=1, properties=properties
        )
    prefix = "topic://public/default/"

    async def found(**filters: str) -> list[str]:
        names = await node.scalable.list(NAMESPACE, filters)
        return [name.removeprefix(prefix) for name in names]

    assert await found() == ["a", "b", "c/d"]
    assert await found(team="x") == ["a", "b"]
    assert await found(team="x", tier="1") == ["a"]
    assert await found(empty="") == ["c/d"]
    assert await found(**{"k/v": "slash"}) == ["c/d"]
    assert await found(team="z") == []
    assert await node.scalable.list(parse_namespace_name("public/other"), {}) == []


async def test_damaged_records_do_not_hide_the_others(world: World, node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await world.metadata.put("/topics/public/default/damaged", b"{}")
    await world.metadata.put("/scalable-topic-steps/damaged", b"{}")
    assert await node.scalable.list(NAMESPACE, {}) == [str(TOPIC)]
    with pytest.raises(CorruptLayout):
        await node.scalable.get(parse_topic_name("topic://public/default/damaged"))
    node = await node.kill()
    assert await node.scalable.list(NAMESPACE, {}) == [str(TOPIC)]
    await node.stop()


async def test_deletion_removes_everything(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={"team": "a"})
    peer = node.peer()
    await peer.register("a")
    consumer = await peer.attach(0, "a")
    segment = (await node.segment(0)).name
    await node.fill(1, 3)
    await node.scalable.split(TOPIC, 0)
    await node.scalable.delete(TOPIC, force=True)
    assert consumer.closed
    assert await leftovers(node.world) == []
    assert await node.scalable.list(NAMESPACE, {}) == []
    assert await node.scalable.list(NAMESPACE, {"team": "a"}) == []
    with pytest.raises(TopicNotFound):
        await node.topics.get(segment, create=True)


async def test_a_topic_in_use_is_not_deleted_without_force(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    producer = await node.peer().produce(1)
    with pytest.raises(ScalableTopicInUse, match="segment://"):
        await node.scalable.delete(TOPIC, force=False)
    await producer.close()
    consumer = await node.peer().attach(0, "a")
    with pytest.raises(ScalableTopicInUse):
        await node.scalable.delete(TOPIC, force=False)
    consumer.close()
    await node.scalable.delete(TOPIC, force=False)
    assert await leftovers(node.world) == []


async def test_a_name_can_be_used_again(node: Node) -> None:
    for segments in (2, 1):
        await node.scalable.create(TOPIC, segments=segments, properties={})
        await node.fill(0, 3)
        await (await node.segment(0)).create_subscription("s", EARLIEST)
        assert await node.backlog(0) == 3
        assert len(await node.scalable.history(TOPIC)) == 1
        await node.scalable.delete(TOPIC, force=True)


async def test_creation_waits_for_a_deletion(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.fill(0, 1)
    deleting = asyncio.ensure_future(node.scalable.delete(TOPIC, force=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await node.scalable.create(TOPIC, segments=1, properties={})
    await deleting
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    assert await node.backlog(0) == 0


async def test_failed_removal_is_completed_later(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    await node.fill(0, 1)
    await node.fill(1, 1)
    node.mortal.faults = {"/managed-ledgers/public/default/segment/t/0000-7fff-0": False}
    delete = node.managed_ledgers.delete
    failures = [LedgerError("the disk is slow: try again.")]

    async def failing(
        name: str, *, require_unused: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        if failures:
            raise failures.pop()
        await delete(name, require_unused=require_unused)

    node.managed_ledgers.delete = failing  # type: ignore[assignment, method-assign]
    with pytest.raises(DeletionUnfinished):
        await node.scalable.delete(TOPIC, force=True)
    with pytest.raises(ScalableTopicNotFound):
        await node.scalable.get(TOPIC)
    assert await leftovers(node.world) != []
    await node.scalable.prune_all()
    assert await leftovers(node.world) == []


@pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning")
async def test_a_crash_after_any_write_of_a_deletion_is_finished() -> None:
    died_at, finished, outcomes = 0, False, set()
    while not finished:
        died_at += 1
        world = World()
        node = await Node(world).start()
        await node.scalable.create(TOPIC, segments=2, properties={})
        await node.peer().register("a")
        await node.fill(0, 1)
        await (await node.segment(1)).create_subscription("s", EARLIEST)
        node.mortal.writes.clear()
        node.mortal.dies_at = died_at
        work = asyncio.ensure_future(node.scalable.delete(TOPIC, force=True))
        process = node.process
        await until(lambda: process.dead or work.done())  # noqa: B023
        finished = not process.dead
        node = await node.kill()
        assert await world.steps() == []
        exists = bool(await node.scalable.list(NAMESPACE, {}))
        outcomes.add(exists)
        if exists:
            assert len(await world.stored_segments()) == 2
            assert await node.backlog(1) == 0
        else:
            assert await leftovers(world) == []
            await node.scalable.create(TOPIC, segments=1, properties={})
        await node.stop()
    assert died_at > 6
    assert outcomes == {True, False}


async def test_an_old_note_does_not_delete_a_topic_made_since(world: World, node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.fill(0, 1)
    await node.scalable._store.begin(Step(TOPIC, StepKind.DELETE, 0))
    node = await node.kill()
    assert await node.scalable.list(NAMESPACE, {}) == [str(TOPIC)]
    assert await world.steps() == []
    assert await world.stored_segments() == ["0000-ffff-0"]
    await node.stop()


async def test_late_removal_of_a_forgotten_deletion_is_refused(world: World, node: Node) -> None:
    """A removal of the record may still be on its way when the next process forgets its step."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    before = await node.scalable._store.load(TOPIC)
    assert before is not None
    await node.scalable._store.begin(Step(TOPIC, StepKind.DELETE, 0))
    node = await node.kill()
    assert await world.steps() == []
    with pytest.raises(ConcurrentChange):
        await node.scalable._store.remove(before)
    await node.stop()


async def test_deletion_goes_on_after_an_old_note_was_cleared(world: World, node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.scalable._store.begin(Step(TOPIC, StepKind.DELETE, 0))
    await node.scalable.delete(TOPIC, force=True)
    assert await leftovers(world) == []


async def test_deletion_noted_by_another_leader_meanwhile_is_not_left_behind(
    world: World, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note may lack segments that were made since."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    store, begin = node.scalable._store, node.scalable._store.begin

    async def second(step: Step) -> Step | None:
        monkeypatch.undo()
        await begin(replace(step, ends=(), attempt="of another leader"))
        return await begin(step)

    monkeypatch.setattr(store, "begin", second)
    with pytest.raises(ConcurrentChange):
        await node.scalable.delete(TOPIC, force=True)
    await until(lambda: not node.scalable._housekeeping._leftovers.all())
    assert await world.steps() == []
    await node.scalable.delete(TOPIC, force=True)
    assert await leftovers(world) == []


@pytest.mark.parametrize("error", [MetadataError, ConcurrentChange])
async def test_ordered_consumers_of_a_topic_that_was_not_deleted_register_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Nobody would assign them the segments of the next layout."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer = node.peer()
    await peer.register("a")

    async def fails(_: StoredTopic) -> None:
        raise error("the test says no: try again.")

    with monkeypatch.context() as patched:
        patched.setattr(node.scalable._store, "remove", fails)
        with pytest.raises(error):
            await node.scalable.delete(TOPIC, force=True)
    await until(lambda: peer.closing)
    again = node.peer()
    _, answer = await again.register("a")
    assert [each.segment_id for each in answer.assignment.segments] == [0]
    await node.scalable.split(TOPIC, 0)
    await until_told(again, [1, 2])
    await node.scalable.delete(TOPIC, force=True)
    assert not again.closing, "its client would create the topic again"


async def test_amendment_that_met_a_newer_record_succeeds_when_it_is_tried_again(
    node: Node,
) -> None:
    """A write whose answer was lost may take effect late, and a single broker watches nothing."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    store = node.scalable._store
    stored = await store.load(TOPIC)
    assert stored is not None
    await store.refresh(stored)
    with pytest.raises(ConcurrentChange):
        await node.scalable.set_consumer_grace(TOPIC, 7)
    await node.scalable.set_consumer_grace(TOPIC, 7)
    assert await node.scalable.applied_consumer_grace_s(TOPIC) == 7


async def test_late_deletion_leaves_the_records_of_a_topic_created_since(
    world: World, node: Node
) -> None:
    """A former process goes on with it when its successor has finished it."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    finished = Step(TOPIC, StepKind.DELETE, 0, attempt="earlier")
    await node.peer().register("a")
    before = await leftovers(world)
    with pytest.raises(DeletionUnfinished):
        await node.scalable._lifecycle._finish(finished)
    assert before
    assert await leftovers(world) == before


async def test_late_deletion_leaves_the_children_of_a_split_of_a_topic_created_since(
    world: World, node: Node
) -> None:
    """Segments of the former topic had the same names."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    change = split((await node.scalable.get(TOPIC)).layout, 0, now_ms=1)
    children = tuple(segment_of(TOPIC, each) for each in change.children)
    noted = Step(TOPIC, StepKind.SPLIT, 1, (), children, "now")
    await node.scalable._store.begin(noted)
    for child in children:
        await node.scalable._segments.prepare(child, noted.ends, {"s": CarriedSubscription({})})
    for attempt in ("", "earlier"):
        late = Step(TOPIC, StepKind.DELETE, 0, children, attempt=attempt)
        with pytest.raises(DeletionUnfinished):
            await node.scalable._lifecycle._finish(late)
    assert len(await world.stored_segments()) == 2
