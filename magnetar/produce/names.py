"""Names of producers on segments, and the last sequence id of a name on a sealed segment."""

from magnetar.context import ClientContext
from magnetar.errors import TopicNotFound, TopicTerminated
from magnetar.layout import Segment
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import segment_suffix

__all__ = ["last_stored_on_sealed", "name_on"]


def name_on(segment: Segment, name: str) -> str:
    """The name of a producer on this segment."""
    # Each segment counts the sequence ids of a producer separately.
    return name + segment_suffix(segment.segment_id)


async def last_stored_on_sealed(context: ClientContext, segment: Segment, name: str) -> int:
    """The highest sequence id that a producer of that name has stored on a sealed segment.

    -1 if there is none or it is not known: the segment has been pruned, or its broker is Apache
    Pulsar, which attaches no producer to a sealed segment.
    """
    connection = await context.pool.of_topic(segment.topic)
    if not connection.knows_resends:
        return -1
    producer_id = context.ids.producer_id()
    # Epoch 1: a sealed segment attaches only producers that come back.
    command = pb.CommandProducer(
        topic=segment.topic,
        producer_id=producer_id,
        producer_name=name_on(segment, name),
        user_provided_producer_name=True,
        epoch=1,
    )
    try:
        answer = await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.PRODUCER, producer=command)
        )
    except (TopicTerminated, TopicNotFound):
        return -1
    close = pb.CommandCloseProducer(producer_id=producer_id)
    await connection.request(
        pb.BaseCommand(type=pb.BaseCommand.CLOSE_PRODUCER, close_producer=close)
    )
    return answer.producer_success.last_sequence_id
