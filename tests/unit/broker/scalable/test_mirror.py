"""What leaders know of segments elsewhere: messages in, calls out; and what owners say."""

import json
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from broker.placement.typed_request import MalformedRequest
from broker.scalable.feed import (
    FEED_EVENT,
    FEED_REQUESTS,
    FeedRequest,
    FollowTopic,
    SegmentFeeds,
    UnfollowTopic,
)
from broker.scalable.mirror import MalformedFeed, Mirrors, RemoteConsumer
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name
from tests.unit.broker.scalable.node import TOPIC, Node

T = str(TOPIC)
WHOLE = SegmentName(TOPIC, 0, 0xFFFF, 0)


class Heard:
    """A listener that notes what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def remote_attached(
        self, topic: TopicName, segment_id: int, subscription: str, consumer: RemoteConsumer
    ) -> None:
        self.said.append(("attached", segment_id, subscription, consumer.name))

    def remote_detached(
        self, topic: TopicName, consumer: RemoteConsumer, *, by_command: bool, seen: bool
    ) -> None:
        self.said.append(("detached", consumer.segment_id, consumer.name, by_command, seen))

    def remote_changed(self, topic: TopicName, segment_id: int) -> None:
        self.said.append(("changed", segment_id))

    def taken(self) -> list[tuple[object, ...]]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def mirrors(heard: Heard) -> Mirrors:
    made = Mirrors(heard)
    made.follow(TOPIC)
    return made


def everything(*consumers: str, sealed: bool = False, **at_end: bool) -> dict[str, object]:
    """Segment 0; a consumer named `a` has the id `a`, one named `a/2` the id `a/2`."""
    return {
        "segment": 0,
        "sealed": sealed,
        "empty": False,
        "atEnd": at_end,
        "consumers": [
            {"id": each, "subscription": "s", "name": each.partition("/")[0]} for each in consumers
        ],
    }


def snapshot(*segments: dict[str, object]) -> dict[str, object]:
    return {"topic": T, "kind": "snapshot", "segments": list(segments)}


def said(kind: str, **members: object) -> dict[str, object]:
    return {"topic": T, "kind": kind, "segment": 0, **members}


def attached(consumer_id: str, name: str) -> dict[str, object]:
    return said("attached", id=consumer_id, subscription="s", name=name)


def test_mirror_passes_events_on_in_order(mirrors: Mirrors, heard: Heard) -> None:
    mirrors.apply("b", snapshot())
    assert mirrors.has_heard("b", TOPIC)
    assert mirrors.state(WHOLE) is None
    mirrors.apply("b", attached("1", "a"))
    mirrors.apply("b", said("detached", id="1", byCommand=True))
    mirrors.apply("b", said("detached", id="1", byCommand=True))
    assert heard.taken() == [("attached", 0, "s", "a"), ("detached", 0, "a", True, True)]


def test_consumer_missing_in_a_new_snapshot_is_detached(mirrors: Mirrors, heard: Heard) -> None:
    mirrors.apply("b", snapshot(everything("a", "b")))
    heard.taken()
    mirrors.apply("b", snapshot(everything("b", "a/2")))
    assert heard.taken() == [
        ("attached", 0, "s", "a"),
        ("detached", 0, "a", False, False),
        ("changed", 0),
    ], "who came back is told before who is gone, and who stayed is not told"
    mirrors.apply("b", snapshot())
    assert [what for what, *_ in heard.taken()] == ["detached", "detached", "changed"]


def test_a_consumer_keeps_its_identity_over_snapshots(mirrors: Mirrors) -> None:
    mirrors.apply("b", snapshot(everything("a")))
    before = mirrors.state(WHOLE)
    assert before is not None
    mirrors.apply("b", snapshot(everything("a")))
    after = mirrors.state(WHOLE)
    assert after is not None
    assert after.consumers()[0][1] is before.consumers()[0][1]


def test_drained_needs_a_sealed_segment_and_every_owner_that_tells(mirrors: Mirrors) -> None:
    def drained(subscription: str = "s") -> bool:
        state = mirrors.state(WHOLE)
        return state is not None and state.drained(subscription)

    mirrors.apply("b", snapshot(everything(s=True)))
    assert not drained()
    mirrors.apply("b", said("segment", **everything(sealed=True, s=False)))
    assert not drained()
    mirrors.apply("b", said("atEnd", subscription="s", **{"is": True}))
    assert drained()
    assert not drained("unknown"), "it holds entries"
    mirrors.apply("c", snapshot(everything(sealed=True, s=False)))
    assert not drained()
    mirrors.apply("c", snapshot())
    assert drained()


def test_a_segment_is_shared_only_if_all_owners_that_report_it_allow_it(mirrors: Mirrors) -> None:
    def shareable() -> bool:
        state = mirrors.state(WHOLE)
        return state is not None and state.shareable

    # A broker of an earlier version does not say it.
    mirrors.apply("b", snapshot(everything()))
    assert not shareable()
    mirrors.apply("b", snapshot(everything() | {"shareable": True}))
    assert shareable()
    mirrors.apply("c", snapshot(everything() | {"shareable": False}))
    assert not shareable()


def test_mirror_forgets_consumers_of_a_broker_that_is_gone(mirrors: Mirrors, heard: Heard) -> None:
    mirrors.apply("b", snapshot(everything("a")))
    mirrors.apply("c", snapshot(everything("c")))
    heard.taken()
    mirrors.owner_gone("b")
    assert heard.taken() == [("detached", 0, "a", False, False), ("changed", 0)]
    assert not mirrors.has_heard("b", TOPIC)
    assert mirrors.has_heard("c", TOPIC)


@pytest.mark.parametrize("how", ["snapshot", "gone", "owner gone"])
def test_a_former_owner_that_has_let_go_leaves_the_word_to_the_new_one(
    mirrors: Mirrors, heard: Heard, how: str
) -> None:
    mirrors.apply("b", snapshot(everything(s=False)))
    mirrors.apply("c", snapshot(everything(sealed=True, s=True)))
    heard.taken()
    if how == "snapshot":
        mirrors.apply("b", snapshot())
    elif how == "gone":
        mirrors.apply("b", said("gone"))
    else:
        mirrors.owner_gone("b")
    assert heard.taken() == [("changed", 0)], "nobody else says that it is drained now"
    state = mirrors.state(WHOLE)
    assert state is not None
    assert state.drained("s")


def test_moved_segment_counts_at_both_owners_until_the_former_one_reports(
    mirrors: Mirrors, heard: Heard
) -> None:
    mirrors.apply("b", snapshot(everything("a")))
    mirrors.apply("c", snapshot(everything("a/2")))
    heard.taken()
    assert attached_now(mirrors) == ["a", "a"]
    mirrors.apply("b", said("gone"))
    assert heard.taken() == [("detached", 0, "a", False, False), ("changed", 0)]
    assert attached_now(mirrors) == ["a"]
    mirrors.apply("b", said("detached", id="a", byCommand=False))
    mirrors.apply("b", said("gone"))
    assert heard.taken() == []
    assert attached_now(mirrors) == ["a"]


def attached_now(mirrors: Mirrors) -> list[str]:
    state = mirrors.state(WHOLE)
    return [] if state is None else [consumer.name for _, consumer in state.consumers()]


def test_topics_that_are_not_followed_are_nobodys_business(mirrors: Mirrors, heard: Heard) -> None:
    mirrors.unfollow(TOPIC)
    mirrors.apply("b", snapshot(everything("a")))
    mirrors.follow(TOPIC)
    mirrors.apply("b", attached("1", "a"))
    assert heard.taken() == [], "events without a snapshot before them mean nothing"
    assert not mirrors.has_heard("b", TOPIC)


@pytest.mark.parametrize(
    "message",
    [
        [],
        {"topic": T},
        {"topic": T, "kind": "nonsense"},
        {"topic": "nonsense://", "kind": "snapshot", "segments": []},
        {"topic": T, "kind": "snapshot", "segments": [{}]},
        {"topic": T, "kind": "attached", "segment": "0"},
        {"topic": T, "kind": "segment", "segment": 0, "atEnd": 1},
    ],
)
def test_nonsense_is_refused(mirrors: Mirrors, message: object) -> None:
    mirrors.apply("b", snapshot())
    with pytest.raises(MalformedFeed):
        mirrors.apply("b", message)


# Both ends


class Wire:
    """A follower of a node's feeds, and what it understood."""

    def __init__(self, feeds: SegmentFeeds) -> None:
        self.heard = Heard()
        self.mirrors = Mirrors(self.heard)
        self.waiting: list[str] = []
        self.close: Callable[[], None] = lambda: None
        self._handlers = feeds.request_handlers()

    async def ask(self, request: FeedRequest) -> None:
        assert await self._handlers[request.KIND](self, request.to_json()) is None

    def send_event(self, kind: str, value: object) -> None:
        assert kind == FEED_EVENT
        self.waiting.append(json.dumps(value))

    def on_close(self, listener: Callable[[], None]) -> None:
        self.close = listener

    def listen(self) -> list[tuple[object, ...]]:
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.mirrors.apply("b", json.loads(message))
        return self.heard.taken()


