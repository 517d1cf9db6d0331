"""`QueueConsumer[T]`, which shares the messages of a topic with other consumers."""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, TypeVar

from magnetar.background_tasks import BackgroundTasks
from magnetar.bounds import INBOX_SEGMENTS
from magnetar.consume.acknowledgements import (
    DONE,
    AckTransaction,
    Outcomes,
    cannot_commit,
    start_now,
)
from magnetar.consume.dead_letters import DeadLetters
from magnetar.consume.message import Message, RawMessage
from magnetar.consume.receiving import Inbox, InboxConsumer, check_message
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import QueueSettings
from magnetar.context import ClientContext, check_loop
from magnetar.errors import AlreadyClosed, AuthorizationFailed, MagnetarError, TopicNotFound
from magnetar.layout import Layout, Segment, SegmentIdentity
from magnetar.layout_watch import LayoutWatch
from magnetar.opening import resolve
from magnetar.protocol.backoff import Backoff
from magnetar.schema.schema import Schema
from magnetar.schema.schema_reader import SchemaReader
from magnetar.settings import check_flag
from magnetar.wire.attachment import AttachmentState

__all__ = ["QueueConsumer"]


T = TypeVar("T")
_log = logging.getLogger(__name__)


class _QueueInbox(Inbox[SegmentConsumer]):
    """An inbox that passes dead letters on."""

    dead_letters: DeadLetters | None = None

    def put(
        self, segment: SegmentConsumer, messages: Sequence[RawMessage[SegmentConsumer]]
    ) -> None:
        """Put in messages of one entry, or pass them on as dead letters."""
        if self.dead_letters is not None and self.dead_letters.are(messages):
            self.dead_letters.take(messages)
        else:
            super().put(segment, messages)


