"""Start positions of new subscriptions, and target positions of seeks.

A start is the position *after which* delivery begins.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

from broker.topics.dispatch.entry_facts import publish_time_ms
from broker.topics.dispatch.source import ReadableTopic
from magnetar.protocol.ids import EARLIEST, LATEST, LONG_MAX, Position, from_wire
from magnetar.protocol.names import SegmentName, TopicDomain, segment_name
from magnetar.protocol.pulsar_pb2 import CommandSubscribe, MessageIdData
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry

Inherits = Callable[[SegmentName, str], Awaitable[bool]]
"""Whether a parent of a segment has a subscription of that name, or may still get it."""


class StartedTopic(ReadableTopic, Protocol):
    """A topic and its subscriptions."""

    @property
    def subscriptions(self) -> Mapping[str, object]:
        """Subscriptions by name."""
        ...


def position_of(message_id: MessageIdData) -> Position:
    """The entry that a message id of the wire names; -1 and Long.MAX become the constants."""
    ledger_id = from_wire(message_id.ledger_id)
    entry_id = from_wire(message_id.entry_id)
    if ledger_id < 0:
        return EARLIEST
    if ledger_id == LONG_MAX:
        return LATEST
    return Position(ledger_id, entry_id)


async def start_position(
    topic: StartedTopic, subscribe: CommandSubscribe, inherits: Inherits
) -> Position:
    """The start of the subscription, if this SUBSCRIBE creates it.

    A rollback duration starts before the first entry published within it, by producers' clocks.
    """
    if subscribe.subscription in topic.subscriptions:
        return LATEST  # not used: an existing subscription keeps its position
    rollback_s = from_wire(subscribe.start_message_rollback_duration_sec)
    if rollback_s > 0:
        since_ms = topic.context.clock.now_ms() - rollback_s * 1000
        compacted = subscribe.read_compacted
        return before(await first_published_since(topic.ledger, since_ms, compacted=compacted))
    if not subscribe.durable and subscribe.HasField("start_message_id"):
        # The entry of the id is delivered.  The client drops messages that it does not want: the id
        # itself, or earlier ones of its batch.
        return before(position_of(subscribe.start_message_id))
    if subscribe.durable and topic.name.domain is TopicDomain.SEGMENT:
        segment = segment_name(topic.name)
        # Messages that came here before the subscription was created here belong to it too.
        if await inherits(segment, subscribe.subscription):
            return EARLIEST
    earliest = subscribe.initial_position == CommandSubscribe.Earliest
    return EARLIEST if earliest else LATEST


async def first_published_since(
    ledger: ManagedLedger, since_ms: int, *, compacted: bool = False
) -> Position:
    """The first entry published at or after a time; LATEST when all are older.

    With `compacted` it may be one that only the compacted ledger has.
    """
    predicate = partial(_published_since, since_ms)
    found = await ledger.compaction.find_first(predicate) if compacted else None
    if found is None:
        found = await ledger.find_first(predicate)
    return LATEST if found is None else found


def _published_since(since_ms: int, entry: Entry) -> bool:
    return publish_time_ms(entry.data) >= since_ms


def before(position: Position) -> Position:
    """The start that makes `position` the first to be delivered."""
    if position in (EARLIEST, LATEST) or position.entry_id < 0:
        return position
    return Position(position.ledger_id, position.entry_id - 1)
