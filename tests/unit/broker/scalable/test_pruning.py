"""Pruning: who holds a sealed segment, in which order they go, and every crash in between."""

import asyncio
from dataclasses import replace

import pytest

from broker.policies.namespaces import Namespaces
from broker.scalable import layout
from broker.scalable.steps import Step, StepKind
from broker.scalable.topic_store import ConcurrentChange
from broker.topics.topic import TopicNotFound
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName, parse_topic_name
from storage.metadata.store import MetadataError
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, World


async def split(node: Node, segment_id: int = 0) -> None:
    """Split and wait until it is all done."""
    await node.scalable.split(TOPIC, segment_id)
    live = await node.scalable._topics.get(TOPIC)
    await until(lambda: not live.work.busy)


@pytest.fixture
async def topic(node: Node) -> Node:
    """Segment 0 with 3 messages for subscription s, sealed; 1 and 2 its children."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    await node.fill(0, 3)
    await split(node)
    return node


async def test_a_drained_segment_goes_with_its_ledger(topic: Node) -> None:
    peer = topic.peer()
    await peer.watch()
    parent = await topic.segment(0)
    await topic.scalable.prune_all()
    assert set(await topic.states()) == {0, 1, 2}, "not everything is acknowledged"
    await topic.drain(0)
    await topic.scalable.prune_all()
    assert set(await topic.states()) == {1, 2}
    dag = peer.layouts()[-1].dag
    assert dag.epoch == 2
    assert [list(s.parent_ids) for s in dag.segments] == [[], []]
    assert "0000-ffff-0" not in await topic.world.stored_segments()
    with pytest.raises(TopicNotFound):
        await topic.topics.get(parent.name, create=True)
    entry = (await topic.scalable.history(TOPIC))[-1]
    assert (entry.kind.value, entry.epoch, entry.parents) == ("prune", 2, (0,))
    await topic.scalable.prune_all()
    assert (await topic.scalable.get(TOPIC)).layout.epoch == 2


async def test_attached_readers_hold_a_segment(topic: Node) -> None:
    await topic.drain(0)
    reader = await topic.peer().attach(0, "r", "reader-1", durable=False)
    await topic.scalable.prune_all()
    assert 0 in await topic.states()
    reader.close()
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_attached_consumers_of_drained_subscriptions_do_not(topic: Node) -> None:
    consumer = await topic.peer().attach(0, "c")
    await topic.drain(0)
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()
    assert consumer.closed


async def test_every_subscription_counts(topic: Node) -> None:
    await (await topic.segment(0)).create_subscription("other", EARLIEST)
    await topic.drain(0)
    await topic.scalable.prune_all()
    assert 0 in await topic.states()
    await topic.drain(0, "other")
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_parents_go_first(topic: Node) -> None:
    await topic.fill(1, 1)
    await split(topic, 1)
    await topic.drain(1)
    await topic.scalable.prune_all()
    assert set(await topic.states()) == {0, 1, 2, 3, 4}
    await topic.drain(0)
    await topic.scalable.prune_all()
    assert set(await topic.states()) == {2, 3, 4}, "and their children with them"
    assert (await topic.scalable.get(TOPIC)).layout.epoch == 3


async def test_the_namespace_retains(topic: Node) -> None:
    await topic.drain(0)

    def retain(record: dict[str, object]) -> None:
        record["retention_policies"] = {"retentionTimeInMinutes": 10, "retentionSizeInMB": -1}

    namespaces: Namespaces = topic.namespaces
    await namespaces.change(TOPIC.namespace_name, retain)
    await topic.scalable.prune_all()
    assert 0 in await topic.states()
    topic.clock.ms += 10 * 60_000
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_the_topic_retains_more_than_its_namespace(topic: Node) -> None:
    await topic.drain(0)
    for_ever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    await topic.topic_policies.update(
        TOPIC, lambda found: found.changed("retention", for_ever, is_global=False)
    )
    topic.clock.ms += 365 * 24 * 3_600_000
    await topic.scalable.prune_all()
    assert 0 in await topic.states()
    await topic.topic_policies.update(
        TOPIC, lambda found: found.changed("retention", None, is_global=False)
    )
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_data_without_any_subscription_waits_for_one(world: World) -> None:
    node = await Node(world, unsubscribed_retention_minutes=60).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    await node.fill(0, 1)
    await split(node)
    await node.scalable.prune_all()
    assert 0 in await node.states()
    node.clock.ms += 60 * 60_000
    await node.scalable.prune_all()
    assert 0 not in await node.states()
    await node.stop()


async def test_an_empty_segment_without_subscription_need_not_wait(world: World) -> None:
    node = await Node(world, unsubscribed_retention_minutes=60).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    await split(node)
    await node.scalable.prune_all()
    assert 0 not in await node.states()
    await node.stop()


async def test_nothing_goes_while_it_is_being_sealed(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    producer = await node.peer().produce(0)
    await node.scalable.split(TOPIC, 0)
    await node.scalable.prune_all()
    assert 0 in await node.states()
    await producer.close()


def split_of_the_first() -> Step:
    """As an earlier leader noted it, and did not end."""
    children = SegmentName(TOPIC, 0, 0x7FFF, 1), SegmentName(TOPIC, 0x8000, 0xFFFF, 2)
    return Step(TOPIC, StepKind.SPLIT, 1, (SegmentName(TOPIC, 0, 0xFFFF, 0),), children)


async def test_nothing_goes_whose_reshape_is_noted_and_not_ended(topic: Node) -> None:
    """Its subscriptions may not be carried over yet."""
    await topic.drain(0)
    step = split_of_the_first()
    finishing = topic.scalable._reshaper._finishing
    finishing[step] = asyncio.get_running_loop().create_future()
    await topic.scalable._store.begin(step)
    await topic.scalable.prune_all()
    assert 0 in await topic.states()
    await topic.scalable._store.end(step)
    del finishing[step]
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_segment_goes_whose_reshape_another_process_has_finished(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process had tried it too, and failed."""
    await topic.drain(0)
    step = split_of_the_first()
    await topic.scalable._store.begin(step)

    async def fails(*arguments: object) -> None:
        raise MetadataError("the test says no: try again.")

    monkeypatch.setattr(topic.scalable._reshaper, "_finish_family", fails)
    await topic.scalable.prune_all()
    assert (await topic.scalable._topics.get(TOPIC)).sealing == {0}
    await topic.scalable._store.end(step)
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()