class QueueConsumer(InboxConsumer[T, SegmentConsumer]):
    """A consumer that shares the messages of a topic with others of its subscription.

    Made by `Client.queue_consumer`.

    It subscribes to every segment of the layout, active and sealed, and opening waits for all of
    them.  A segment that fails later is retried for as long as it is in the layout, while the
    others go on; if the permission to consume was withdrawn, the consumer fails.  `close` sends the
    acknowledgements; other consumers get all other messages.

    With `processing_timeout_s` a message that is neither acknowledged nor negatively acknowledged
    in that time is delivered again, with the unacknowledged messages of its batch.  A late
    acknowledgement still counts, but messages that came again by then are handed out.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        schema: Schema[T],
        settings: QueueSettings,
        create_if_missing: bool = True,
        *,
        passes_on: bool = False,
    ) -> None:
        """Raises `InvalidTopicName`, `InvalidArgument`.

        With `passes_on` the caller of `receive` passes messages on, and calls `begin_processing`
        when the application gets one.
        """
        inbox = _QueueInbox(
            settings.receiver_queue_size * INBOX_SEGMENTS, settings.receiver_queue_bytes
        )
        super().__init__(inbox)
        settings.of_segment(subscription, 0, None)
        self.subscription: Final = subscription
        self.settings: Final = settings
        self._queue_inbox = inbox
        self._context = context
        self._watch = LayoutWatch(context, topic, create_if_missing)
        self._given_schema = schema
        self._schema = schema
        self._topic = topic
        self._segments: dict[int, SegmentConsumer] = {}
        self._keepers: dict[SegmentIdentity, asyncio.Task[None]] = {}
        self._tasks = BackgroundTasks()
        self._ended: set[SegmentIdentity] = set()
        self._is_forbidden = False
        """Whether a broker has refused a segment because the permission is missing."""
        self._begins_processing = bool(settings.processing_timeout_s) and not passes_on

    @property
    def topic(self) -> str:
        """The topic's name, as the broker resolved it."""
        return self._topic

    # InboxConsumer

    async def open(self) -> None:
        """Subscribe to all segments.  Raises the first error."""
        timeout_s = self._context.settings.operation_timeout_s
        await self._watch.open(timeout_s)
        self._topic = topic = self._watch.topic
        self._schema = self._given_schema.of_topic(SchemaReader(self._context, topic))
        policy = self.settings.dead_letters
        if policy is not None:
            self._queue_inbox.dead_letters = DeadLetters(
                self._context, topic, self.subscription, policy
            )
        self._watch.on_change(self._layout_changed)
        self._watch.on_failure(self._inbox.fail)
        firsts: list[asyncio.Future[None]] = []
        self._apply(self._watch.layout, firsts)
        await asyncio.gather(*firsts)

    def _schema_of(self, received: RawMessage[SegmentConsumer]) -> Schema[T]:
        return self._schema

    def _hand_out(self, received: RawMessage[SegmentConsumer]) -> Message[T]:
        segment = received.segment
        if self._begins_processing:
            segment.begin_processing(received)
        return Message(received, self._schema, self._topic, segment.segment.segment_id)

    def begin_processing(self, message: Message[T]) -> None:
        """Start the processing timeout, if there is one, of a message that was handed out."""
        if (segment := self._segment_of(message)) is not None:
            segment.begin_processing(message.received)

    # Acknowledging

    def ack(
        self,
        message: Message[T] | Iterable[Message[T]],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge one message or several.

        This takes effect when it is called, awaited or not.  Without `wait` the acknowledgement is
        sent within `ack_grouping_ms`, and may be lost with the connection; then the message comes
        again.  With `wait`, and always in a transaction, the result waits for the broker's answer.

        Raises `AlreadyClosed`, and `InvalidArgument` for a message of another topic.  With `wait`
        it raises the broker's error, `ConnectionLost` and `OperationTimedOut`; then it is not known
        whether the message is acknowledged.  In a transaction it raises `TransactionConflict` if
        another one has acknowledged the message, and the errors of the transaction.
        """
        check_loop(self._loop)
        if self._closing is not None:
            raise AlreadyClosed("The consumer is closed; other consumers get its messages.")
        messages = tuple(message) if isinstance(message, Iterable) else (message,)
        for each in messages:
            check_message(each, self._topic)
        if transaction is not None:
            return self._ack_in(transaction, messages)
        for each in messages:
            if (segment := self._segment_of(each)) is not None:
                segment.acknowledge_received(each.received)
        if not wait:
            return DONE
        segments = {segment for each in messages if (segment := self._segment_of(each))}
        return Outcomes([start_now(segment.confirmed()) for segment in segments])

    def _ack_in(
        self, transaction: AckTransaction, messages: Sequence[Message[T]]
    ) -> Awaitable[None]:
        for each in messages:
            if self._segment_of(each) is None and not self._has_gone(each.segment_id):
                error = AlreadyClosed(
                    f"Segment {each.segment_id} of {self._topic} is being opened again; abort the "
                    "transaction, as the message comes again."
                )
                cannot_commit(self._context, transaction, error)
                raise error
        outcomes: list[Awaitable[None]] = [
            segment.acknowledge(each.received.entry_id, transaction)
            for each in messages
            if (segment := self._segment_of(each)) is not None
        ]
        return outcomes[0] if len(outcomes) == 1 else Outcomes(outcomes)

    def _has_gone(self, segment_id: int) -> bool:
        """Whether no message of a segment can come again: it ended, or no longer exists."""
        segment = self._watch.layout.segments.get(segment_id)
        return segment is None or segment.identity in self._ended

    def nack(self, message: Message[T]) -> None:
        """Have a message delivered again later, here or to another consumer."""
        check_loop(self._loop)
        check_message(message, self._topic)
        if self._closing is None and (segment := self._segment_of(message)) is not None:
            segment.nack_handed_out(message.received.entry_id, message.redelivery_count)

    def _segment_of(self, message: Message[T]) -> SegmentConsumer | None:
        """The consumer of the message's segment; None if the segment is closed."""
        segment = self._segments.get(message.segment_id)
        if segment is None or segment.state is AttachmentState.CLOSED:
            return None
        return segment

    async def unsubscribe(self, *, force: bool = False) -> None:
        """End the subscription on all segments, and close.

        Raises the broker's error: `ConsumerBusy` if others share it, unless `force`.
        """
        check_flag("force", force)
        check_loop(self._loop)
        if self._closing is not None:
            raise AlreadyClosed("The consumer is closed; open another one to unsubscribe.")
        try:
            for segment in self._watch.layout.segments.values():
                consumer = self._segments.get(segment.segment_id)
                if consumer is None or consumer.state is AttachmentState.FAILED:
                    consumer = await self._reopen(segment)
                if consumer is not None:
                    await consumer.unsubscribe(force=force)
        finally:
            await self.close()

    async def _reopen(self, segment: Segment) -> SegmentConsumer | None:
        """Open a consumer of a segment that was closed; None if the segment no longer exists."""
        consumer = self._new_consumer(segment)
        try:
            await consumer.open(self._context.settings.operation_timeout_s)
        except TopicNotFound:
            return None
        return consumer

    # Segments

    def _layout_changed(self, layout: Layout) -> None:
        self._apply(layout, None)

    def _apply(self, layout: Layout, firsts: list[asyncio.Future[None]] | None) -> None:
        """Consume the segments of the layout; appends the outcomes of new ones to `firsts`."""
        if self._closing is not None:
            return
        # Not by their ids: a topic that was deleted and created again has the same ones.
        segments = {each.identity: each for each in layout.segments.values()}
        for identity in [each for each in self._keepers if each not in segments]:
            self._keepers.pop(identity).cancel()
        self._ended.intersection_update(segments)
        for identity, segment in segments.items():
            if identity in self._keepers or identity in self._ended:
                continue
            first: asyncio.Future[None] | None = None
            if firsts is not None:
                first = self._context.loop.create_future()
                firsts.append(first)
            self._keepers[identity] = self._tasks.start(self._keep(segment, first))

    async def _keep(self, segment: Segment, first: asyncio.Future[None] | None) -> None:
        """Consume a segment until everything of it is acknowledged and no more can come."""
        backoff = self._context.backoff()
        while True:
            if await self._consume(segment, first, backoff):
                break
            if self._is_forbidden:
                return
            await asyncio.sleep(backoff.pause_s())
        self._ended.add(segment.identity)
        self._keepers.pop(segment.identity, None)

    async def _consume(
        self, segment: Segment, first: asyncio.Future[None] | None, backoff: Backoff
    ) -> bool:
        """Consume a segment until it ends or fails; returns whether all of it is acknowledged."""
        over = asyncio.Event()

        def ended(_: SegmentConsumer) -> None:
            over.set()

        consumer = self._segments[segment.segment_id] = self._new_consumer(segment)
        consumer.on_end = consumer.on_failure = ended
        refusal: MagnetarError | None = None
        try:
            await consumer.open(self._context.settings.operation_timeout_s)
            backoff.reset()
            resolve(first, None)
            await over.wait()
        except MagnetarError as error:
            refusal = error
        finally:
            await consumer.close()
            if self._segments.get(segment.segment_id) is consumer:
                del self._segments[segment.segment_id]
        if consumer.ended:
            return True
        if not (isinstance(refusal, TopicNotFound) and not segment.active):
            resolve(first, refusal)
        # Otherwise it was pruned meanwhile, and the next layout will not have it.
        resolve(first, None)
        why = refusal or consumer.error
        _log.warning("segment_not_consumed topic=%s error=%s", segment.topic, why)
        if isinstance(why, AuthorizationFailed):
            # Retries cannot bring a grant back, so the application would wait in vain.
            self._is_forbidden = True
            self._inbox.fail(why)
        return False

    def _new_consumer(self, segment: Segment) -> SegmentConsumer:
        info = self._given_schema.info
        how = self.settings.of_segment(self.subscription, segment.segment_id, info)
        return SegmentConsumer(self._context, segment, how, self._inbox)

    async def _close(self) -> None:
        """Close everything at once; bounded in time, as each part is."""
        self._inbox.clear()
        self._inbox.fail(AlreadyClosed("The consumer is closed; open another one."))
        dead_letters = self._queue_inbox.dead_letters
        if dead_letters is not None:
            await dead_letters.close()
        self._tasks.cancel()
        await asyncio.gather(
            self._watch.close(),
            *(each.close() for each in list(self._segments.values())),
            *self._tasks.running,
            return_exceptions=True,
        )
