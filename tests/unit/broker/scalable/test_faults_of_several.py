"""Brokers die in the middle of changing a topic: at each write of the leader, owners in between."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from broker.scalable.feed import Follower
from broker.scalable.layout import Layout
from broker.scalable.layout import split as split_layout
from broker.scalable.local_segments import LocalSegments, SealInterrupted
from broker.scalable.records import ScalableTopicRecord, segment_of
from broker.scalable.reshape import step_of
from broker.scalable.steps import STEPS_ROOT
from broker.scalable.topic_leadership import NotController
from broker.scalable.topic_store import ConcurrentChange, ScalableTopicNotFound, StoredTopic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import SegmentName, parse_topic_name, segment_name
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.memory import MemoryMetadataStore
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node, View
from tests.unit.broker.scalable.several import (
    NAME,
    TOPIC,
    OrderedReader,
    Writer,
    hold,
    segment,
    take_lead,
)
from tests.unit.broker.scalable.stored import nothing_is_noted, stored_segments

WHOLE = segment(0, 0xFFFF, 0)
Opened = TypeVar("Opened")
OURS = ("/topics/", STEPS_ROOT, "/managed-ledgers/")
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


class DiesAt:
    """A store whose process dies at one of its writes to topics: made, and never answered."""

    def __init__(self, view: View, store: MemoryMetadataStore, writes: int) -> None:
        self.died = asyncio.Event()
        self._view = view
        self._store = store
        self._left = writes

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def put(self, key: str, value: bytes, **how: object) -> object:
        result = await self._store.put(key, value, **how)  # type: ignore[arg-type]
        self._written(key)
        return result

    async def delete(self, key: str, **how: object) -> bool:
        result = await self._store.delete(key, **how)  # type: ignore[arg-type]
        self._written(key)
        return result

    def live_on(self) -> None:
        """Let the process live, whatever it writes from now on, or is writing."""
        self._left = 0

    def _written(self, key: str) -> None:
        if key.startswith(OURS):
            self._left -= 1
            if self._left == 0:
                self._view.open.clear()
                self.died.set()


async def two(cluster: Cluster) -> tuple[Node, Node]:
    a, b = await cluster.add(), await cluster.add()
    await until(lambda: all(len(node.placement.candidates) == 2 for node in (a, b)))
    return a, b


async def at_owner(node: Node, name: str) -> RawClient:
    """Where a segment is, or this broker if nobody who lives has it."""
    alive = (one for one in node.cluster.nodes if one.view.open.is_set() and one.owns(name))
    return await next(alive, node).client()


async def opened(node: Node, name: str, work: Callable[[RawClient], Awaitable[Opened]]) -> Opened:
    """What is opened at the owner, who may be changing just now."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await work(await at_owner(node, name))
            except BrokerError as error:
                if error.code != pb.ServiceNotReady:
                    raise
            await asyncio.sleep(0.01)


async def published(node: Node, name: str, payload: bytes) -> None:
    producer = await opened(node, name, lambda client: client.create_producer(name))
    await producer.send(payload)
    await producer.close()


async def delivered(node: Node, name: str, count: int) -> list[bytes]:
    consumer = await opened(
        node, name, lambda client: client.subscribe(name, "s", EARLIEST, permits=count)
    )
    return [(await consumer.receive()).payload for _ in range(count)]


async def dies_in(cluster: Cluster, change: str, writes: int) -> tuple[Node, bool]:
    """The survivor, and whether the leader died before all was done."""
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    client = await a.client()
    await (await client.subscribe(WHOLE, "s", EARLIEST)).close()
    await published(a, WHOLE, b"before")
    await take_lead(b)
    b.view._store = dying = DiesAt(b.view, cluster.metadata, writes)  # type: ignore[assignment]
    scalable = b.broker.scalable
    work = scalable.split(TOPIC, 0) if change == "split" else scalable.delete(TOPIC, force=True)
    task = asyncio.create_task(work)

    async def ended() -> bool:
        return dying.died.is_set() or (task.done() and await nothing_is_noted(cluster.metadata))

    await until_awaited(ended)
    if not dying.died.is_set():
        dying.live_on()  # A child that is being loaded here may write once more.
        await task
        return a, False
    task.cancel()
    with suppress(asyncio.CancelledError, MagnetarError):
        await asyncio.wait({task}, timeout=1)
    await b.kill()
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    return a, True


