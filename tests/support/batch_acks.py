"""Batches at a consumer: its messages one by one, and acknowledgements of some of them."""

from collections.abc import Sequence

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ack_set import from_words, is_pending, pending_all, to_words
from magnetar.protocol.message import iter_batch
from tests.support.raw_handles import Delivery


def messages_in(
    payload: bytes, metadata: pb.MessageMetadata, ack_set: Sequence[int]
) -> list[tuple[bytes, tuple[int, ...]]]:
    """Messages of an entry, with their places if it is a batch; acknowledged ones left out."""
    if not metadata.HasField("num_messages_in_batch"):
        return [(payload, ())]
    count = metadata.num_messages_in_batch
    pending = from_words(ack_set, count) if ack_set else pending_all(count)
    return [
        (bytes(body), (index,))
        for index, (_, body) in enumerate(iter_batch(payload, count))
        if is_pending(pending, index)
    ]


def permits_of(delivery: Delivery) -> int:
    """The permits that a delivery took: one for each message of a batch, acknowledged or not."""
    return max(1, delivery.metadata.num_messages_in_batch)


def partial_id(
    delivery: Delivery, indexes: Sequence[int], *, cumulative: bool = False
) -> pb.MessageIdData:
    """The id of those messages of a batch, or all up to the last of them; none: the whole entry."""
    found = pb.MessageIdData()
    found.CopyFrom(delivery.message_id)
    count = delivery.metadata.num_messages_in_batch
    left = pending_all(count) if indexes else 0
    for index in range(indexes[-1] + 1) if cumulative and indexes else indexes:
        left &= ~(1 << index)
    if left:
        found.ack_set.extend(to_words(left))
        found.batch_size = count
    return found
