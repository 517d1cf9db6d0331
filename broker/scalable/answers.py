"""Functions that build the commands of scalable topics.

An error is sent in the answer of its own command, with its code and message.
"""

from collections.abc import Iterable
from typing import cast

from broker.scalable.layout import Segment
from broker.scalable.records import segment_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError


def dag_update(session_id: int, dag: pb.ScalableTopicDAG, resolved: TopicName) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_UPDATE with a layout."""
    return _dag_update(session_id=session_id, dag=dag, resolved_topic_name=str(resolved))


def dag_error(session_id: int, error: MagnetarError) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_UPDATE with an error, in place of the first layout."""
    return _dag_update(session_id=session_id, error=_code(error), message=str(error))


def assignment_of(
    name: TopicName, epoch: int, segments: Iterable[Segment]
) -> pb.ScalableConsumerAssignment:
    """A consumer's complete set of segments, in order of range."""
    assignment = pb.ScalableConsumerAssignment(layout_epoch=epoch)
    for segment in sorted(segments, key=lambda segment: segment.range_key):
        assignment.segments.add(
            segment_id=segment.segment_id,
            hash_start=segment.hash_start,
            hash_end=segment.hash_end,
            segment_topic=str(segment_of(name, segment)),
        )
    return assignment


def assignment_update(
    consumer_id: int, assignment: pb.ScalableConsumerAssignment
) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_ASSIGNMENT_UPDATE."""
    return pb.BaseCommand(
        type=pb.BaseCommand.SCALABLE_TOPIC_ASSIGNMENT_UPDATE,
        scalable_topic_assignment_update=pb.CommandScalableTopicAssignmentUpdate(
            consumer_id=consumer_id, assignment=assignment
        ),
    )


def subscribed(request_id: int, assignment: pb.ScalableConsumerAssignment) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_SUBSCRIBE_RESPONSE with the first assignment."""
    return _subscribe_response(request_id=request_id, assignment=assignment)


def subscribe_error(request_id: int, error: MagnetarError) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_SUBSCRIBE_RESPONSE with an error."""
    return _subscribe_response(request_id=request_id, error=_code(error), message=str(error))


def success(request_id: int) -> pb.BaseCommand:
    """Build a SUCCESS."""
    return pb.BaseCommand(
        type=pb.BaseCommand.SUCCESS, success=pb.CommandSuccess(request_id=request_id)
    )


def topics_snapshot(watch_id: int, topics: Iterable[str]) -> pb.BaseCommand:
    """Build a WATCH_SCALABLE_TOPICS_UPDATE with all names."""
    snapshot = pb.ScalableTopicsSnapshot(topics=sorted(topics))
    return _topics_update(watch_id=watch_id, snapshot=snapshot)


def topics_diff(watch_id: int, added: Iterable[str], removed: Iterable[str]) -> pb.BaseCommand:
    """Build a WATCH_SCALABLE_TOPICS_UPDATE with the names added and removed."""
    diff = pb.ScalableTopicsDiff(added=sorted(added), removed=sorted(removed))
    return _topics_update(watch_id=watch_id, diff=diff)


def topics_error(watch_id: int, error: MagnetarError) -> pb.BaseCommand:
    """Build a WATCH_SCALABLE_TOPICS_UPDATE with an error, in place of the first snapshot."""
    return _topics_update(watch_id=watch_id, error=_code(error), message=str(error))


def _code(error: MagnetarError) -> pb.ServerError:
    return cast("pb.ServerError", int(error.code))


def _dag_update(**members: object) -> pb.BaseCommand:
    update = pb.CommandScalableTopicUpdate(**members)  # type: ignore[arg-type]
    return pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_UPDATE, scalable_topic_update=update)


def _subscribe_response(**members: object) -> pb.BaseCommand:
    response = pb.CommandScalableTopicSubscribeResponse(**members)  # type: ignore[arg-type]
    return pb.BaseCommand(
        type=pb.BaseCommand.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
        scalable_topic_subscribe_response=response,
    )


def _topics_update(**members: object) -> pb.BaseCommand:
    update = pb.CommandWatchScalableTopicsUpdate(**members)  # type: ignore[arg-type]
    return pb.BaseCommand(
        type=pb.BaseCommand.WATCH_SCALABLE_TOPICS_UPDATE, watch_scalable_topics_update=update
    )
