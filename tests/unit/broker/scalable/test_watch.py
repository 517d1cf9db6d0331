"""DAG sessions: what each name is answered with, and what is pushed when."""

import asyncio
import gc
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest

from broker.scalable import answers
from broker.scalable.dag import dag_of
from broker.scalable.live_topics import LiveTopic
from broker.wire.handlers.scalable import HANDLERS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World

REGULAR = parse_topic_name("persistent://public/default/r")


def only(peer: Peer) -> pb.CommandScalableTopicUpdate:
    (update,) = peer.layouts()
    return update


def ranges(dag: pb.ScalableTopicDAG) -> list[tuple[int, int]]:
    return [(s.hash_start, s.hash_end) for s in dag.segments]


@pytest.fixture
async def topic(node: Node) -> Node:
    await node.scalable.create(TOPIC, segments=2, properties={})
    return node


@pytest.mark.parametrize(
    "name",
    [
        "topic://public/default/t",
        "persistent://public/default/t",
        "t",
        "segment://public/default/t/0000-7fff-0",
    ],
)
async def test_every_name_of_a_topic_gives_its_layout(topic: Node, name: str) -> None:
    peer = topic.peer()
    session_id = await peer.watch(name)
    update = only(peer)
    assert update.session_id == session_id
    assert update.resolved_topic_name == str(TOPIC)
    assert not update.HasField("error")
    dag = update.dag
    assert (dag.epoch, ranges(dag)) == (0, [(0, 0x7FFF), (0x8000, 0xFFFF)])
    assert [s.created_at_ms for s in dag.segments] == [topic.clock.now_ms()] * 2
    assert not any(s.HasField("sealed_at_epoch") for s in dag.segments)
    assert [(b.segment_id, b.broker_url) for b in dag.segment_brokers] == [
        (0, "pulsar://127.0.0.1:6650"),
        (1, "pulsar://127.0.0.1:6650"),
    ]
    assert dag.controller_broker_url == "pulsar://127.0.0.1:6650"


async def test_every_change_is_pushed_once_to_each_session(topic: Node) -> None:
    peers = [topic.peer(), topic.peer()]
    for peer in peers:
        await peer.watch()
        await peer.watch("t")
    await topic.scalable.split(TOPIC, 0)
    await topic.scalable.merge(TOPIC, (3, 1))
    for peer in peers:
        told = [(u.session_id, u.dag.epoch) for u in peer.layouts()]
        assert len(told) == 6
        for session in (1, 2):
            assert [epoch for number, epoch in told if number == session] == [0, 1, 2]


async def test_a_client_that_does_not_read_gets_the_newest_layout_alone(topic: Node) -> None:
    peer, late = topic.peer(), topic.peer()
    await peer.watch()
    assert only(peer).dag.epoch == 0
    peer.writable = late.writable = False
    await late.watch()
    await topic.scalable.split(TOPIC, 0)
    await topic.scalable.split(TOPIC, 1)
    assert peer.layouts() == late.layouts() == []
    peer.writable = late.writable = True
    assert only(peer).dag.epoch == only(late).dag.epoch == 2
    await topic.scalable.split(TOPIC, 2)
    assert only(peer).dag.epoch == only(late).dag.epoch == 3


async def test_a_session_closed_while_its_client_does_not_read_gets_nothing(topic: Node) -> None:
    peer = topic.peer()
    peer.writable = False
    session_id = await peer.watch()
    topic.scalable.sessions.close(peer.as_connection(), session_id)
    peer.writable = True
    assert peer.layouts() == []


async def test_layout_has_sealed_segments_with_parents_and_children(topic: Node) -> None:
    peer = topic.peer()
    await peer.watch()
    await topic.scalable.split(TOPIC, 0)
    dag = peer.layouts()[-1].dag
    parent, _, lower, upper = dag.segments
    assert (parent.state, parent.sealed_at_epoch, list(parent.child_ids)) == (pb.SEALED, 1, [2, 3])
    assert list(lower.parent_ids) == list(upper.parent_ids) == [0]
    assert sorted(b.segment_id for b in dag.segment_brokers) == [1, 2, 3]


async def test_a_closed_session_gets_no_events(topic: Node) -> None:
    peer, gone = topic.peer(), topic.peer()
    session_id = await peer.watch()
    await gone.watch()
    topic.scalable.sessions.close(peer.as_connection(), session_id)
    topic.scalable.sessions.close(peer.as_connection(), 99)
    gone.close()
    peer.layouts()
    assert topic.scalable.sessions.count(TOPIC) == 0
    await topic.scalable.split(TOPIC, 0)
    assert peer.layouts() == []


