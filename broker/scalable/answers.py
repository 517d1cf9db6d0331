"""Functions that build the commands of scalable topics.

An error is sent in the answer of its own command, with its code and message.
"""

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Final, cast

from broker.scalable.layout import Segment
from broker.scalable.records import segment_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import frame_of
from magnetar.protocol.hot_frames import varint
from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError

_UPDATE_TYPE: Final = pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_UPDATE).SerializeToString()
_UPDATE_TAG: Final = varint(pb.BaseCommand.SCALABLE_TOPIC_UPDATE_FIELD_NUMBER << 3 | 2)


class LayoutUpdate:
    """SCALABLE_TOPIC_UPDATEs with one layout, for any number of sessions.

    The layout is encoded once.  A frame is the id of its session, followed by the layout.
    """

    def __init__(self, dag: pb.ScalableTopicDAG, resolved: TopicName) -> None:
        self.dag = dag
        self._resolved = resolved

    def frame(self, session_id: int) -> bytes:
        """The frame for a session."""
        head = pb.CommandScalableTopicUpdate(session_id=session_id).SerializeToString()
        tail = self._encoded
        size = varint(len(head) + len(tail))
        return frame_of(b"".join((_UPDATE_TYPE, _UPDATE_TAG, size, head, tail)))

    @cached_property
    def _encoded(self) -> bytes:
        return encode_layout(self.dag, self._resolved)


def encode_layout(dag: pb.ScalableTopicDAG, resolved: TopicName) -> bytes:
    """Encode a CommandScalableTopicUpdate without its session id.

    The session id may be put before it, as fields may come in any order.
    """
    update = pb.CommandScalableTopicUpdate(dag=dag, resolved_topic_name=str(resolved))
    return update.SerializePartialToString()


def dag_error(session_id: int, error: MagnetarError) -> pb.BaseCommand:
    """Build a SCALABLE_TOPIC_UPDATE with an error, in place of the first layout."""
    return _dag_update(session_id=session_id, error=_code(error), message=str(error))


def assignment_of(
    name: TopicName, epoch: int, segments: Iterable[Segment], *, shared: Collection[int] = ()
) -> pb.ScalableConsumerAssignment:
    """A consumer's complete set of segments, in order of range.

    Those in `shared` have the ranges of all their entry buckets: that is how its client knows that
    it shares them (PIP-486).  Every consumer of a segment gets the same ranges.
    """
    assignment = pb.ScalableConsumerAssignment(layout_epoch=epoch)
    for segment in sorted(segments, key=lambda segment: segment.range_key):
        ranges = _bucket_ranges(segment) if segment.segment_id in shared else []
        assignment.segments.add(
            segment_id=segment.segment_id,
            hash_start=segment.hash_start,
            hash_end=segment.hash_end,
            segment_topic=str(segment_of(name, segment)),
            bucket_ranges=ranges,
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


def _bucket_ranges(segment: Segment) -> list[pb.IntRange]:
    """The entry buckets of a segment as inclusive ranges of hashes, in order."""
    splits = segment.entry_bucket_splits
    starts, ends = (0, *splits), (*(split - 1 for split in splits), KEY_SPACE - 1)
    return [pb.IntRange(start=s, end=e) for s, e in zip(starts, ends, strict=True)]


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
