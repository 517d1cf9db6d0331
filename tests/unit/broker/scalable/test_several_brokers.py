"""One topic over several brokers: segments here and there, the controller on one of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest

from broker.cli.rest_client import call
from broker.scalable.topic_store import ScalableTopicNotFound
from broker.topics.topic import Topic
from config.bounds import SEGMENT_SETTLES_S
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name, segment_name
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.node import group_of
from tests.unit.broker.scalable.several import (
    NAME,
    TOPIC,
    OrderedReader,
    Writer,
    hold,
    segment,
    take_lead,
)
from tests.unit.broker.scalable.stored import noted_steps, nothing_is_noted

WHOLE = segment(0, 0xFFFF, 0)
LOWER, UPPER = segment(0, 0x7FFF, 1), segment(0x8000, 0xFFFF, 2)


@pytest.fixture
async def users() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def three(cluster: Cluster, **settings: object) -> tuple[Node, Node, Node]:
    given = {"scalable_consumer_grace_period_s": 30} | settings
    nodes = [await cluster.add(**given) for _ in range(3)]
    await until(lambda: all(len(node.placement.candidates) == 3 for node in nodes))
    return nodes[0], nodes[1], nodes[2]


async def three_apart(cluster: Cluster) -> tuple[Node, Node, Node]:
    """The first has the topic's only segment, the second leads the topic."""
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    await take_lead(b)
    return a, b, c


def writer(cluster: Cluster, users: AsyncExitStack, keys: int = 8) -> Writer:
    made = Writer(cluster, keys)
    users.push_async_callback(made.close)
    return made


def reader(cluster: Cluster, users: AsyncExitStack, name: str) -> OrderedReader:
    made = OrderedReader(cluster, name)
    users.push_async_callback(made.close)
    return made


def everything(wrote: Writer, *readers: OrderedReader) -> Callable[[], bool]:
    """Whether every number was read by somebody."""

    def is_so() -> bool:
        return all(
            set(range(count)) <= {n for each in readers for n in each.got.get(key, [])}
            for key, count in wrote.sent.items()
        )

    return is_so


async def test_a_split_goes_on_elsewhere_in_order(cluster: Cluster, users: AsyncExitStack) -> None:
    _, b, c = await three_apart(cluster)
    wrote, read = writer(cluster, users), reader(cluster, users, "r")
    await until(lambda: sum(wrote.sent.values()) > 50 and WHOLE in read.attached)
    await b.broker.scalable.split(TOPIC, 0)
    await hold(c, LOWER)
    await until(lambda: wrote.dag.epoch == 1)
    before = sum(wrote.sent.values())
    await until(lambda: sum(wrote.sent.values()) > before + 50)
    await until(lambda: read.assigned == [1, 2])
    await wrote.stop()
    await until(everything(wrote, read))
    for key, count in wrote.sent.items():
        assert read.got[key] == list(range(count)), key
    assert wrote.epochs == sorted(wrote.epochs)
    assert c.owns(LOWER)
    assert await noted_steps(cluster.metadata) == []


async def test_a_merge_of_segments_on_two_brokers(cluster: Cluster, users: AsyncExitStack) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    await hold(a, segment(0, 0x7FFF, 0))
    await hold(b, segment(0x8000, 0xFFFF, 1))
    await take_lead(c)
    wrote = writer(cluster, users)
    reads = [reader(cluster, users, name) for name in ("r1", "r2")]
    await until(lambda: all(len(each.attached) == 1 for each in reads))
    await until(lambda: sum(wrote.sent.values()) > 50)
    await c.broker.scalable.merge(TOPIC, (0, 1))
    await until(lambda: sorted(each.assigned for each in reads) == [[], [2]])
    before = sum(wrote.sent.values())
    await until(lambda: sum(wrote.sent.values()) > before + 50)
    await wrote.stop()
    await until(everything(wrote, *reads))
    for key, count in wrote.sent.items():
        numbers = [n for each in reads for n in each.got.get(key, [])]
        assert sorted(numbers) == list(range(count)), key
        assert all(each.got.get(key, []) == sorted(each.got.get(key, [])) for each in reads)