async def test_a_regular_topic_is_shown_as_one_legacy_segment(node: Node) -> None:
    peer = node.peer()
    await peer.watch(REGULAR)
    update = only(peer)
    assert update.resolved_topic_name == "topic://public/default/r"
    assert (update.dag.epoch, ranges(update.dag)) == (0, [(0, 0xFFFF)])
    assert update.dag.segments[0].legacy_topic_name == str(REGULAR)
    assert not update.dag.segment_brokers
    assert update.dag.controller_broker_url
    assert not await node.topics.exists(REGULAR), "asking makes nothing"


async def test_a_partitioned_topic_is_shown_as_its_partitions(node: Node) -> None:
    await node.topics.partitioned.create(REGULAR, 3)
    peer = node.peer()
    await peer.watch("r")
    dag = only(peer).dag
    assert ranges(dag) == [(0, 21844), (21845, 43689), (43690, 65535)]
    assert [s.legacy_topic_name for s in dag.segments] == [
        f"persistent://public/default/r-partition-{n}" for n in range(3)
    ]
    assert [s.segment_id for s in dag.segments] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("persistent://public/default/r-partition-1", pb.TopicNotFound),
        ("segment://public/default/none/0000-ffff-0", pb.TopicNotFound),
        ("topic://public/default/none", pb.TopicNotFound),
        ("topic://public/nowhere/none", pb.TopicNotFound),
        ("non-persistent://public/default/r", pb.NotAllowedError),
        ("what://is/this/x", pb.InvalidTopicName),
    ],
)
async def test_watch_of_a_missing_topic_answers_an_error(
    node: Node, name: str, code: pb.ServerError
) -> None:
    peer = node.peer()
    session_id = await peer.watch(name, create=False)
    update = only(peer)
    assert (update.session_id, update.error) == (session_id, code)
    assert update.message
    assert not update.HasField("dag")


async def test_a_missing_topic_is_made_with_one_segment(node: Node) -> None:
    peer = node.peer()
    await peer.watch("topic://public/default/new")
    update = only(peer)
    assert ranges(update.dag) == [(0, 0xFFFF)]
    assert not update.dag.segments[0].HasField("legacy_topic_name")
    await node.scalable.split(parse_topic_name("topic://public/default/new"), 0)
    assert [u.dag.epoch for u in peer.layouts()] == [1]


async def test_watch_creates_no_topic_in_a_missing_namespace(node: Node) -> None:
    peer = node.peer()
    await peer.watch("topic://public/nowhere/new")
    assert only(peer).error == pb.TopicNotFound


@pytest.mark.parametrize("off", ["scalable_topic_auto_create", "auto_topic_creation"])
async def test_watch_creates_no_topic_where_the_settings_forbid_it(world: World, off: str) -> None:
    node = await Node(world, **{off: False}).start()
    peer = node.peer()
    await peer.watch("topic://public/default/new")
    assert only(peer).error == pb.TopicNotFound
    await node.stop()


async def test_the_namespace_decides_before_the_broker(world: World) -> None:
    node = await Node(world, auto_topic_creation=False).start()
    name = TOPIC.namespace_name

    def allow(record: dict[str, object]) -> None:
        record["autoTopicCreationOverride"] = {"allowAutoTopicCreation": True}

    await node.namespaces.change(name, allow)
    peer = node.peer()
    await peer.watch("topic://public/default/new")
    assert only(peer).dag.segments
    await node.stop()


async def test_lookups_at_once_make_one_topic(node: Node) -> None:
    peers = [node.peer() for _ in range(5)]
    name = "topic://public/default/new"
    await asyncio.gather(*(peer.watch(name) for peer in peers))
    assert all(only(peer).dag.segments for peer in peers)
    assert not any(peer.closing for peer in peers)


async def test_deletion_of_a_topic_is_not_sent_until_it_is_created_again(topic: Node) -> None:
    peer = topic.peer()
    await peer.watch()
    peer.layouts()
    await topic.scalable.delete(TOPIC, force=True)
    assert peer.layouts() == []
    assert not peer.closing
    await topic.scalable.create(TOPIC, segments=1, properties={})
    assert peer.closing, "it asks anew when it connects again"
    assert peer.layouts() == []


async def test_a_session_closed_while_it_is_answered_gets_no_answer(topic: Node) -> None:
    peer = topic.peer()
    asking = asyncio.ensure_future(peer.watch("persistent://public/default/other"))
    await asyncio.sleep(0)
    topic.scalable.sessions.close(peer.as_connection(), 1)
    await asking
    assert peer.layouts() == []


