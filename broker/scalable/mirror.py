"""What a topic's leader knows of segments: those that run here, and those that others tell of.
Pure.

Rules:

- `Mirrors` is pure: messages of owners in, calls out.  The calls are those that running segments
  make here, so a controller cannot tell where its segments are.
- A snapshot replaces what was known.  Who is missing in it was lost from sight: nobody saw him
  close anything.  Who is new is told before who is gone, so a consumer that came back by another
  connection never seems to be away.
- While a segment moves, two owners may tell of it; all of their consumers count, and it is drained
  when all of them say so.  A former owner says when it is gone there, or is gone itself: who else
  tells of it was not believed until then, so it is looked at again.
- What is told of a broker that is gone is lost from sight.  It tells no more, so a listener that
  fails then is told in the log, and everybody else who is gone is told all the same.
- A message is understood before anything is done about it: what goes wrong after that is a defect
  here.  Then nobody knows what was heard, so the next snapshot tells again who is there and who has
  gone; listeners ignore what they know.
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
    """What an owner says."""

    SNAPSHOT = "snapshot"
    """Everything of a topic that is loaded there."""
    SEGMENT = "segment"
    """Everything of one segment: it was loaded or sealed."""
    ATTACHED = "attached"
    DETACHED = "detached"
    AT_END = "atEnd"
    """Whether a subscription of a sealed segment has nothing more to get."""
    GONE = "gone"
    """One segment is not loaded there any more."""


class MalformedFeed(ValueError):
    """An owner said something that means nothing."""


class SegmentConsumer(Protocol):
    """A consumer at a segment.  `connection` is None if it is another broker's."""

    @property
    def name(self) -> str:
        """As it gave it in SUBSCRIBE."""
        ...

    @property
    def connection(self) -> ClientConnection | None:
        """Its connection to this broker."""
        ...


class SegmentState(Protocol):
    """A loaded segment, as far as a controller looks at it."""

    def drained(self, subscription: str) -> bool:
        """Whether a subscription has nothing more to get, now and for ever."""
        ...

    def consumers(self) -> Sequence[tuple[str, SegmentConsumer]]:
        """Everybody who is attached, with the name of the subscription."""
        ...