async def test_a_killed_leader_is_followed_by_another(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    a, b, c = await three_apart(cluster)
    wrote, read = writer(cluster, users, keys=2), reader(cluster, users, "r")
    await until(lambda: WHOLE in read.attached and sum(wrote.sent.values()) > 10)
    await b.kill()
    await until(lambda: read.registrations > 1)
    leader = next(node for node in (a, c) if node.placement.owns(TOPIC))
    group = group_of(leader.broker.scalable)
    assert group.group.registered() == ["r"]
    await leader.broker.scalable.split(TOPIC, 0)
    await until(lambda: read.assigned == [1, 2])
    await wrote.stop()
    await until(everything(wrote, read))
    for key, count in wrote.sent.items():
        assert read.got[key] == list(range(count)), key


async def test_a_drained_broker_hands_its_lead_over(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    await hold(a, segment(0, 0x7FFF, 0))
    await take_lead(b)
    read = reader(cluster, users, "r")
    await until(lambda: len(read.attached) == 2)
    await b.broker.drain()
    await until(lambda: read.registrations > 1 and len(read.attached) == 2)
    assert a.placement.owns(TOPIC) or c.placement.owns(TOPIC)


async def test_a_leader_that_loses_its_session_sends_its_consumers_away(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    _, b, _ = await three_apart(cluster)
    read = reader(cluster, users, "r")
    await until(lambda: WHOLE in read.attached)
    before = b.broker.scalable.controllers.of(TOPIC)
    await b.view.expire()
    await until(lambda: read.registrations > 1)
    (leader,) = [node for node in cluster.nodes if node.placement.owns(TOPIC)]
    after = leader.broker.scalable.controllers.of(TOPIC)
    assert after is not None
    assert after is not before
    assert after.groups["s"].group.registered() == ["r"]
    await until(lambda: len(after.groups["s"]._attached) == 1)


async def test_sessions_hear_where_segments_and_lead_move(cluster: Cluster) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    await take_lead(a)
    session, first = await (await c.client()).watch_dag(NAME)
    assert first.dag.segment_brokers[0].broker_url == a.placement.broker_url
    assert first.dag.controller_broker_url == a.placement.broker_url
    await a.broker.scalable._leads.give_up(TOPIC)
    await take_lead(b)

    async def until_told(node: Node, what: Callable[[pb.ScalableTopicDAG], str]) -> None:
        while True:
            dag = (await session.next()).scalable_topic_update.dag
            assert dag.epoch == 0
            if what(dag) == node.placement.broker_url:
                return

    await until_told(b, lambda dag: dag.controller_broker_url)
    await a.broker.topics.unload(segment_name(parse_topic_name(WHOLE)).topic_name)
    await hold(b, WHOLE)
    await until_told(b, lambda dag: dag.segment_brokers[0].broker_url)


async def test_receipts_wait_for_a_layout_that_comes_from_another_broker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client would send after them would be in a batch that is open when it gets it."""
    a, b, c = await three_apart(cluster)
    sender, follower = await a.client(), await c.client()
    producer = await sender.create_producer(WHOLE)
    session, _ = await follower.watch_dag(NAME)
    receipts = 0

    async def send() -> None:
        nonlocal receipts
        while True:
            await producer.send(b"x")
            receipts += 1

    monkeypatch.setattr(follower, "send_pong", lambda: None)
    sending = asyncio.create_task(send())
    await until(lambda: receipts > 10)
    await b.broker.scalable.split(TOPIC, 0)
    update = (await session.next()).scalable_topic_update
    assert update.dag.epoch == 1
    before = receipts
    for _ in range(10):
        await sender.ping()
    assert receipts == before, "the client has not answered: it may not have read the layout"
    monkeypatch.undo()
    follower.send_pong()
    await until(lambda: receipts > before)
    await producer.close()
    sending.cancel()


async def test_a_new_layout_names_the_owners_of_its_segments(cluster: Cluster) -> None:
    _, b, c = await three_apart(cluster)
    session, _ = await (await c.client()).watch_dag(NAME)
    await b.broker.scalable.split(TOPIC, 0)
    dag = (await session.next()).scalable_topic_update.dag
    named = {each.segment_id: each.broker_url for each in dag.segment_brokers}
    for number, child in ((1, LOWER), (2, UPPER)):
        assert [node.placement.broker_url for node in cluster.owners(child)] == [named[number]]


async def test_a_segment_is_changed_once_senders_have_left_its_parents(cluster: Cluster) -> None:
    a, b, _ = await three_apart(cluster)
    producer = await (await a.client()).create_producer(WHOLE)
    await b.broker.scalable.split(TOPIC, 0)
    second = asyncio.create_task(b.broker.scalable.split(TOPIC, 1))
    await asyncio.sleep(2 * SEGMENT_SETTLES_S)
    assert not second.done(), "a sender is attached to segment 0"
    await producer.close()
    await second
    assert a.broker.topics.loaded()[WHOLE].sealed


async def test_any_broker_shows_the_layout_after_a_change_was_answered(cluster: Cluster) -> None:
    a, b, _ = await three_apart(cluster)
    await a.broker.scalable.get(TOPIC)
    a.view.watching.clear()
    await b.broker.scalable.split(TOPIC, 0)
    assert (await a.broker.scalable.get(TOPIC)).layout.epoch == 1
    a.view.watching.set()


async def test_lost_feed_connection_starts_with_a_new_snapshot(cluster: Cluster) -> None:
    a, b, _ = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    names = [segment(0, 0x7FFF, 0), segment(0x8000, 0xFFFF, 1)]
    await hold(a, names[0])
    await hold(a, names[1])
    controller, clients = await b.client(), [await a.client(), await a.client()]
    await controller.subscribe_scalable(NAME, "s", "r")
    for number, (name, client) in enumerate(zip(names, clients, strict=True)):
        options = pb.CommandSubscribe(consumer_name=f"r-seg-{number}")
        await client.subscribe(name, "s", options)
    group = group_of(b.broker.scalable)
    follower = b.broker.scalable._follower
    assert follower is not None
    await until(lambda: len(group._attached) == 2)
    apply, follower._apply = follower._apply, lambda *_: None  # type: ignore[method-assign]
    await clients[0].close()
    await until(lambda: not a.broker.topics.loaded()[names[0]].subscriptions["s"].consumers)
    assert len(group._attached) == 2, "the feed tells nothing just now"
    follower._apply = apply  # type: ignore[method-assign]
    await follower._connected[a.id].close()
    await until(lambda: len(group._attached) == 1)
    assert group.is_registered("r"), "nobody saw it leave"
    assert group.group.sessions["r"].taken_up == {1}
    await clients[1].consumers.popitem()[1].close()
    await until(lambda: not group._attached)


async def test_a_consumer_moves_with_its_segment(cluster: Cluster, users: AsyncExitStack) -> None:
    a, b, c = await three_apart(cluster)
    read = reader(cluster, users, "r")
    await until(lambda: WHOLE in read.attached)
    group = group_of(b.broker.scalable)
    await until(lambda: len(group._attached) == 1)
    (before,) = group._attached
    name = segment_name(parse_topic_name(WHOLE))
    await a.broker.topics.unload(name.topic_name)
    await until(lambda: WHOLE in read.attached and list(group._attached) != [before])
    owner = next(node for node in (a, b, c) if node.owns(WHOLE))
    known = b.broker.scalable._mirrors._followed[TOPIC]
    told_by = [] if owner is b else [owner.id]
    await until(lambda: [each for each in known if 0 in known[each]] == told_by)
    await until(lambda: len(group._attached) == 1)
    assert group.group.sessions["r"].taken_up == {0}
    assert read.registrations == 1


async def test_a_former_owner_that_is_slow_to_close_holds_up_a_merge_no_longer_than_that(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    lower, upper = segment(0, 0x7FFF, 0), segment(0x8000, 0xFFFF, 1)
    await hold(a, lower)
    await hold(c, upper)
    await take_lead(b)
    wrote, read = writer(cluster, users), reader(cluster, users, "r")
    await until(lambda: sum(wrote.sent.values()) > 50 and {lower, upper} <= read.attached)
    may_close = hold_up(a.broker.topics.loaded()[lower], users)
    await a.view.expire()
    mirrors = b.broker.scalable._mirrors
    await until(lambda: a.id in b.placement.brokers and mirrors.has_heard(a.id, TOPIC))
    await hold(c, lower)
    await until(lambda: {lower, upper} <= read.attached)
    await b.broker.scalable.merge(TOPIC, (0, 1))
    drained = c.broker.topics.loaded()[lower].subscriptions["s"]
    await until(lambda: drained.drained)
    may_close.set()
    await until(lambda: read.assigned == [2])
    await wrote.stop()
    await until(everything(wrote, read))


async def test_a_former_owner_of_a_parent_that_was_read_takes_no_child_from_its_reader(
    cluster: Cluster, users: AsyncExitStack
) -> None:
    a, b, _ = await three_apart(cluster)
    read = reader(cluster, users, "r")
    await until(lambda: WHOLE in read.attached)
    await b.broker.scalable.split(TOPIC, 0)
    await until(lambda: read.assigned == [1, 2])
    hold_up(a.broker.topics.loaded()[WHOLE], users)
    group = group_of(b.broker.scalable)
    await a.view.expire()
    await until(lambda: not b.broker.scalable._mirrors.has_heard(a.id, TOPIC))
    await until(lambda: b.broker.scalable._mirrors.has_heard(a.id, TOPIC))
    assert group.group.drained == {0}
    assert group.group.sessions["r"].assigned == {1, 2}


async def test_closing_segment_has_no_local_state(cluster: Cluster, users: AsyncExitStack) -> None:
    a, _, _ = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(a, WHOLE)
    topic, name = a.broker.topics.loaded()[WHOLE], segment_name(parse_topic_name(WHOLE))
    segments = a.broker.scalable._segments
    assert segments.state(name) is not None
    may_close = hold_up(topic, users)
    unloading = asyncio.create_task(a.broker.topics.unload(name.topic_name))
    await until(lambda: topic.closing)
    assert segments.state(name) is None
    may_close.set()
    await unloading


def hold_up(topic: Topic, users: AsyncExitStack) -> asyncio.Event:
    """Have closing a topic wait for this event, or for the end; consumers are sent away before."""
    may_close, close = asyncio.Event(), topic.buffer.close

    async def close_late() -> None:
        await may_close.wait()
        await close()

    topic.buffer.close = close_late  # type: ignore[method-assign]
    users.callback(may_close.set)
    return may_close


async def test_topics_that_nobody_uses_are_led_by_nobody(cluster: Cluster) -> None:
    a, b, _ = await three(cluster)
    scalable = b.broker.scalable
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(b, WHOLE)
    await scalable.create_subscription(TOPIC, "s", kind="STREAM", start=EARLIEST)
    assert b.placement.owns(TOPIC)
    await scalable.let_go_of_idle(0)
    await scalable.let_go_of_idle(10_000)
    assert b.placement.owns(TOPIC), "its record is followed while a segment of it runs here"
    await b.broker.topics.unload(segment_name(parse_topic_name(WHOLE)).topic_name)
    await scalable.let_go_of_idle(20_000)
    await scalable.let_go_of_idle(30_000)
    assert not b.placement.owns(TOPIC)
    assert not scalable._topics.all()
    assert not scalable._topics._watching


async def test_a_topic_is_deleted_everywhere_and_made_again(cluster: Cluster) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    await hold(a, segment(0, 0x7FFF, 0))
    await hold(b, segment(0x8000, 0xFFFF, 1))
    watching = await a.client()
    await watching.watch_dag(NAME)
    with pytest.raises(ScalableTopicNotFound):
        await b.broker.scalable.delete(parse_topic_name(f"{NAME}2"), force=True)
    await c.broker.scalable.delete(TOPIC, force=True)
    await until(lambda: a.broker.scalable._topics.known(TOPIC) is None)
    assert not a.broker.topics.loaded()
    assert not b.broker.topics.loaded()
    assert not c.placement.owns(TOPIC)
    await b.broker.scalable.create(TOPIC, segments=1, properties={})
    assert "made again" in await watching.wait_closed() or watching.closed.done()
    _, first = await (await a.client()).watch_dag(NAME)
    assert len(first.dag.segments) == 1


async def test_rest_goes_to_the_leader(cluster: Cluster) -> None:
    a, b, c = await three_apart(cluster)
    base = f"{c.placement.web_url}/admin/v2/scalable/public/default/t"
    async with aiohttp.ClientSession() as http:
        async with http.put(f"{base}/subscriptions/s%2F1?type=STREAM") as answer:
            assert answer.status == 204
        async with http.post(f"{base}/split/0", allow_redirects=False) as answer:
            assert answer.status == 307
            assert answer.headers["Location"].startswith(b.placement.web_url)
        async with http.post(f"{base}/split/0") as answer:
            assert answer.status == 204
        async with http.get(f"{base}/stats") as answer:
            stats = await answer.json()
        async with http.delete(f"{base}/subscriptions/s%2F1") as answer:
            assert answer.status == 204
        async with http.post(f"{base}x/split/0") as answer:
            assert answer.status == 404
    assert stats["layout"]["segments"]["0"]["ownerBroker"] == a.id
    assert set(stats["subscriptions"]["s/1"]["segments"]) == {"0", "1", "2"}


async def test_the_command_line_is_sent_on_to_the_leader(cluster: Cluster) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=2, properties={})
    await take_lead(b)
    path = "/admin/v2/scalable/public/default/t"
    await asyncio.to_thread(call, c.placement.web_url, "POST", f"{path}/merge/0/1")
    layout = await asyncio.to_thread(call, c.placement.web_url, "GET", path)
    assert isinstance(layout, dict)
    assert layout["epoch"] == 1


async def test_a_subscription_made_below_a_parent_that_is_being_sealed(cluster: Cluster) -> None:
    a, b, c = await three(cluster)
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    holder = await a.client()
    await holder.create_producer(WHOLE)
    await holder.subscribe(WHOLE, "s")
    await take_lead(b)
    await b.broker.scalable.split(TOPIC, 0)
    lower = segment_name(parse_topic_name(LOWER))
    await until(lambda: c.broker.scalable._topics.known(TOPIC) is None)
    assert await c.broker.scalable.inherits_subscription(lower, "s")
    assert not await c.broker.scalable.inherits_subscription(lower, "other")
    await holder.close()
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    assert not await c.broker.scalable.inherits_subscription(lower, "s")
