"""The commands of a segment consumer, in sizes that brokers accept.  Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeVar

from magnetar.bounds import MAX_ACK_GROUP, MAX_REDELIVERY_GROUP
from magnetar.consume.ack_tracker import Acknowledgement
from magnetar.consume.message import EntryKey
from magnetar.consume.settings import SubscribeSettings
from magnetar.message_id import EARLIEST_ENTRY, EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ack_set import to_words
from magnetar.protocol.ids import to_wire
from magnetar.protocol.incarnation import INCARNATION
from magnetar.protocol.managed_clients import MANAGED_PROPERTY

__all__ = [
    "acks_of",
    "acks_up_to_of",
    "close_of",
    "cumulative_ack_of",
    "damage_of",
    "flow_of",
    "redeliver_all_of",
    "redelivers_of",
    "subscribe_of",
    "unsubscribe_of",
]


T = TypeVar("T")
_Kind: Final = pb.BaseCommand
SEGMENT_DOMAIN: Final = "segment://"


def subscribe_of(
    topic: str, consumer_id: int, epoch: int, how: SubscribeSettings, after: EntryId | None
) -> pb.BaseCommand:
    """The command SUBSCRIBE; without a durable cursor reading begins after `after`."""
    command = pb.CommandSubscribe(
        topic=topic,
        subscription=how.subscription,
        sub_type=how.kind.value,
        consumer_id=consumer_id,
        request_id=0,
        durable=how.durable,
        initial_position=how.initial_position.value,
        consumer_epoch=epoch,
        priority_level=how.priority_level,
    )
    if how.replicate_subscription_state:
        command.replicate_subscription_state = True
    if how.consumer_name:
        command.consumer_name = how.consumer_name
    if how.schema is not None:
        command.schema.CopyFrom(how.schema)
    if how.key_shared is not None:
        command.key_shared_meta.CopyFrom(how.key_shared)
    for name, value in how.subscription_properties.items():
        command.subscription_properties.add(key=name, value=value)
    for name, value in how.consumer_properties.items():
        command.metadata.add(key=name, value=value)
    if how.incarnation:
        command.metadata.add(key=INCARNATION, value=how.incarnation)
    if not topic.startswith(SEGMENT_DOMAIN):
        command.metadata.add(key=MANAGED_PROPERTY, value="true")
    if not how.durable:
        start = EARLIEST_ENTRY if after is None else after
        command.start_message_id.ledger_id = to_wire(start.ledger_id)
        command.start_message_id.entry_id = to_wire(start.entry_id)
        if start.batch_index >= 0:
            command.start_message_id.batch_index = start.batch_index
    return pb.BaseCommand(type=_Kind.SUBSCRIBE, subscribe=command)


def flow_of(consumer_id: int, permits: int) -> pb.BaseCommand:
    """The command FLOW for so many more messages."""
    flow = pb.CommandFlow(consumer_id=consumer_id, message_permits=permits)
    return pb.BaseCommand(type=_Kind.FLOW, flow=flow)


def acks_of(
    consumer_id: int,
    acknowledgements: Sequence[Acknowledgement],
    transaction: tuple[int, int] | None = None,
) -> Iterator[pb.BaseCommand]:
    """Individual ACKs; in the transaction with these most and least bits."""
    for group in _parts_of(acknowledgements, MAX_ACK_GROUP):
        yield _ack_of(consumer_id, pb.CommandAck.Individual, group, transaction)


def cumulative_ack_of(
    consumer_id: int, up_to: Acknowledgement, transaction: tuple[int, int] | None = None
) -> pb.BaseCommand:
    """A cumulative ACK."""
    return _ack_of(consumer_id, pb.CommandAck.Cumulative, (up_to,), transaction)


def acks_up_to_of(
    consumer_id: int,
    up_to: Acknowledgement | None,
    single: Sequence[Acknowledgement],
    transaction: tuple[int, int],
) -> Iterator[pb.BaseCommand]:
    """The ACKs in a transaction: a cumulative one, if any, and individual ones after it."""
    if up_to is not None:
        yield cumulative_ack_of(consumer_id, up_to, transaction)
    yield from acks_of(consumer_id, single, transaction)


def damage_of(
    consumer_id: int, key: EntryKey, damage: "pb.CommandAck.ValidationError"
) -> pb.BaseCommand:
    """The ACK that reports an entry that cannot be unpacked, with the reason."""
    command = _ack_of(consumer_id, pb.CommandAck.Individual, (Acknowledgement(key),), None)
    command.ack.validation_error = damage
    return command


def _ack_of(
    consumer_id: int,
    kind: "pb.CommandAck.AckType",
    acknowledgements: Sequence[Acknowledgement],
    transaction: tuple[int, int] | None,
) -> pb.BaseCommand:
    command = pb.BaseCommand(type=_Kind.ACK)
    ack = command.ack
    ack.consumer_id = consumer_id
    ack.ack_type = kind
    for (ledger_id, entry_id), ack_set, batch_size in acknowledgements:
        data = ack.message_id.add(ledger_id=to_wire(ledger_id), entry_id=to_wire(entry_id))
        if ack_set:
            data.ack_set.extend(ack_set)
            data.batch_size = batch_size
    if transaction is not None:
        ack.txnid_most_bits, ack.txnid_least_bits = transaction
    return command


def redelivers_of(consumer_id: int, messages: Mapping[EntryKey, int]) -> Iterator[pb.BaseCommand]:
    """REDELIVER_UNACKNOWLEDGED_MESSAGES of these entries, or of some messages of a batch.

    Brokers that redeliver whole entries ignore the ack set.
    """
    for group in _parts_of(list(messages.items()), MAX_REDELIVERY_GROUP):
        again = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id)
        for (ledger_id, entry_id), bits in group:
            each = again.message_ids.add(ledger_id=to_wire(ledger_id), entry_id=to_wire(entry_id))
            if bits > 0:
                each.ack_set.extend(to_words(bits))
        yield pb.BaseCommand(
            type=_Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES, redeliver_unacknowledged_messages=again
        )


def redeliver_all_of(consumer_id: int, epoch: int) -> pb.BaseCommand:
    """REDELIVER_UNACKNOWLEDGED_MESSAGES of everything; later messages carry `epoch`."""
    again = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=consumer_id, consumer_epoch=epoch)
    return pb.BaseCommand(
        type=_Kind.REDELIVER_UNACKNOWLEDGED_MESSAGES, redeliver_unacknowledged_messages=again
    )


def close_of(consumer_id: int) -> pb.BaseCommand:
    """The command CLOSE_CONSUMER."""
    close = pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=0)
    return pb.BaseCommand(type=_Kind.CLOSE_CONSUMER, close_consumer=close)


def unsubscribe_of(consumer_id: int, *, force: bool) -> pb.BaseCommand:
    """The command UNSUBSCRIBE."""
    command = pb.CommandUnsubscribe(consumer_id=consumer_id, request_id=0, force=force)
    return pb.BaseCommand(type=_Kind.UNSUBSCRIBE, unsubscribe=command)


def _parts_of(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