async def test_a_reshape_whose_parent_has_gone_is_ended(topic: Node) -> None:
    await topic.drain(0)
    await topic.scalable.prune_all()
    assert 0 not in await topic.states()
    await topic.scalable._store.begin(split_of_the_first())
    node = await topic.kill()
    assert await node.world.steps() == []
    assert set(await node.states()) == {1, 2}
    await node.stop()


async def test_topics_that_nobody_has_looked_at_are_pruned_too(topic: Node) -> None:
    await topic.drain(0)
    await (await topic.segment(0)).subscriptions["s"].cursor.persist()
    node = await topic.kill()
    await node.scalable.prune_all()
    assert 0 not in await node.states()
    await node.stop()


@pytest.mark.filterwarnings("ignore:.*coroutine.*:pytest.PytestUnraisableExceptionWarning")
async def test_a_crash_after_any_write_of_a_prune_is_finished() -> None:
    died_at, finished, outcomes = 0, False, set()
    while not finished:
        died_at += 1
        world = World()
        node = await Node(world).start()
        await node.scalable.create(TOPIC, segments=1, properties={})
        await node.fill(0, 1)
        await (await node.segment(0)).create_subscription("s", EARLIEST)
        await split(node)
        await node.drain(0)
        await (await node.segment(0)).subscriptions["s"].cursor.persist()
        node.mortal.writes.clear()
        node.mortal.dies_at = died_at
        work = asyncio.ensure_future(node.scalable.prune_all())
        process = node.process
        await until(lambda: process.dead or work.done())  # noqa: B023
        finished = not process.dead
        node = await node.kill()
        assert await world.steps() == []
        outcomes.add(0 in await node.states())
        assert ("0000-ffff-0" in await world.stored_segments()) == (0 in await node.states())
        epoch = (await node.scalable.get(TOPIC)).layout.epoch
        assert [e.epoch for e in await node.scalable.history(TOPIC)] == list(range(epoch + 1))
        await node.scalable.prune_all()
        assert set(await node.states()) == {1, 2}
        assert (await node.scalable.history(TOPIC))[-1].parents == (0,)
        await node.stop()
    assert died_at > 4
    assert outcomes == {True, False}