async def test_sessions_of_one_connection_are_bounded(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SESSIONS_PER_CONNECTION", 2, in_module="broker.scalable.watch")
    peer = topic.peer()
    for _ in range(3):
        await peer.watch()
    updates = peer.layouts()
    assert [u.HasField("dag") for u in updates] == [True, True, False]
    assert updates[-1].error == pb.TooManyRequests


async def test_names_that_topics_may_not_have(node: Node) -> None:
    peer = node.peer()
    await peer.watch("topic://public/default/ x")
    assert only(peer).error == pb.InvalidTopicName
    await peer.watch("topic://public/default/a/b")
    assert only(peer).resolved_topic_name == "topic://public/default/a/b"


async def test_close_in_the_same_read_closes_the_session(node: Node) -> None:
    """Both commands are served in one turn of the loop, before any task of the first one runs."""
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer = node.peer()
    lookup = pb.CommandScalableTopicLookup(session_id=1, topic=str(TOPIC))
    close = pb.CommandScalableTopicClose(session_id=1)
    commands = (
        pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_LOOKUP, scalable_topic_lookup=lookup),
        pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_CLOSE, scalable_topic_close=close),
    )
    works = [HANDLERS[each.type](peer.as_connection(), each, None) for each in commands]
    await asyncio.gather(*(asyncio.ensure_future(work) for work in works if work is not None))
    assert node.scalable.sessions.count(TOPIC) == 0


async def test_layout_is_encoded_once_for_all_sessions(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[pb.ScalableTopicDAG] = []
    encoded: list[pb.ScalableTopicDAG] = []
    encode_layout = answers.encode_layout

    def counted(*arguments: object, **options: object) -> pb.ScalableTopicDAG:
        made.append(dag_of(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    def counting(dag: pb.ScalableTopicDAG, resolved: TopicName) -> bytes:
        encoded.append(dag)
        return encode_layout(dag, resolved)

    monkeypatch.setattr("broker.scalable.watch.dag_of", counted)
    monkeypatch.setattr(answers, "encode_layout", counting)
    peers = [topic.peer() for _ in range(20)]
    for peer in peers:
        await peer.watch()
    assert (len(made), len(encoded)) == (1, 1)
    await topic.scalable.split(TOPIC, 0)
    assert (len(made), len(encoded)) == (2, 2)
    for peer in peers:
        assert [each.dag.epoch for each in peer.layouts()] == [0, 1]


async def test_each_form_of_an_address_gets_every_layout(topic: Node) -> None:
    plain, secure = topic.peer(), topic.peer()
    secure.tls = True
    for peer in (plain, secure):
        await peer.watch()
    await topic.scalable.split(TOPIC, 0)
    for peer in (plain, secure):
        assert [each.dag.epoch for each in peer.layouts()] == [0, 1]


class EveryoneElse:
    """Other brokers that have a sender to each segment, and own none."""

    def has(self, _: SegmentName) -> bool:
        return True

    def has_owner(self, _: SegmentName) -> bool:
        return False

    async def find_owners(self, _: Collection[SegmentName]) -> None:
        """Know no owner."""

    @asynccontextmanager
    async def paused(self, *_: Collection[SegmentName]) -> AsyncIterator[bool]:
        yield False


class SlowOnes(EveryoneElse):
    """Their senders pause when a test says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.have_paused = asyncio.Event()

    @asynccontextmanager
    async def paused(self, *_: Collection[SegmentName]) -> AsyncIterator[bool]:
        self.asked.set()
        await self.have_paused.wait()
        yield True


async def test_a_client_that_reads_again_while_others_pause_gets_the_layout_too(
    topic: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = topic.peer(), topic.peer()
    for peer in (slow, fast):
        await peer.watch()
    slow.writable = False
    await topic.scalable.split(TOPIC, 0)
    others = SlowOnes()
    monkeypatch.setattr(topic.scalable.sessions, "_others", others)
    await topic.scalable.split(TOPIC, 1)
    await others.asked.wait()
    slow.writable = True
    others.have_paused.set()
    for peer in (fast, slow):
        told: list[int] = []

        def is_told(peer: Peer = peer, told: list[int] = told) -> bool:
            told.extend(each.dag.epoch for each in peer.layouts())
            return 2 in told

        await until(is_told)
        assert told == [0, 1, 2]


async def test_a_broker_that_stops_leaves_no_push_behind_that_had_not_begun(
    topic: Node, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    await topic.peer().watch()
    sessions = topic.scalable.sessions
    monkeypatch.setattr(sessions, "_others", EveryoneElse())
    stopped = asyncio.Event()

    def stop(_: LiveTopic) -> None:
        sessions.stop()
        stopped.set()

    topic.scalable._topics.on_layout(stop)  # noqa: SLF001 - after the sessions
    await topic.scalable.split(TOPIC, 0)
    assert stopped.is_set()
    gc.collect()
    assert not [str(each.message) for each in recwarn if each.category is RuntimeWarning]
