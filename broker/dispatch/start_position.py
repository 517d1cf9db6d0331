"""Where a subscription begins, and where a seek leads.

Rules (a start is the position *after which* delivery begins):

- What exists keeps its place; `start_message_id` and initial positions are for new subscriptions.
- A durable subscription on a segment whose parents have it begins at EARLIEST: what was routed
  here while nobody had made it on this segment belongs to it too.
- A start message id includes its entry: which messages of the entry are not wanted (the id itself,
  earlier ones of its batch) only the client knows, and it drops them.
- A rollback duration begins at the first entry published within it, by producers' clocks.
"""

from functools import partial
from typing import TYPE_CHECKING

from broker.dispatch.entry_facts import publish_time_ms
from protocol.ids import EARLIEST, LATEST, LONG_MAX, Position, from_wire
from protocol.names import TopicDomain, segment_name
from protocol.pulsar_pb2 import CommandSubscribe, MessageIdData

if TYPE_CHECKING:
    from broker.topic import Topic
    from storage.managed_ledger import ManagedLedger
    from storage.managed_ledger_types import Entry


def position_of(message_id: MessageIdData) -> Position:
    """The entry that a message id of the wire names; -1 and Long.MAX become the constants."""
    ledger_id = from_wire(message_id.ledger_id)
    entry_id = from_wire(message_id.entry_id)
    if ledger_id < 0:
        return EARLIEST
    if ledger_id == LONG_MAX:
        return LATEST
    return Position(ledger_id, entry_id)


async def start_position(topic: "Topic", subscribe: CommandSubscribe) -> Position:
    """Where the subscription begins if this SUBSCRIBE makes it."""
    if subscribe.subscription in topic.subscriptions:
        return LATEST
    rollback_s = from_wire(subscribe.start_message_rollback_duration_sec)
    if rollback_s > 0:
        since_ms = topic.broker.clock.now_ms() - rollback_s * 1000
        return before(await first_published_since(topic.ledger, since_ms))
    if not subscribe.durable and subscribe.HasField("start_message_id"):
        return before(position_of(subscribe.start_message_id))
    if subscribe.durable and topic.name.domain is TopicDomain.SEGMENT:
        segment = segment_name(topic.name)
        if await topic.broker.scalable.inherits_subscription(segment, subscribe.subscription):
            return EARLIEST
    earliest = subscribe.initial_position == CommandSubscribe.Earliest
    return EARLIEST if earliest else LATEST


async def first_published_since(ledger: "ManagedLedger", since_ms: int) -> Position:
    """The first entry published at or after a time; LATEST when all are older."""
    found = await ledger.find_first(partial(_published_since, since_ms))
    return LATEST if found is None else found


def _published_since(since_ms: int, entry: "Entry") -> bool:
    return publish_time_ms(entry.data) >= since_ms


def before(position: Position) -> Position:
    """The start that makes `position` the first to be delivered."""
    if position in (EARLIEST, LATEST) or position.entry_id < 0:
        return position
    return Position(position.ledger_id, position.entry_id - 1)
