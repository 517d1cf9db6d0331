"""`DeadLetters`, which sends messages that were delivered too often to a topic of their own."""

import asyncio
import logging
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, cast

from magnetar.background_tasks import BackgroundTasks
from magnetar.bounds import DEAD_LETTERS_IN_FLIGHT
from magnetar.consume.message import RawMessage
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import DeadLetterPolicy
from magnetar.context import ClientContext
from magnetar.errors import AuthorizationFailed, MagnetarError
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.schema.plain import BYTES

__all__ = ["DeadLetters", "dead_letter_topic"]


_log = logging.getLogger(__name__)
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_SUBSCRIPTION: Final = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"


class DeadLetterProducer(Protocol):
    """The producer of dead letters."""

    async def open(self) -> None:
        """Make it usable."""

    async def send(
        self,
        value: bytes | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time_ms: int | None = None,
    ) -> MessageId:
        """Send a message and wait until it is stored; None is a message without value."""
        ...

    async def close(self) -> None:
        """Close it."""

    @property
    def failure(self) -> MagnetarError | None:
        """The error with which it has failed for good, or None."""


def dead_letter_topic(topic: str, policy: DeadLetterPolicy) -> str:
    """The name of the dead letter topic of `topic` (a `topic://` name)."""
    if policy.topic is not None:
        return policy.topic
    name = parse_topic_name(topic)
    return f"topic://{name.namespace_name}/{name.local_name}-DLQ"


class DeadLetters:
    """Sends the dead letters of one queue consumer to a topic of their own.

    A dead letter keeps its bytes (or none), keys and event time, and is chunked if it is large. Its
    origin is in its properties `REAL_TOPIC`, `REAL_SUBSCRIPTION` and `ORIGIN_MESSAGE_ID`, as with
    the Java client. It is acknowledged when it is stored there. One that cannot be sent, or is too
    many at a time, is delivered again later.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        policy: DeadLetterPolicy,
        new_producer: Callable[[str], DeadLetterProducer] | None = None,
    ) -> None:
        """`topic` is the name that the broker resolved.  Tests replace `new_producer`."""
        self.topic: Final = dead_letter_topic(topic, policy)
        self._context = context
        self._from = topic
        self._subscription = subscription
        self._max_redelivery_count = policy.max_redelivery_count
        self._new_producer = new_producer or self._producer_of
        self._producer: asyncio.Task[DeadLetterProducer] | None = None
        self._sending = BackgroundTasks()

    def are(self, messages: Sequence[RawMessage[SegmentConsumer]]) -> bool:
        """Whether the messages of an entry were delivered too often."""
        return messages[0].entry.redelivery_count > self._max_redelivery_count

    def take(self, messages: Sequence[RawMessage[SegmentConsumer]]) -> None:
        """Send messages to the dead letter topic in place of handing them out."""
        for message in messages:
            message.segment.taken(message)
            if self._sending.count >= DEAD_LETTERS_IN_FLIGHT:
                self._redeliver_later(message)
                continue
            self._sending.start(self._send(message))

    async def close(self) -> None:
        """Cancel dead letters that are being sent; they are delivered again."""
        await self._sending.end()
        await self._close_producer()

    async def _send(self, message: RawMessage[SegmentConsumer]) -> None:
        own = message.own_metadata
        properties = {each.key: each.value for each in own.properties}
        properties[REAL_TOPIC] = self._from
        properties[REAL_SUBSCRIPTION] = self._subscription
        properties[ORIGIN_MESSAGE_ID] = str(message.entry_id)
        opening = self._open_producer()
        try:
            producer = await asyncio.shield(opening)
            await producer.send(
                None if own.null_value else message.payload,
                key=_key_of(own),
                ordering_key=own.ordering_key if own.HasField("ordering_key") else None,
                properties=properties,
                event_time_ms=own.event_time or None,
            )
            message.segment.acknowledge(message.entry_id)
        except MagnetarError as error:
            _log.warning(
                "dead_letter_not_sent topic=%s message=%s error=%s",
                self.topic,
                message.entry_id,
                error,
            )
            self._redeliver_later(message)
            failed = isinstance(error, AuthorizationFailed) or _has_failed(opening)
            if failed and self._producer is opening:
                # A producer fails for good, and the grant may come back while the consumer lives,
                # or the topic, if it was deleted: the next producer makes it again.
                await self._close_producer()

    def _redeliver_later(self, message: RawMessage[SegmentConsumer]) -> None:
        message.segment.nack(message.entry_id, message.entry.redelivery_count)

    def _open_producer(self) -> asyncio.Task[DeadLetterProducer]:
        """Open the producer if it is not open, once for all tasks that wait."""
        if self._producer is None or (
            self._producer.done() and (self._producer.cancelled() or self._producer.exception())
        ):
            self._producer = self._context.loop.create_task(self._open())
        return self._producer

    async def _close_producer(self) -> None:
        """Close the producer if there is one; the next dead letter opens another one."""
        opened, self._producer = self._producer, None
        if opened is None:
            return
        if not opened.done():
            opened.cancel()
        await asyncio.wait((opened,))
        if not opened.cancelled() and opened.exception() is None:
            await opened.result().close()

    async def _open(self) -> DeadLetterProducer:
        producer = self._new_producer(self.topic)
        try:
            await producer.open()
        except BaseException:
            await producer.close()
            raise
        return producer

    def _producer_of(self, topic: str) -> DeadLetterProducer:
        producer = Producer(self._context, topic, BYTES, ProducerSettings(chunking=True))
        return cast("DeadLetterProducer", producer)


def _has_failed(opening: asyncio.Task[DeadLetterProducer]) -> bool:
    """Whether a producer was opened, and has failed since."""
    opened = opening.done() and not opening.cancelled() and opening.exception() is None
    return opened and opening.result().failure is not None


def _key_of(own: SingleMessageMetadata | MessageMetadata) -> str | bytes | None:
    """Return the key as a producer gives it: bytes stay bytes."""
    if not own.HasField("partition_key"):
        return None
    if own.partition_key_b64_encoded:
        try:
            return b64decode(own.partition_key, validate=True)
        except Base64Error:
            pass  # It is not base64 after all: keep the text.
    return own.partition_key
