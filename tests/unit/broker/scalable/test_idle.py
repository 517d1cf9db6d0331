"""Scalable topics that nobody uses: what is let go of, what has to stay, and what comes back."""

import asyncio
import gc
import weakref
from typing import cast

import pytest

from broker.app.service import Broker
from broker.scalable.layout import SegmentState
from broker.topics.idle_topics import IdleTopics
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import TopicName, parse_topic_name
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node

IDLE_S = 300


class Looks:
    """The looks of a process, at times that a test chooses."""

    def __init__(self, node: Node) -> None:
        self.now_s = 0.0
        self._idle = IdleTopics(cast("Broker", node), lambda: self.now_s)

    async def idle_time_passes(self) -> None:
        await self._idle.unload_idle()
        self.now_s += IDLE_S
        await self._idle.unload_idle()


async def test_topics_and_segments_go_and_come_back(node: Node) -> None:
    looks = Looks(node)
    await node.scalable.create(TOPIC, segments=2, properties={"k": "v"})
    await (await node.segment(0)).create_subscription("s", EARLIEST)
    await node.fill(0, 3)
    live = weakref.ref(await node.scalable._topics.get(TOPIC))
    await looks.idle_time_passes()
    assert dict(node.topics.loaded()) == {}
    assert node.scalable._topics.all() == []
    gc.collect()
    assert live() is None
    peer = node.peer()
    await peer.watch()
    assert [len(each.dag.segments) for each in peer.layouts()] == [2]
    assert await node.backlog(0) == 3
    assert (await node.scalable.get(TOPIC)).properties == {"k": "v"}


async def test_watched_topics_stay_and_hear_of_changes(node: Node) -> None:
    looks = Looks(node)
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer = node.peer()
    await peer.watch()
    await looks.idle_time_passes()
    assert [live.name for live in node.scalable._topics.all()] == [TOPIC]
    await node.scalable.split(TOPIC, 0)
    assert [each.dag.epoch for each in peer.layouts()] == [0, 1]


async def test_controllers_stay_while_a_consumer_is_registered(node: Node) -> None:
    looks = Looks(node)
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer = node.peer()
    await peer.register("c")
    await looks.idle_time_passes()
    controller = node.scalable.controllers.of(TOPIC)
    assert controller is not None
    peer.close()
    await until(lambda: controller.idle)
    await looks.idle_time_passes()
    assert node.scalable.controllers.of(TOPIC) is None
    assert node.scalable._topics.all() == []
    _, answer = await node.peer().register("c")
    assert [s.segment_id for s in answer.assignment.segments] == [0]


async def test_topic_object_still_in_use_is_the_one_found_again(node: Node) -> None:
    """So there are never two of one name, and a change reaches everybody."""
    looks = Looks(node)
    await node.scalable.create(TOPIC, segments=1, properties={})
    held = await node.scalable._topics.get(TOPIC)
    await looks.idle_time_passes()
    assert node.scalable._topics.all() == []
    await node.scalable.split(TOPIC, 0)
    assert await node.scalable._topics.get(TOPIC) is held
    assert held.layout.epoch == 1
    await until(lambda: not held.work.busy)


async def test_a_deleted_topic_is_not_found_by_its_holders(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    held = await node.scalable._topics.get(TOPIC)
    await node.scalable.delete(TOPIC, force=False)
    assert await node.scalable._topics.find(TOPIC) is None
    await node.scalable.create(TOPIC, segments=2, properties={})
    assert await node.scalable._topics.get(TOPIC) is not held


async def test_a_parent_stays_until_its_subscriptions_are_carried_over(node: Node) -> None:
    looks = Looks(node)
    await node.scalable.create(TOPIC, segments=1, properties={})
    parent = await node.segment(0)
    carry_over = node.scalable._segments.carry_over
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*args: object) -> None:
        reached.set()
        await go_on.wait()
        await carry_over(*args)  # type: ignore[arg-type]

    node.scalable._segments.carry_over = slowly  # type: ignore[method-assign, assignment]
    await parent.create_subscription("s", EARLIEST)
    await node.scalable.split(TOPIC, 0)
    await reached.wait()
    assert parent.sealed
    await looks.idle_time_passes()
    assert str(parent.name) in node.topics.loaded()
    child = await node.segment(1)
    await child.unsubscribe("s", force=False)
    consumer = await node.peer().attach(1, "c")
    assert child.subscriptions["s"].cursor.mark_delete.entry_id == -1
    assert consumer.subscription is child.subscriptions["s"]
    go_on.set()
    live = await node.scalable._topics.get(TOPIC)
    await until(lambda: not live.work.busy)
    assert live.layout.segments[0].state is SegmentState.SEALED
    await looks.idle_time_passes()
    assert str(parent.name) not in node.topics.loaded()


async def test_unloading_many_topics_lists_the_loaded_ones_once_for_each_check(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.scalable, "_shared", True)
    for number in range(20):
        name = parse_topic_name(f"topic://public/default/t{number}")
        await node.scalable.create(name, segments=1, properties={})
    looked, running_topics = 0, node.scalable._running_topics

    def counted() -> set[TopicName]:
        nonlocal looked
        looked += 1
        return running_topics()

    monkeypatch.setattr(node.scalable, "_running_topics", counted)
    await Looks(node).idle_time_passes()
    assert node.scalable.in_memory() == []
    assert looked == 2, "once for each check"
