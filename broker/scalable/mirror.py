"""The state of segments that a topic's leader sees: local ones, and mirrors of remote ones.  Pure.

A mirror is kept up to date by the messages of the segment's owner (see `feed`).
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import structlog

from broker.scalable.local_segments import consumers_of, drained
from broker.scalable.segment_view import Members, is_drained
from broker.topics.client_connection import ClientConnection
from broker.topics.topic import Topic
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class FeedMessage(enum.Enum):
    """The kinds of messages from an owner of segments to a topic's leader."""

    SNAPSHOT = "snapshot"
    """All segments of a topic that are loaded there."""
    SEGMENT = "segment"
    """The whole state of one segment: it was loaded or sealed."""
    ATTACHED = "attached"
    DETACHED = "detached"
    AT_END = "atEnd"
    """Whether a subscription has nothing more to read in a sealed segment."""
    GONE = "gone"
    """One segment is not loaded there any more."""


class MalformedFeed(ValueError):
    """A message of an owner is malformed."""


class SegmentConsumer(Protocol):
    """A consumer of a segment.  `connection` is None if it is connected to another broker."""

    @property
    def name(self) -> str:
        """The consumer's name in SUBSCRIBE."""
        ...

    @property
    def connection(self) -> ClientConnection | None:
        """The connection of the consumer to this broker."""
        ...


class SegmentState(Protocol):
    """A loaded segment, as a controller uses it."""

    @property
    def shareable(self) -> bool:
        """Whether consumers may share it: no batch is known to lack its entry hashes."""
        ...

    def drained(self, subscription: str) -> bool:
        """Whether a subscription has nothing more to read, now and for ever."""
        ...

    def consumers(self) -> Sequence[tuple[str, SegmentConsumer]]:
        """All attached consumers, each after the name of its subscription."""
        ...