async def test_housekeeping_runs_by_itself(world: World) -> None:
    node = await Node(world, sealed_segment_prune_interval_s=1).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    await split(node)
    live = await node.scalable._topics.get(TOPIC)
    await until(lambda: 0 not in live.layout.segments)
    await node.stop()


async def test_a_defect_at_one_step_makes_no_other_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        Step(parse_topic_name(f"topic://public/default/{name}"), StepKind.DELETE, 0)
        for name in ("a", "b", "c")
    ]
    for step in steps:
        await node.scalable._store.begin(step)
    house = node.scalable._housekeeping
    failures = [RuntimeError("a defect"), MetadataError("the test says no: try again.")]
    recovered: list[Step] = []

    async def recover(step: Step) -> None:
        if step == steps[1] and failures:
            raise failures.pop(0)
        recovered.append(step)
        await node.scalable._store.end(step)
        house._leftovers.discard(step)

    monkeypatch.setattr(house, "_recover", recover)
    for step in steps:
        house._leftovers.add(step)
    await house.prune_all()
    assert recovered == [steps[0], steps[2]], "the one between them has a defect"
    await until(lambda: len(recovered) == 3)
    await house.prune_all()
    assert recovered == [steps[0], steps[2], steps[1]]


async def test_late_change_of_a_forgotten_prune_is_refused(topic: Node) -> None:
    """A change of the record may still be on its way when the next process forgets its step.

    If it were stored then, no note would say that the segment's data is to be deleted.
    """
    before = await topic.scalable._store.load(TOPIC)
    assert before is not None
    after = layout.prune(before.record.layout, [0])
    ends = (SegmentName(TOPIC, 0, 0xFFFF, 0),)
    await topic.scalable._store.begin(Step(TOPIC, StepKind.PRUNE, after.epoch, ends))
    node = await topic.kill()
    assert await node.world.steps() == []
    with pytest.raises(ConcurrentChange):
        await node.scalable._store.change(before, replace(before.record, layout=after))
    await node.stop()


async def test_prune_noted_by_a_later_process_is_not_taken_for_an_equal_leftover(
    topic: Node,
) -> None:
    leftover, later = (
        Step(TOPIC, StepKind.PRUNE, 2, (SegmentName(TOPIC, 0, 0xFFFF, 0),), attempt=each)
        for each in ("", "later")
    )
    under_way = asyncio.get_running_loop().create_future()
    topic.scalable._reshaper._finishing[later] = under_way
    await topic.scalable._store.begin(later)
    topic.scalable._housekeeping._leftovers.add(leftover)
    await topic.scalable.prune_all()
    assert await topic.scalable._store.begun() == [later]
    assert topic.scalable._housekeeping._leftovers.all() == []


async def test_successor_learns_that_a_former_process_pruned(topic: Node) -> None:
    """The former one goes on for a while after the successor has read the topic's record."""
    await topic.drain(0)
    successor = await Node(topic.world, seed=2).start()
    assert set(await successor.states()) == {0, 1, 2}
    await topic.scalable.prune_all()
    assert set(await topic.states()) == {1, 2}
    await successor.scalable.prune_all()
    assert set(await successor.states()) == {1, 2}
    await successor.stop()
