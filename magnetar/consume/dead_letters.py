"""Messages that were delivered too often go to a topic of their own."""

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
from magnetar.errors import MagnetarError
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
        """Send, until it is stored; None for no value at all."""
        ...

    async def close(self) -> None:
        """End it."""


def dead_letter_topic(topic: str, policy: DeadLetterPolicy) -> str:
    """Where dead letters of `topic` (a `topic://` name) go."""
    if policy.topic is not None:
        return policy.topic
    name = parse_topic_name(topic)
    return f"topic://{name.namespace_name}/{name.local_name}-DLQ"


class DeadLetters:
    """The dead letters of one queue consumer, on their way to a topic of their own.

    - A dead letter is sent with its bytes (or none), keys and event time as they are, in pieces if
      it is large, and says where it comes from in its properties (`REAL_TOPIC`,
      `REAL_SUBSCRIPTION`, `ORIGIN_MESSAGE_ID`), as the Java client's.
    - It is acknowledged only when the broker has stored it there. What cannot be sent is asked for
      again later, and so is what is too much at a time.
    - The producer is opened for the first of them, and again if that did not succeed.
    """

    def __init__(
        self,
        context: ClientContext,
        topic: str,
        subscription: str,
        policy: DeadLetterPolicy,
        new_producer: Callable[[str], DeadLetterProducer] | None = None,
    ) -> None:
        """`topic` as the broker names it.  Tests give a `new_producer` of their own."""
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
        """Send these in place of handing them out."""
        for message in messages:
            message.segment.taken(message)
            if self._sending.count >= DEAD_LETTERS_IN_FLIGHT:
                self._later(message)
                continue
            self._sending.start(self._send(message))

    async def close(self) -> None:
        """Give up what is being sent: it comes again."""
        await self._sending.end()
        opened, self._producer = self._producer, None
        if opened is None:
            return
        if not opened.done():
            opened.cancel()
        await asyncio.wait((opened,))
        if not opened.cancelled() and opened.exception() is None:
            await opened.result().close()

    async def _send(self, message: RawMessage[SegmentConsumer]) -> None:
        own = message.own_metadata
        properties = {each.key: each.value for each in own.properties}
        properties[REAL_TOPIC] = self._from
        properties[REAL_SUBSCRIPTION] = self._subscription
        properties[ORIGIN_MESSAGE_ID] = str(message.entry_id)
        try:
            producer = await self._opened()
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
            self._later(message)

    def _later(self, message: RawMessage[SegmentConsumer]) -> None:
        message.segment.nack(message.entry_id, message.entry.redelivery_count)

    async def _opened(self) -> DeadLetterProducer:
        """The producer, which is opened once for all that wait."""
        if self._producer is None or (
            self._producer.done() and (self._producer.cancelled() or self._producer.exception())
        ):
            self._producer = self._context.loop.create_task(self._open())
        return await asyncio.shield(self._producer)

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


def _key_of(own: SingleMessageMetadata | MessageMetadata) -> str | bytes | None:
    """Return the key as a producer gives it: bytes stay bytes."""
    if not own.HasField("partition_key"):
        return None
    if own.partition_key_b64_encoded:
        try:
            return b64decode(own.partition_key, validate=True)
        except Base64Error:
            pass  # Whoever wrote it meant something else; it stays what it is.
    return own.partition_key