@pytest.mark.parametrize("change", ["split", "delete"])
async def test_layout_change_of_a_dead_leader_is_finished_or_undone(change: str) -> None:
    epochs: list[int] = []
    for writes in range(1, 60):
        cluster = Cluster()
        try:
            survivor, died = await dies_in(cluster, change, writes)
            epochs.append(await state_of(cluster, survivor, change))
        finally:
            await cluster.close()
        if not died:
            break
    assert len(epochs) > 3
    assert epochs == sorted(epochs), "once it is published it is finished"
    assert set(epochs) == {0, 1}


async def state_of(cluster: Cluster, survivor: Node, change: str) -> int:
    """0 if nothing has happened, 1 if all has; anything in between fails."""
    try:
        layout = (await survivor.broker.scalable.get(TOPIC)).layout
    except ScalableTopicNotFound:
        assert change == "delete"
        assert set(await stored_segments(cluster.metadata, TOPIC)) == set()
        return 1
    if layout.epoch == 0:
        assert set(await stored_segments(cluster.metadata, TOPIC)) == {"0000-ffff-0"}
        await published(survivor, WHOLE, b"after")
        assert await delivered(survivor, WHOLE, 2) == [b"before", b"after"]
        return 0
    assert change == "split"
    assert survivor.broker.topics.loaded()[WHOLE].sealed
    assert await delivered(survivor, WHOLE, 1) == [b"before"]
    for child in (segment(0, 0x7FFF, 1), segment(0x8000, 0xFFFF, 2)):
        await published(survivor, child, b"below")
        assert await delivered(survivor, child, 1) == [b"below"]
    return layout.epoch


async def dies_in_a_prune(cluster: Cluster, writes: int) -> tuple[Node, bool]:
    """The survivor, which owns the segment that goes, and whether the leader died before that."""
    given = {"unsubscribed_retention_minutes": 0}
    a, b = await cluster.add(**given), await cluster.add(**given)
    await until(lambda: all(len(node.placement.candidates) == 2 for node in (a, b)))
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    await take_lead(b)
    await b.broker.scalable.split(TOPIC, 0)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    b.view._store = dying = DiesAt(b.view, cluster.metadata, writes)  # type: ignore[assignment]
    task = asyncio.create_task(b.broker.scalable.prune_all())
    died = asyncio.create_task(dying.died.wait())
    await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
    died.cancel()
    if not dying.died.is_set():
        dying.live_on()
        await task
        return a, False
    task.cancel()
    await b.kill()
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    return a, True


async def test_a_prune_that_a_dead_leader_began_is_finished() -> None:
    for writes in range(1, 30):
        cluster = Cluster()
        try:
            survivor, died = await dies_in_a_prune(cluster, writes)
            await until_awaited(lambda: is_pruned(cluster, survivor))  # noqa: B023
        finally:
            await cluster.close()
        if not died:
            break
    assert writes > 3


async def is_pruned(cluster: Cluster, node: Node) -> bool:
    """Whether the sealed segment is gone, from the layout and from the store."""
    await node.broker.scalable.prune_all()
    named = {each.descriptor for each in named_by((await node.broker.scalable.get(TOPIC)).layout)}
    whole = named == set(await stored_segments(cluster.metadata, TOPIC))
    return whole and len(named) == 2 and await nothing_is_noted(cluster.metadata)


def named_by(layout: Layout) -> list[SegmentName]:
    return [segment_of(TOPIC, each) for each in layout.segments.values()]


async def test_an_owner_that_dies_while_its_segment_is_sealed(cluster: Cluster) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    holder = await a.client()
    producer = await holder.create_producer(WHOLE)
    await producer.send(b"before")
    await (await holder.subscribe(WHOLE, "s", EARLIEST)).close()
    await take_lead(b)
    await b.broker.scalable.split(TOPIC, 0)
    await until(lambda: a.broker.topics.loaded()[WHOLE].state.value == "sealing")
    await a.kill()
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    assert b.broker.topics.loaded()[WHOLE].sealed
    assert await delivered(b, WHOLE, 1) == [b"before"]


