"""`CheckpointConsumer[T]`, which reads a topic from positions that the application stores."""

import asyncio
from typing import Final, TypeVar

from magnetar.bounds import INBOX_SEGMENTS, MISSING_SEGMENT_TRIES
from magnetar.checkpoint import Checkpoint, CheckpointKind
from magnetar.consume.assignments import AssignedSegment, Assignment
from magnetar.consume.message import Message, RawMessage
from magnetar.consume.ordered_segments import ControllerSession, HeldSegments
from magnetar.consume.receiving import Inbox, InboxConsumer, random_name
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import CheckpointSettings
from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, ConnectionLost, MagnetarError, OperationTimedOut
from magnetar.layout import Layout
from magnetar.layout_watch import LayoutWatch
from magnetar.message_id import EARLIEST_ENTRY, LATEST_ENTRY, EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.schema import Schema
from magnetar.schema.schema_reader import SchemaReader

__all__ = ["CheckpointConsumer"]


T = TypeVar("T")


class CheckpointConsumer(InboxConsumer[T, SegmentConsumer]):
    """Reads a topic from positions that the application stores.

    Made by `Client.checkpoint_consumer`.

    Alone it reads every segment of the topic, also new ones.  In a group it reads the segments that
    the controller assigns to it.  Nothing is stored at brokers.

    It reads a segment from its position in `start` on, and all of a segment that has none there.
    With `Checkpoint.LATEST` it reads the messages sent after the opening, and all of segments that
    are created later.  A segment that no longer exists has expired and is skipped.

    Messages of a child segment may come before the last ones of its parents.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        schema: Schema[T],
        settings: CheckpointSettings,
        start: Checkpoint = Checkpoint.EARLIEST,
        group: str | None = None,
        create_if_missing: bool = True,
    ) -> None:
        """Raises `InvalidTopicName`, `InvalidArgument`."""
        limit = settings.receiver_queue_size * INBOX_SEGMENTS
        super().__init__(Inbox(limit, settings.receiver_queue_bytes))
        self.name: Final = settings.consumer_name or random_name(context, "checkpoint-")
        """The name of the consumer at the controller of a group."""
        self._context = context
        self._given_schema = schema
        self._schema = schema
        self._settings = settings
        self._start = start
        self._reader_name = f"reader-{context.rng.getrandbits(40):010x}"
        self._source: LayoutWatch | ControllerSession
        if group is None:
            watch = LayoutWatch(context, topic, create_if_missing)
            watch.on_change(self._layout_changed)
            watch.on_failure(self.failed)
            self._source = watch
        else:
            session = ControllerSession(
                context, topic, group, self.name, pb.CHECKPOINT, create_if_missing=create_if_missing
            )
            session.on_assignment(self._assigned)
            session.on_failure(self.failed)
            self._source = session
        self._held = HeldSegments(context, self)
        self._positions: dict[int, EntryId] = dict(start.positions)
        """The last message handed out of each segment that is, or was, read."""
        self._newest_at_start: int | None = None

    @property
    def topic(self) -> str:
        """The topic's name, as the broker resolved it: `topic://...`."""
        return self._source.topic

    @property
    def segment_ids(self) -> frozenset[int]:
        """The segments that it reads."""
        return self._held.ids

    def checkpoint(self) -> Checkpoint:
        """The present position: reading from there begins after the last message handed out.

        It has the position of every segment that it reads, also of those of which no message was
        handed out yet.  Segments of other members of the group are in their checkpoints.  A
        position is never inside a chunked message, which would be lost: it is before the first
        chunk, and messages handed out after that come again.
        """
        ids = self._held.ids
        return Checkpoint.of(
            {i: self._before_open(i, entry) for i, entry in self._positions.items() if i in ids}
        )

    def _before_open(self, segment_id: int, last: EntryId) -> EntryId:
        consumer = self._held.consumer_of(segment_id)
        return last if consumer is None else consumer.before_open(last)

    async def open(self) -> None:
        """Begin to read.  Raises the broker's error, or `OperationTimedOut`."""
        timeout_s = self._context.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._source.open(timeout_s)
                self._schema = self._given_schema.of_topic(SchemaReader(self._context, self.topic))
                await self._held.settled()
        except OperationTimedOut:
            raise
        except TimeoutError:
            raise OperationTimedOut(
                f"Consumer {self.name} of {self.topic} could not read all of its segments within "
                f"{timeout_s:g} s; check whether the brokers are well, or raise "
                "operation_timeout_s."
            ) from None

    async def _close(self) -> None:
        self._inbox.clear()
        self._inbox.fail(AlreadyClosed(f"Consumer {self.name} is closed; open another one."))
        await asyncio.gather(self._source.close(), self._held.close())

    # InboxConsumer

    def _schema_of(self, received: RawMessage[SegmentConsumer]) -> Schema[T]:
        return self._schema

    def _hand_out(self, received: RawMessage[SegmentConsumer]) -> Message[T]:
        segment_id = received.segment.segment.segment_id
        self._positions[segment_id] = received.entry_id
        return Message(received, self._schema, self.topic, segment_id)

    # Reader of HeldSegments

    async def segment_consumer(self, segment: AssignedSegment) -> SegmentConsumer:
        """A reader of a segment, from its position on."""
        start = self._positions.get(segment.segment_id)
        if start is not None:
            start = self._before_open(segment.segment_id, start)
        if start is None and self._begins_at_its_end(segment.segment_id):
            start = await self._end_of(segment)
            self._positions[segment.segment_id] = start
        return self._new(segment, start or EARLIEST_ENTRY, self._inbox)

    def _begins_at_its_end(self, segment_id: int) -> bool:
        newest = self._newest_at_start
        was_there = newest is None or segment_id <= newest
        return self._start.kind is CheckpointKind.LATEST and was_there

    async def _end_of(self, segment: AssignedSegment) -> EntryId:
        """The present last message of a segment; the position before the first if it has none.

        A position in place of "latest", so that a checkpoint has it.
        """
        timeout_s = self._context.settings.operation_timeout_s
        probe = self._new(segment, LATEST_ENTRY, Inbox(1, 1))
        try:
            await probe.open(timeout_s)
            if probe.connection is None:
                raise ConnectionLost(f"The end of {segment.topic} is not known; it is asked again.")
            answer = await probe.connection.request(_last_message_id_of(probe.consumer_id))
        finally:
            await probe.close()
        last = EntryId.from_wire(answer.get_last_message_id_response.last_message_id)
        return EARLIEST_ENTRY if last.entry_id < 0 else last

    def _new(
        self, segment: AssignedSegment, start: EntryId, inbox: Inbox[SegmentConsumer]
    ) -> SegmentConsumer:
        how = self._settings.of_segment(
            self._reader_name, self.name, segment.segment_id, self._given_schema.info, start
        )
        return SegmentConsumer(self._context, segment, how, inbox)

    def missing(self, segment: AssignedSegment, times: int) -> bool:
        """Retry a few times, as its broker may not know a new segment yet; then it has expired."""
        return times < MISSING_SEGMENT_TRIES

    async def part_with(self, consumer: SegmentConsumer) -> None:
        """Keep its position; there is no acknowledgement to wait for."""
        segment_id = consumer.segment.segment_id
        if segment_id in self._positions:
            self._positions[segment_id] = consumer.before_open(self._positions[segment_id])

    def parted(self, segment: AssignedSegment) -> None:
        """Keep its position, in case it comes back."""

    def failed(self, error: MagnetarError) -> None:
        """Fail, as a segment or the session has failed."""
        self._inbox.fail(error)

    # Segments

    def _assigned(self, assignment: Assignment) -> None:
        if self._newest_at_start is None and isinstance(self._source, ControllerSession):
            layout = self._source.first_layout
            self._newest_at_start = max(layout.segments) if layout is not None else None
        self._held.assign(assignment.segments)

    def _layout_changed(self, layout: Layout) -> None:
        if self._newest_at_start is None:
            self._newest_at_start = max(layout.segments)
        for segment_id in [each for each in self._positions if each not in layout.segments]:
            del self._positions[segment_id]
        self._held.assign(
            AssignedSegment(each.segment_id, each.topic) for each in layout.segments.values()
        )


def _last_message_id_of(consumer_id: int) -> pb.BaseCommand:
    return pb.BaseCommand(
        type=pb.BaseCommand.GET_LAST_MESSAGE_ID,
        get_last_message_id=pb.CommandGetLastMessageId(consumer_id=consumer_id, request_id=0),
    )