async def test_a_follower_knows_what_a_controller_here_knows(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    peer, wire = node.peer(), Wire(node.scalable.feeds)
    await node.fill(0, 1)
    first = await peer.attach(0, "a", start=EARLIEST)
    wire.mirrors.follow(TOPIC)
    await wire.ask(FollowTopic(TOPIC))
    assert wire.listen() == [("attached", 0, "s", "a-seg-0"), ("changed", 0)]
    second = await peer.attach(0, "b", "other")
    first.close()
    assert wire.listen() == [
        ("attached", 0, "other", "b-seg-0"),
        ("detached", 0, "a-seg-0", True, True),
    ]
    await node.scalable.local_segments.seal(WHOLE)
    wire.listen()
    state = wire.mirrors.state(WHOLE)
    assert state is not None
    assert not state.drained("s")
    assert state.drained("other")
    await node.drain(0)
    assert wire.listen() == [("changed", 0)]
    assert state.drained("s")
    peer.close()
    assert second.closed
    assert wire.listen() == [("detached", 0, "b-seg-0", False, True)]
    await wire.ask(UnfollowTopic(TOPIC))
    await node.peer().attach(0, "c")
    assert not wire.waiting


async def test_a_follower_learns_that_a_segment_is_not_to_be_shared(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    wire = Wire(node.scalable.feeds)
    wire.mirrors.follow(TOPIC)
    await wire.ask(FollowTopic(TOPIC))
    await node.peer().attach(0, "a")
    wire.listen()
    state = wire.mirrors.state(WHOLE)
    assert state is not None
    assert state.shareable
    node.topics.loaded()[str(WHOLE)].note_unstamped_batch()
    assert wire.listen() == [("changed", 0)]
    state = wire.mirrors.state(WHOLE)
    assert state is not None
    assert not state.shareable


async def test_segment_loaded_later_is_reported_completely(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    wire = Wire(node.scalable.feeds)
    wire.mirrors.follow(TOPIC)
    await wire.ask(FollowTopic(TOPIC))
    assert wire.listen() == []
    await node.peer().attach(0, "a")
    assert wire.listen() == [("attached", 0, "s", "a-seg-0"), ("changed", 0)]
    await node.topics.unload(WHOLE.topic_name)
    assert wire.listen() == [("detached", 0, "a-seg-0", False, True), ("changed", 0)]
    assert wire.mirrors.state(WHOLE) is None
    await node.peer().attach(0, "a")
    told = wire.listen()
    assert told == [("attached", 0, "s", "a-seg-0"), ("changed", 0)]


async def test_follower_that_is_gone_gets_nothing_more(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    wire, other = Wire(node.scalable.feeds), Wire(node.scalable.feeds)
    for each in (wire, other):
        await each.ask(FollowTopic(TOPIC))
        each.listen()
    wire.close()
    await node.peer().attach(0, "a")
    assert not wire.waiting
    assert other.waiting
    other.close()
    assert not node.scalable.feeds._topics


async def test_request_of_a_connection_that_is_gone_follows_nothing(node: Node) -> None:
    wire = Wire(node.scalable.feeds)
    follower = node.scalable.feeds.follower_of(wire)
    wire.close()
    await FollowTopic(TOPIC).run(follower)
    await UnfollowTopic(TOPIC).run(follower)
    assert not node.scalable.feeds._topics
    assert not wire.waiting


@pytest.mark.parametrize("fields", [None, {}, {"topic": "nonsense://"}, {"topic": 1}])
async def test_malformed_feed_request_is_refused(node: Node, fields: object) -> None:
    handlers = node.scalable.feeds.request_handlers()
    assert handlers.keys() == FEED_REQUESTS.keys()
    for handler in handlers.values():
        with pytest.raises(MalformedRequest):
            await handler(Wire(node.scalable.feeds), fields)


# Defects here


class Fails(Heard):
    """A listener with a defect, which shows once."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def _said(self, what: str) -> None:
        if what == self._at:
            self._at = ""
            raise KeyError("a defect")

    def remote_attached(
        self, topic: TopicName, segment_id: int, subscription: str, consumer: RemoteConsumer
    ) -> None:
        self._said("attached")
        super().remote_attached(topic, segment_id, subscription, consumer)

    def remote_detached(
        self, topic: TopicName, consumer: RemoteConsumer, *, by_command: bool, seen: bool
    ) -> None:
        self._said("detached")
        super().remote_detached(topic, consumer, by_command=by_command, seen=seen)

    def remote_changed(self, topic: TopicName, segment_id: int) -> None:
        self._said("changed")
        super().remote_changed(topic, segment_id)


@pytest.mark.parametrize("at", ["attached", "changed"])
@pytest.mark.parametrize(
    "message", [snapshot(everything("a", "b")), said("segment", **everything("a", "b"))]
)
def test_a_failing_listener_hides_no_report_of_the_owner(
    at: str, message: dict[str, object]
) -> None:
    heard = Fails(at)
    mirrors = Mirrors(heard)
    mirrors.follow(TOPIC)
    mirrors._followed[TOPIC]["b"] = {}
    with pytest.raises(KeyError, match="a defect"):
        mirrors.apply("b", message)
    heard.taken()
    mirrors.apply("b", snapshot(everything("a", "b")))
    assert heard.taken() == [
        ("attached", 0, "s", "a"),
        ("attached", 0, "s", "b"),
        ("changed", 0),
    ], "told again, as nobody knows what was heard"
    mirrors.apply("b", snapshot(everything("a", "b")))
    assert heard.taken() == [("changed", 0)]


@pytest.mark.parametrize(
    "message",
    [
        snapshot(everything("b")),
        snapshot(),
        said("segment", **everything("b")),
        said("detached", id="a", byCommand=False),
    ],
)
def test_consumer_that_left_during_a_failure_is_detached_by_the_next_snapshot(
    message: dict[str, object],
) -> None:
    heard = Fails("detached")
    mirrors = Mirrors(heard)
    mirrors.follow(TOPIC)
    mirrors.apply("b", snapshot(everything("a")))
    with pytest.raises(KeyError, match="a defect"):
        mirrors.apply("b", message)
    heard.taken()
    mirrors.apply("b", snapshot(everything("b")))
    told = heard.taken()
    assert ("detached", 0, "a", False, False) in told
    assert ("attached", 0, "s", "b") in told
    mirrors.apply("b", snapshot(everything("b")))
    assert heard.taken() == [("changed", 0)]


def test_a_failing_listener_does_not_hide_other_lost_consumers() -> None:
    other = parse_topic_name("topic://public/default/other")
    heard = Fails("detached")
    mirrors = Mirrors(heard)
    mirrors.follow(TOPIC)
    mirrors.follow(other)
    mirrors.apply("b", snapshot(everything("a", "b")))
    mirrors.apply("b", snapshot(everything("c")) | {"topic": str(other)})
    heard.taken()
    with capture_logs() as logs:
        mirrors.owner_gone("b")
    assert heard.taken() == [
        ("detached", 0, "b", False, False),
        ("changed", 0),
        ("detached", 0, "c", False, False),
        ("changed", 0),
    ]
    assert not mirrors.has_heard("b", other)
    assert [(one["event"], one["consumer"]) for one in logs] == [("segment_listener_failed", "a")]