async def test_a_seal_that_fails_when_a_lead_is_taken_is_tried_again_soon(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    seal, calls = LocalSegments.seal, 0

    async def seal_at_last(segments: LocalSegments, segment: SegmentName) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()
        elif calls == 2:
            raise SealInterrupted("The test unloads the segment: seal it again.")
        await seal(segments, segment)

    monkeypatch.setattr(LocalSegments, "seal", seal_at_last)
    await take_lead(b)
    await b.broker.scalable.split(TOPIC, 0)
    await until(lambda: calls == 1)
    await b.broker.scalable._leads.give_up(TOPIC)
    with capture_logs() as logs:
        await take_lead(a)
        await until_awaited(lambda: nothing_is_noted(cluster.metadata))
        # The note goes before the line is written.
        await until(lambda: any(each["event"] == "layout_step_recovered" for each in logs))
    events = [one["event"] for one in logs if one["event"].startswith("layout_step_")]
    assert events == ["layout_step_not_recovered", "layout_step_recovered"]


async def test_order_and_everything_through_all_that_can_happen(cluster: Cluster) -> None:
    nodes = [await cluster.add(scalable_consumer_grace_period_s=5) for _ in range(3)]
    await nodes[0].broker.scalable.create(TOPIC, segments=2, properties={})
    log: list[tuple[str, int]] = []
    wrote = Writer(cluster, keys=6)
    reads = [OrderedReader(cluster, name, log=log) for name in ("r1", "r2")]
    try:
        await until(lambda: all(len(each.attached) == 1 for each in reads))
        for happening in (split, unload, move_lead, merge, kill, split, drain, unload, merge):
            before = len(log)
            await happening(cluster, wrote)
            await until(lambda before=before: len(log) > before + 20)  # type: ignore[misc]
        await wrote.stop()
        await until(lambda: {(k, n) for k, c in wrote.sent.items() for n in range(c)} <= set(log))
        for key in wrote.sent:
            first_seen = list(dict.fromkeys(number for each, number in log if each == key))
            assert first_seen == sorted(first_seen), key
    finally:
        for user in (wrote, *reads):
            await user.close()


def leader_of(cluster: Cluster) -> Node:
    return next((node for node in cluster.nodes if node.placement.owns(TOPIC)), cluster.nodes[0])


async def split(cluster: Cluster, wrote: Writer) -> None:
    segment = next(each for each in wrote.dag.segments if each.state == pb.ACTIVE)
    await until_awaited(
        lambda: is_changed(leader_of(cluster).broker.scalable.split(TOPIC, segment.segment_id))
    )


async def merge(cluster: Cluster, wrote: Writer) -> None:
    first, second, *_ = (await cluster.nodes[0].broker.scalable.get(TOPIC)).layout.active
    ids = (first.segment_id, second.segment_id)
    await until_awaited(lambda: is_changed(leader_of(cluster).broker.scalable.merge(TOPIC, ids)))


async def is_changed(change: Awaitable[object]) -> bool:
    """Whether the broker that was asked for it still leads the topic, or takes the lead."""
    try:
        await change
    except NotController:
        return False
    return True


async def unload(cluster: Cluster, wrote: Writer) -> None:
    for node in cluster.nodes:
        for name in list(node.broker.topics.loaded()):
            await node.broker.topics.unload(parse_topic_name(name))


async def move_lead(cluster: Cluster, wrote: Writer) -> None:
    await leader_of(cluster).broker.scalable._leads.give_up(TOPIC)


async def kill(cluster: Cluster, wrote: Writer) -> None:
    node = leader_of(cluster)
    cluster.nodes.remove(node)
    await node.kill()


async def drain(cluster: Cluster, wrote: Writer) -> None:
    node = leader_of(cluster)
    await cluster.add(scalable_consumer_grace_period_s=5)
    cluster.nodes.remove(node)
    await node.broker.drain()


async def test_a_note_that_came_late_is_cleared_away(cluster: Cluster) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await take_lead(a)
    layout = (await a.broker.scalable.get(TOPIC)).layout
    change = split_layout(layout, 0, now_ms=1)
    assert await b.broker.scalable._store.begin(step_of(TOPIC, change)) is None
    await a.broker.scalable.prune_all()
    assert await nothing_is_noted(cluster.metadata)


async def test_a_frozen_leader_that_wakes_up_undoes_nothing(cluster: Cluster) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    await take_lead(b)
    b.view._store = dying = DiesAt(b.view, cluster.metadata, 2)  # type: ignore[assignment]
    frozen = asyncio.create_task(b.broker.scalable.split(TOPIC, 0))
    await dying.died.wait()
    assert not frozen.done()
    await b.view.expire(quietly=True)
    await until(lambda: len(a.placement.candidates) == 1)
    await a.broker.scalable.split(TOPIC, 0)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    b.view.open.set()
    with pytest.raises(MagnetarError):
        await frozen
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    stored = await stored_segments(cluster.metadata, TOPIC)
    assert set(stored) == {"0000-ffff-0", "0000-7fff-1", "8000-ffff-2"}
    _, first = await (await a.client()).watch_dag(NAME)
    assert first.dag.epoch == 1


async def held_before_its_change(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> tuple[asyncio.Task[None], asyncio.Event]:
    """A split whose children are prepared; it changes the record once the event is set."""
    store = node.broker.scalable._store
    change, reached, go_on = store.change, asyncio.Event(), asyncio.Event()

    async def held(stored: StoredTopic, record: ScalableTopicRecord) -> StoredTopic:
        reached.set()
        await go_on.wait()
        return await change(stored, record)

    monkeypatch.setattr(store, "change", held)
    task = asyncio.create_task(node.broker.scalable.split(TOPIC, 0))
    await reached.wait()
    return task, go_on


async def cursors_of_children(cluster: Cluster) -> list[list[str]]:
    path = "/managed-ledgers/public/default/segment/t"
    children = ("0000-7fff-1", "8000-ffff-2")
    return [await cluster.metadata.children(f"{path}/{child}") for child in children]


@pytest.mark.parametrize("published", [False, True])
async def test_deposed_leader_leaves_the_equal_split_of_the_next_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    """It does not know yet that it is deposed when its change of the record fails."""
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    client = await a.client()
    producer = await client.create_producer(WHOLE)
    await (await client.subscribe(WHOLE, "s", EARLIEST)).close()
    await take_lead(b)
    deposed, release_deposed = await held_before_its_change(b, monkeypatch)
    await b.broker.scalable._leads.give_up(TOPIC)
    monkeypatch.setattr(b.broker.scalable._reshaper, "_leads", lambda _: True)
    await take_lead(a)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    later, release_later = await held_before_its_change(a, monkeypatch)
    (step,) = await a.broker.scalable._store.begun_for(TOPIC)
    if published:
        release_later.set()
        await later
    release_deposed.set()
    with pytest.raises(ConcurrentChange):
        await deposed
    await until(lambda: not b.broker.scalable._housekeeping._leftovers.all())
    assert await a.broker.scalable._store.begun_for(TOPIC) == [step]
    assert await cursors_of_children(cluster) == [["s"], ["s"]]
    release_later.set()
    await later
    await producer.close()
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    assert a.broker.topics.loaded()[WHOLE].sealed
    assert await cursors_of_children(cluster) == [["s"], ["s"]]


async def test_defect_in_a_feed_listener_closes_only_that_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(b, WHOLE)
    await take_lead(a)
    await (await a.client()).subscribe_scalable(NAME, "s", "reader")
    told, failures = a.broker.scalable.remote_attached, [KeyError("a defect"), RuntimeError("one")]

    def fails(*args: object) -> None:
        if failures:
            raise failures.pop()
        told(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(a.broker.scalable, "remote_attached", fails)
    with capture_logs() as logs:
        await (await b.client()).subscribe(WHOLE, "s", EARLIEST)
        await until(lambda: not failures)
        mirrors = a.broker.scalable._mirrors
        name = segment_name(parse_topic_name(WHOLE))

        def known() -> bool:
            state = mirrors.state(name)
            return state is not None and len(state.consumers()) == 1 and not mirrors._incomplete

        await until(known)
    defects = [one for one in logs if one["event"] == "task_failed"]
    assert [type(one["exc_info"]) for one in defects] == [RuntimeError, KeyError], "as ours"
    assert not [one for one in logs if one["event"] == "feed_lost"], "the peer did nothing"


async def test_a_feed_that_breaks_where_it_begins_is_asked_for_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await two(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(b, WHOLE)
    await take_lead(a)
    send, failures = Follower.send, [RuntimeError("a defect")]

    def fails(follower: Follower, message: dict[str, object]) -> None:
        if failures:
            raise failures.pop()
        send(follower, message)

    monkeypatch.setattr(Follower, "send", fails)
    with capture_logs() as logs:
        await (await a.client()).subscribe_scalable(NAME, "s", "reader")
        await until(lambda: a.broker.scalable._mirrors.has_heard(b.id, TOPIC))
    assert "channel_request_failed" in [one["event"] for one in logs]
