"""Layouts followed on a real broker: live splits and merges, names."""

import asyncio

import pytest

import magnetar
from magnetar.errors import TopicNotFound
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from tests.client.conftest import MakeTopic

WAIT_S = 30


class Followed:
    """A watch, and the layouts that it told."""

    def __init__(self, client: magnetar.Client, name: str) -> None:
        self.watch = LayoutWatch(client.context, name)
        self._told: asyncio.Queue[Layout] = asyncio.Queue()
        self.watch.on_change(self._told.put_nowait)

    async def until_active(self, *ids: int) -> Layout:
        """The layout in which these segments take messages."""
        while {segment.segment_id for segment in self.watch.layout.active} != set(ids):
            await asyncio.wait_for(self._told.get(), WAIT_S)
        return self.watch.layout


async def test_splits_and_merges_are_told(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    followed = Followed(client, made.name)
    await followed.watch.open(WAIT_S)
    assert followed.watch.topic == made.name
    await made.split(0)
    layout = await followed.until_active(1, 2, 3)
    assert layout.segments[2].parent_ids == layout.segments[3].parent_ids == (0,)
    assert set(layout.segments[0].child_ids) == {2, 3}
    await made.merge(2, 3)
    layout = await followed.until_active(1, 4)
    assert set(layout.segments[4].parent_ids) == {2, 3}
    assert layout.of_key(b"a").segment_id == 4
    assert layout.of_key(b"b").segment_id == 1
    await followed.watch.close()


async def test_a_short_name_means_the_scalable_topic_of_that_name(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    watch = LayoutWatch(client.context, made.local_name)
    await watch.open(WAIT_S)
    assert watch.topic == made.name
    assert not watch.layout.active[0].legacy
    await watch.close()


async def test_a_regular_topic_is_one_segment_of_its_own_name(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    regular = f"persistent://public/default/{made.local_name}-regular"
    watch = LayoutWatch(client.context, regular)
    await watch.open(WAIT_S)
    assert [(segment.topic, segment.legacy) for segment in watch.layout.active] == [(regular, True)]
    await watch.close()


async def test_a_topic_that_may_not_be_made_is_not_found(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    watch = LayoutWatch(client.context, f"{made.name}-other", create_if_missing=False)
    with pytest.raises(TopicNotFound):
        await watch.open(WAIT_S)