class LocalState:
    """A segment that runs here."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    @property
    def shareable(self) -> bool:
        """See `SegmentState`."""
        return self._topic.shareable

    def drained(self, subscription: str) -> bool:
        """See `SegmentState`."""
        return drained(self._topic, subscription)

    def consumers(self) -> Sequence[tuple[str, SegmentConsumer]]:
        """See `SegmentState`."""
        return consumers_of(self._topic)


@dataclass(eq=False, slots=True)
class RemoteConsumer:
    """A consumer attached at another broker."""

    segment_id: int
    subscription: str
    name: str
    connection: ClientConnection | None = None


@dataclass(eq=False, slots=True)
class MirroredSegment:
    """The state of one segment at one owner.

    `at_end` has all subscriptions, `attached` the consumers by the ids that the owner gave them.
    """

    sealed: bool = False
    empty: bool = False
    shareable: bool = False
    at_end: dict[str, bool] = field(default_factory=dict)
    attached: dict[str, RemoteConsumer] = field(default_factory=dict)

    def take_over(self, former: "MirroredSegment | None") -> None:
        """Keep the objects of consumers that were known before by the same id."""
        if former is not None:
            for consumer_id in self.attached.keys() & former.attached.keys():
                self.attached[consumer_id] = former.attached[consumer_id]

    def keep(self, former: "MirroredSegment | None") -> None:
        """Count former consumers as attached: listeners may not know that they are gone."""
        if former is not None:
            self.attached = former.attached | self.attached

    def drained(self, subscription: str) -> bool:
        """See `SegmentState`."""
        return is_drained(
            sealed=self.sealed, empty=self.empty, at_end=self.at_end.get(subscription)
        )


class _CombinedState:
    """The state of one segment at all brokers that report it.

    While a segment moves two owners may report it.  All of their consumers count, and it is drained
    only if all say so.
    """

    def __init__(self, states: Sequence[MirroredSegment]) -> None:
        self._states = states

    @property
    def shareable(self) -> bool:
        return all(each.shareable for each in self._states)

    def drained(self, subscription: str) -> bool:
        return all(each.drained(subscription) for each in self._states)

    def consumers(self) -> Sequence[tuple[str, SegmentConsumer]]:
        return [(c.subscription, c) for each in self._states for c in each.attached.values()]


class FeedListener(Protocol):
    """Gets the events of segments at other brokers, as `TopicEvents` gets those of local ones."""

    def remote_attached(
        self, topic: TopicName, segment_id: int, subscription: str, consumer: RemoteConsumer
    ) -> None:
        """A consumer is attached; may be called again for the same one."""
        ...

    def remote_detached(
        self, topic: TopicName, consumer: RemoteConsumer, *, by_command: bool, seen: bool
    ) -> None:
        """A consumer is detached.  `seen` is False if it is not known how."""
        ...

    def remote_changed(self, topic: TopicName, segment_id: int) -> None:
        """Subscriptions may have drained the segment, or have a backlog again."""
        ...


Known = dict[int, MirroredSegment]


class Mirrors:
    """The segments of followed topics at all brokers: messages of owners in, calls out.

    The calls are the same as for segments that run here, so a controller need not know where its
    segments are.  Owners are named by broker id.

    A snapshot replaces all that was known of its topic at that owner.  A consumer that is missing
    in it, or was attached at a broker that is gone, was lost: it did not close by command.
    """

    def __init__(self, listener: FeedListener) -> None:
        self._listener = listener
        self._followed: dict[TopicName, dict[str, Known]] = {}
        self._incomplete: set[tuple[TopicName, str]] = set()
        """Topics and owners of which a listener failed, so that it may not know all consumers."""

    @property
    def followed(self) -> list[TopicName]:
        """The topics that owners have to report."""
        return list(self._followed)

    def follow(self, topic: TopicName) -> None:
        """Take in messages about a topic from now on."""
        self._followed.setdefault(topic, {})

    def unfollow(self, topic: TopicName) -> None:
        """Forget a topic, without calls to the listener."""
        self._followed.pop(topic, None)
        self._incomplete = {(name, owner) for name, owner in self._incomplete if name != topic}

    def has_heard(self, owner: str, topic: TopicName) -> bool:
        """Whether an owner has sent its snapshot of a topic, or the topic is not followed."""
        return owner in self._followed.get(topic, (owner,))

    def state(self, segment: SegmentName) -> SegmentState | None:
        """The state of a segment; None if no other broker reports it as loaded."""
        known = self._followed.get(segment.parent, {})
        states = [each[segment.segment_id] for each in known.values() if segment.segment_id in each]
        return _CombinedState(states) if states else None

    def owner_gone(self, owner: str) -> None:
        """Drop all segments of a broker that is gone; its consumers are lost."""
        # No later message repeats these calls, so an error of the listener must not prevent others.
        for topic, by_owner in self._followed.items():
            for segment_id, segment in by_owner.pop(owner, {}).items():
                for consumer in segment.attached.values():
                    with _failures_logged(topic, consumer=consumer.name):
                        self._listener.remote_detached(
                            topic, consumer, by_command=False, seen=False
                        )
                with _failures_logged(topic, segment=segment_id):
                    self._listener.remote_changed(topic, segment_id)

    def apply(self, owner: str, message: object) -> None:
        """Take in one message of an owner.

        Raises `MalformedFeed`, and then nothing was changed.  An error of the listener is raised
        too; the owner's next snapshot then repeats all calls.
        """
        if not isinstance(message, dict):
            raise MalformedFeed(f"{message!r} is no object")
        try:
            topic = parse_topic_name(str(message["topic"]))
            by_owner = self._followed.get(topic)
            if by_owner is None:
                return
            change = self._parse(owner, topic, by_owner, message)
        except (KeyError, ValueError, TypeError, AttributeError, MagnetarError) as error:
            raise MalformedFeed(f"{message!r} means nothing: {error!r}") from error
        try:
            change()
        except Exception:
            self._incomplete.add((topic, owner))
            raise

    def _parse(
        self, owner: str, topic: TopicName, by_owner: dict[str, Known], message: Members
    ) -> Callable[[], None]:
        """Return the function that applies a message; nothing is changed yet."""
        kind = FeedMessage(message["kind"])
        if kind is FeedMessage.SNAPSHOT:
            whole = {_number(each["segment"]): each for each in _objects(message["segments"])}
            now = {segment_id: _segment(segment_id, each) for segment_id, each in whole.items()}
            return partial(self._replace, topic, by_owner, owner, now)
        segment_id = _number(message["segment"])
        known = by_owner.get(owner)
        if kind is FeedMessage.SEGMENT:
            segment = _segment(segment_id, message)
            change = partial(self._replace_segment, topic, segment_id, segment)
        elif kind is FeedMessage.ATTACHED:
            consumer = _consumer(segment_id, message)
            change = partial(self._attach, topic, str(message["id"]), consumer)
        elif kind is FeedMessage.DETACHED:
            by_command = message["byCommand"] is True
            change = partial(self._detach, topic, segment_id, str(message["id"]), by_command)
        elif kind is FeedMessage.GONE:
            change = partial(self._drop_segment, topic, segment_id)
        else:
            subscription, at_end = str(message["subscription"]), message["is"] is True
            change = partial(self._set_at_end, topic, segment_id, subscription, at_end)
        # An event that comes before the snapshot is ignored: the snapshot has it.
        return _nothing if known is None else partial(change, known)

    def _replace(
        self, topic: TopicName, by_owner: dict[str, Known], owner: str, now: Known
    ) -> None:
        before = by_owner.get(owner, {})
        by_owner[owner] = now
        again = (topic, owner) in self._incomplete
        for segment_id, segment in now.items():
            segment.take_over(before.get(segment_id))
        try:
            for segment_id, segment in now.items():
                former = before.get(segment_id)
                self._report_difference(topic, segment_id, former, segment, again=again)
            for segment_id, segment in before.items():
                if segment_id not in now:
                    self._lose(topic, segment_id, segment)
        except Exception:
            for segment_id, segment in before.items():
                now.setdefault(segment_id, segment).keep(segment)
            raise
        self._incomplete.discard((topic, owner))

    def _replace_segment(
        self, topic: TopicName, segment_id: int, now: MirroredSegment, known: Known
    ) -> None:
        former = known.get(segment_id)
        known[segment_id] = now
        now.take_over(former)
        try:
            self._report_difference(topic, segment_id, former, now, again=False)
        except Exception:
            now.keep(former)
            raise

    def _attach(
        self, topic: TopicName, consumer_id: str, consumer: RemoteConsumer, known: Known
    ) -> None:
        segment_id = consumer.segment_id
        known.setdefault(segment_id, MirroredSegment()).attached[consumer_id] = consumer
        self._listener.remote_attached(topic, segment_id, consumer.subscription, consumer)

    def _detach(
        self, topic: TopicName, segment_id: int, consumer_id: str, by_command: bool, known: Known
    ) -> None:
        segment = known.get(segment_id)
        if segment is None or consumer_id not in segment.attached:
            return
        attached = segment.attached
        gone = attached.pop(consumer_id)
        try:
            self._listener.remote_detached(topic, gone, by_command=by_command, seen=True)
        except Exception:
            attached[consumer_id] = gone
            raise

    def _set_at_end(
        self, topic: TopicName, segment_id: int, subscription: str, at_end: bool, known: Known
    ) -> None:
        known.setdefault(segment_id, MirroredSegment()).at_end[subscription] = at_end
        self._listener.remote_changed(topic, segment_id)

    def _drop_segment(self, topic: TopicName, segment_id: int, known: Known) -> None:
        gone = known.pop(segment_id, None)
        if gone is None:
            return
        try:
            self._lose(topic, segment_id, gone)
        except Exception:
            known[segment_id] = gone
            raise

    def _report_difference(
        self,
        topic: TopicName,
        segment_id: int,
        before: MirroredSegment | None,
        now: MirroredSegment,
        *,
        again: bool,
    ) -> None:
        """Call the listener for consumers attached and detached; `again`: also for known ones."""
        known = {} if before is None else before.attached
        # Attached ones first: a consumer that came back by another connection is never missing.
        for consumer_id, consumer in list(now.attached.items()):
            if again or consumer_id not in known:
                self._listener.remote_attached(topic, segment_id, consumer.subscription, consumer)
        for consumer_id, consumer in known.items():
            if consumer_id not in now.attached:
                self._listener.remote_detached(topic, consumer, by_command=False, seen=False)
        self._listener.remote_changed(topic, segment_id)

    def _lose(self, topic: TopicName, segment_id: int, segment: MirroredSegment) -> None:
        for consumer in segment.attached.values():
            self._listener.remote_detached(topic, consumer, by_command=False, seen=False)
        # The segment is drained once all owners that are left say so.
        self._listener.remote_changed(topic, segment_id)


@contextmanager
def _failures_logged(topic: TopicName, **about: object) -> Iterator[None]:
    """Log an error of the listener instead of raising it."""
    try:
        yield
    except Exception:
        log.exception("segment_listener_failed", topic=str(topic), **about)


def _nothing() -> None:
    """Apply a message that changes nothing."""


def segment_message(segment_id: int, topic: Topic, name: Callable[[object], str]) -> Members:
    """The state of a running segment, as its owner sends it; `name` gives a consumer its id."""
    return {
        "segment": segment_id,
        "sealed": topic.sealed,
        "empty": topic.ledger.entry_count == 0,
        "shareable": topic.shareable,
        "atEnd": {each: s.at_end for each, s in topic.subscriptions.items()},
        "consumers": [
            {"id": name(consumer), "subscription": subscription, "name": consumer.name}
            for subscription, consumer in consumers_of(topic)
        ],
    }


def _segment(segment_id: int, message: Members) -> MirroredSegment:
    at_end = message["atEnd"]
    if not isinstance(at_end, dict):
        raise MalformedFeed(f"{at_end!r} is no object")
    return MirroredSegment(
        sealed=message["sealed"] is True,
        empty=message["empty"] is True,
        shareable=message.get("shareable") is True,
        at_end={str(name): value is True for name, value in at_end.items()},
        attached={
            str(each["id"]): _consumer(segment_id, each) for each in _objects(message["consumers"])
        },
    )


def _consumer(segment_id: int, message: Members) -> RemoteConsumer:
    return RemoteConsumer(segment_id, str(message["subscription"]), str(message["name"]))


def _objects(value: object) -> list[Members]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise MalformedFeed(f"{value!r} is no list of objects")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise MalformedFeed(f"{value!r} is no number")
    return value