class LocalState:
    """A segment that runs here."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

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
    """What one owner told of one segment.  `at_end` has every subscription."""

    sealed: bool = False
    empty: bool = False
    at_end: dict[str, bool] = field(default_factory=dict)
    attached: dict[str, RemoteConsumer] = field(default_factory=dict)

    def take_over(self, former: "MirroredSegment | None") -> None:
        """Who was known before, by the id that its owner gave it, is the same consumer."""
        if former is not None:
            for consumer_id in self.attached.keys() & former.attached.keys():
                self.attached[consumer_id] = former.attached[consumer_id]

    def keep(self, former: "MirroredSegment | None") -> None:
        """Those who may not have been told as gone count as attached."""
        if former is not None:
            self.attached = former.attached | self.attached

    def drained(self, subscription: str) -> bool:
        """See `SegmentState`."""
        return is_drained(
            sealed=self.sealed, empty=self.empty, at_end=self.at_end.get(subscription)
        )


class _Told:
    """What all owners told of one segment."""

    def __init__(self, told: Sequence[MirroredSegment]) -> None:
        self._told = told

    def drained(self, subscription: str) -> bool:
        return all(each.drained(subscription) for each in self._told)

    def consumers(self) -> Sequence[tuple[str, SegmentConsumer]]:
        return [(c.subscription, c) for each in self._told for c in each.attached.values()]


class FeedListener(Protocol):
    """Who hears of what happens at segments of other brokers; as `TopicEvents` of those here."""

    def remote_attached(
        self, topic: TopicName, segment_id: int, subscription: str, consumer: RemoteConsumer
    ) -> None:
        """A consumer is there; may be told again."""
        ...

    def remote_detached(
        self, topic: TopicName, consumer: RemoteConsumer, *, by_command: bool, seen: bool
    ) -> None:
        """It is gone.  Unless `seen` nobody knows how."""
        ...

    def remote_changed(self, topic: TopicName, segment_id: int) -> None:
        """Look again at which subscriptions have drained the segment."""
        ...


Known = dict[int, MirroredSegment]


class Mirrors:
    """What is known of the segments of followed topics at all brokers: consumers, ends, seals.

    Owners are named by broker id.
    """

    def __init__(self, listener: FeedListener) -> None:
        self._listener = listener
        self._followed: dict[TopicName, dict[str, Known]] = {}
        self._half_told: set[tuple[TopicName, str]] = set()

    @property
    def followed(self) -> list[TopicName]:
        """The topics of which owners are to tell."""
        return list(self._followed)

    def follow(self, topic: TopicName) -> None:
        """Take in what is told of a topic."""
        self._followed.setdefault(topic, {})

    def unfollow(self, topic: TopicName) -> None:
        """Forget it, without telling anybody."""
        self._followed.pop(topic, None)
        self._half_told = {(name, owner) for name, owner in self._half_told if name != topic}

    def has_heard(self, owner: str, topic: TopicName) -> bool:
        """Whether an owner has told what it has of a topic (or nobody asked it to)."""
        return owner in self._followed.get(topic, (owner,))

    def state(self, segment: SegmentName) -> SegmentState | None:
        """What is told of a segment; None if nobody has it loaded."""
        known = self._followed.get(segment.parent, {})
        told = [each[segment.segment_id] for each in known.values() if segment.segment_id in each]
        return _Told(told) if told else None

    def owner_gone(self, owner: str) -> None:
        """A broker is no more."""
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
        """One message of an owner.  Raises `MalformedFeed`; anything else is a defect here."""
        if not isinstance(message, dict):
            raise MalformedFeed(f"{message!r} is no object")
        try:
            topic = parse_topic_name(str(message["topic"]))
            by_owner = self._followed.get(topic)
            if by_owner is None:
                return
            change = self._understood(owner, topic, by_owner, message)
        except (KeyError, ValueError, TypeError, AttributeError, MagnetarError) as error:
            raise MalformedFeed(f"{message!r} means nothing: {error!r}") from error
        try:
            change()
        except Exception:
            self._half_told.add((topic, owner))
            raise

    def _understood(
        self, owner: str, topic: TopicName, by_owner: dict[str, Known], message: Members
    ) -> Callable[[], None]:
        """What is to be done about a message; nothing is changed yet."""
        kind = FeedMessage(message["kind"])
        if kind is FeedMessage.SNAPSHOT:
            whole = {_number(each["segment"]): each for each in _objects(message["segments"])}
            told = {segment_id: _segment(segment_id, each) for segment_id, each in whole.items()}
            return partial(self._replace, topic, by_owner, owner, told)
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
            change = partial(self._let_go, topic, segment_id)
        else:
            subscription, is_so = str(message["subscription"]), message["is"] is True
            change = partial(self._note_end, topic, segment_id, subscription, is_so)
        # What comes before the snapshot is in it.
        return _nothing if known is None else partial(change, known)

    def _replace(
        self, topic: TopicName, by_owner: dict[str, Known], owner: str, told: Known
    ) -> None:
        before = by_owner.get(owner, {})
        by_owner[owner] = told
        again = (topic, owner) in self._half_told
        for segment_id, segment in told.items():
            segment.take_over(before.get(segment_id))
        try:
            for segment_id, segment in told.items():
                former = before.get(segment_id)
                self._tell_difference(topic, segment_id, former, segment, again=again)
            for segment_id, segment in before.items():
                if segment_id not in told:
                    self._lose(topic, segment_id, segment)
        except Exception:
            for segment_id, segment in before.items():
                told.setdefault(segment_id, segment).keep(segment)
            raise
        self._half_told.discard((topic, owner))

    def _replace_segment(
        self, topic: TopicName, segment_id: int, told: MirroredSegment, known: Known
    ) -> None:
        former = known.get(segment_id)
        known[segment_id] = told
        told.take_over(former)
        try:
            self._tell_difference(topic, segment_id, former, told, again=False)
        except Exception:
            told.keep(former)
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

    def _note_end(
        self, topic: TopicName, segment_id: int, subscription: str, is_so: bool, known: Known
    ) -> None:
        known.setdefault(segment_id, MirroredSegment()).at_end[subscription] = is_so
        self._listener.remote_changed(topic, segment_id)

    def _let_go(self, topic: TopicName, segment_id: int, known: Known) -> None:
        gone = known.pop(segment_id, None)
        if gone is None:
            return
        try:
            self._lose(topic, segment_id, gone)
        except Exception:
            known[segment_id] = gone
            raise

    def _tell_difference(
        self,
        topic: TopicName,
        segment_id: int,
        before: MirroredSegment | None,
        now: MirroredSegment,
        *,
        again: bool,
    ) -> None:
        """Who came and who went; `again`: also who seems to be known."""
        known = {} if before is None else before.attached
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
        self._listener.remote_changed(topic, segment_id)


@contextmanager
def _failures_logged(topic: TopicName, **about: object) -> Iterator[None]:
    """For what will not be told again: a listener that fails is a line in the log."""
    try:
        yield
    except Exception:
        log.exception("segment_listener_failed", topic=str(topic), **about)


def _nothing() -> None:
    """What is done about a message of something that was not told before."""


def segment_message(segment_id: int, topic: Topic, name: Callable[[object], str]) -> Members:
    """Everything of a running segment; `name` gives a consumer its id."""
    return {
        "segment": segment_id,
        "sealed": topic.sealed,
        "empty": topic.ledger.entry_count == 0,
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
