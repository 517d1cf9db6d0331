"""`Producer[T]`: what a user writes to a topic with.

Rules:

- `send` waits for the receipt, and before that for room; `send_nowait` waits for nothing.  Messages
  are sent in the order of these calls, those of one key are stored in that order, whatever happens
  to segments.
- A message whose caller is cancelled is not sent if it was not yet; else it may be stored.  It is
  never sent twice for that.
- A message in a transaction is counted in it from the moment of the call: a commit waits for it.
- Where the outcome cannot be known (the time is up; a segment was sealed and pruned while the
  connection was lost; the connection to a broker was lost that does not know what is sent again) a
  message may be stored although an error says otherwise, or twice; in a transaction it is never
  stored twice, but fails.
"""

import asyncio
import enum
import operator
from base64 import b64encode
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Final, Generic, NamedTuple, TypeVar

from magnetar.bounds import SEND_TURN
from magnetar.context import ClientContext, check_loop, running_loop
from magnetar.errors import AlreadyClosed, InvalidArgument, MagnetarError, ProducerQueueFull
from magnetar.message_id import MessageId
from magnetar.opening import ClosedAfterwards, completed, finished
from magnetar.produce.outgoing import Outgoing
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.produce.receipts import Receipts, RowOutcome
from magnetar.produce.room import Room
from magnetar.produce.topic_sender import TopicSender
from magnetar.produce.unanswered import Unanswered
from magnetar.protocol.ids import LONG_MAX
from magnetar.protocol.key_hash import KEY_SPACE, key_hash
from magnetar.schema.schema import Schema
from magnetar.transactions.work import Work

__all__ = ["Producer"]

T = TypeVar("T")
_BUCKET_MASK: Final = KEY_SPACE - 1


class ProducerState(enum.Enum):
    """Where a producer is in its life."""

    NEW = "new"
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


_S: Final = ProducerState
_OPEN: Final = _S.OPEN
# No StateTable: a move that is not listed is the application's mistake, and no defect of ours.
_NEXT: Final[Mapping[ProducerState, frozenset[ProducerState]]] = MappingProxyType(
    {
        _S.NEW: frozenset({_S.OPEN, _S.CLOSING}),
        _S.OPEN: frozenset({_S.CLOSING, _S.FAILED}),
        _S.FAILED: frozenset({_S.CLOSING}),
        _S.CLOSING: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    }
)


class Producer(ClosedAfterwards, Generic[T]):
    """Publishes to one topic; the messages of a key stay in order. Made by `Client.producer`."""

    def __init__(
        self, context: ClientContext, topic: str, schema: Schema[T], settings: ProducerSettings
    ) -> None:
        """Raises `InvalidTopicName`."""
        self.settings = settings
        self._context = context
        self._schema = schema
        self._encode = schema.encode
        self._state = ProducerState.NEW
        self._failure: MagnetarError | None = None
        self._room = Room(settings.max_pending_messages, settings.max_pending_bytes)
        self._unanswered = Unanswered(
            self._room, settings.send_timeout_s, self._expired, self._trouble
        )
        self._sender = TopicSender(
            context, topic, settings, schema.info, self._unanswered, self._fail
        )
        self._asked_topic = topic
        self._loop: Final = context.loop
        self._create_future = self._loop.create_future
        self._closing: asyncio.Task[None] | None = None

    @property
    def topic(self) -> str:
        """The topic, as the broker resolved its name."""
        return self._sender.watch.topic

    @property
    def name(self) -> str:
        """The name that it was given; empty if brokers name it, for each segment another."""
        return self.settings.name or ""

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that is stored, by earlier ones of its name too; -1: none.

        Of earlier ones it is known where brokers deduplicate: from all segments, sealed ones too,
        that had not been pruned when this was opened.
        """
        return max(self._unanswered.last_sequence_id, self._sender.last_sequence_id)

    async def open(self) -> None:
        """Make it usable.  Called once, by its opening.

        Raises why the topic cannot be written to; what is of one segment may show with the first
        message for it.
        """
        await self._sender.open()
        self._enter(_S.OPEN)

    async def send(
        self,
        value: T,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time_ms: int | None = None,
        sequence_id: int | None = None,
        deliver_after_s: float | None = None,
        deliver_at_ms: int | None = None,
        transaction: Work | None = None,
    ) -> MessageId:
        """Send, and return when the message is stored: where.

        `value` None is sent as no value at all.  `key` chooses the segment, and keeps the order
        with others of that key; bytes travel as base64.  `ordering_key` replaces it where consumers
        share keys.
        `event_time_ms` and `deliver_at_ms` are since 1970; a delayed message is sent alone.
        `sequence_id` rises from message to message; a broker that deduplicates drops what is not
        above the last.

        Waits for room for `send_timeout_s` at most, then as long for the receipt.

        Raises `OperationTimedOut` after that time, `MessageTooLarge`, `InvalidArgument`,
        `AlreadyClosed`, what the broker refuses with, and `ProducerFenced` when another producer
        has taken the topic for itself.
        """
        self._check_open()
        message = self._message(value, key, ordering_key, properties, event_time_ms, sequence_id)
        self._delay(message, deliver_after_s, deliver_at_ms)
        if self._room.is_contended:
            await self._reserved()
        return await self._start(message, transaction)

    def send_nowait(
        self,
        value: T,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time_ms: int | None = None,
        sequence_id: int | None = None,
        deliver_after_s: float | None = None,
        deliver_at_ms: int | None = None,
        transaction: Work | None = None,
    ) -> asyncio.Future[MessageId]:
        """As `send`, without waiting: the future has the id or the error when it is known.

        Raises `ProducerQueueFull` when there is no room, or others have asked for it before (await
        `room()`), `InvalidArgument`, `AlreadyClosed` and `ProducerFenced`.  Errors of futures that
        nobody looks at are raised by `flush`; without it asyncio reports each ("exception was never
        retrieved").  Those of messages in a transaction are raised by its commit instead.
        """
        if self._state is not _OPEN:
            self._check_open()
        message = self._message(value, key, ordering_key, properties, event_time_ms, sequence_id)
        if deliver_after_s is not None or deliver_at_ms is not None:
            self._delay(message, deliver_after_s, deliver_at_ms)
        if self._room.is_contended and not self._room.use_offered():
            raise ProducerQueueFull(
                f"{self._room.messages} messages for {self.topic} wait for their receipts, and "
                "others may have asked for room before: await room(), or use send()."
            )
        return self._start(message, transaction)

    async def send_many(
        self,
        values: Sequence[T],
        *,
        keys: Sequence[str | bytes | None] | None = None,
        properties: Sequence[Mapping[str, str] | None] | None = None,
        event_times_ms: Sequence[int | None] | None = None,
        transaction: Work | None = None,
    ) -> Receipts:
        """Send all of them in their order, as `send_nowait` would, waiting for room as need be.

        Returns when they are on their way: `stored` of what it returns waits until they are
        stored.  It takes about half of the time of sending each by itself.  Each of the sequences
        has an item for each value, as of `send`.

        Raises as `send`; those before the one that cannot be sent are on their way then, and a
        transaction is spoilt.
        """
        self._check_open()
        columns = [values, keys, properties, event_times_ms]
        if len({len(each) for each in columns if each is not None}) != 1:
            raise InvalidArgument("Give as many keys, properties and times as there are values.")
        receipts = Receipts(len(values), self._create_future())
        if transaction is not None:
            transaction.track(receipts.outcome)
        rows = _Rows(values, keys, properties, event_times_ms, transaction, receipts)
        try:
            begin = 0
            while begin < len(values):
                if self._room.is_contended:
                    await self._reserved()
                    end = self._send_rows(rows, begin, begin + 1)
                else:
                    end = self._send_rows(rows, begin, min(begin + SEND_TURN, len(values)))
                    await asyncio.sleep(0)
                begin = end
        except BaseException as error:
            receipts.failed(_given_up(error))
            receipts.outcome.exception()  # seen: it is raised here
            raise
        return receipts

    async def room(self) -> None:
        """Return when `send_nowait` has room.  Raises `AlreadyClosed` and `ProducerFenced`."""
        check_loop(self._loop)
        self._check_open()
        if self._room.is_contended:
            await self._room.reserve()
            self._room.offer_reserved()
            self._check_open()

    async def flush(self) -> None:
        """Return when everything sent before has its receipt or its error.

        Raises the first error of those that nobody has looked at; a transaction's are raised by its
        commit.
        """
        check_loop(self._loop)
        self._sender.flush()
        await self._unanswered.flush()
        failure = self._unanswered.unread_failure()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Flush, then take leave of the broker; both bounded in time.  Raises nothing of messages.

        What has no receipt by then fails with `AlreadyClosed`; whoever closed it knows, so asyncio
        does not report those that nobody looks at.  Cancelling it does not stop the closing.
        """
        check_loop(self._loop)
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await completed(finished(self._closing))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush, unless the block has failed, and close."""
        try:
            if kind is None and self._state is _OPEN:
                await self.flush()
        finally:
            await self.close()

    # How it is done

    def _send_rows(self, rows: "_Rows[T]", begin: int, end: int) -> int:
        """Send those from `begin` on, up to `end` and as there is room; where to go on."""
        self._check_open()
        messages: list[Outgoing] = []
        most, size = self._room.free
        row = begin
        values, keys, properties, times, transaction, receipts = rows
        txn = None if transaction is None else transaction.id
        try:
            for row in range(begin, max(begin + 1, min(end, begin + most))):
                message = self._message(
                    values[row],
                    None if keys is None else keys[row],
                    None,
                    None if properties is None else properties[row],
                    None if times is None else times[row],
                    None,
                    RowOutcome(receipts, row),
                )
                message.transaction, message.txn = transaction, txn
                messages.append(message)
                size -= message.size
                if size <= 0:
                    break
        finally:
            self._unanswered.add_all(messages)
            for message in messages:
                self._sender.send(message)
        return row + 1

    def _message(
        self,
        value: T,
        key: str | bytes | None,
        ordering_key: bytes | None,
        properties: Mapping[str, str] | None,
        event_time_ms: int | None,
        sequence_id: int | None,
        outcome: RowOutcome | None = None,
    ) -> Outgoing:
        if running_loop() is not self._loop:
            check_loop(self._loop)
        payload = b"" if value is None else self._encode(value)
        own_key = key if key is None or isinstance(key, bytes) else _utf8("key", key)
        raw_key = b64encode(key) if isinstance(key, bytes) else own_key
        if ordering_key is not None and not isinstance(ordering_key, bytes):
            raise InvalidArgument(f"The ordering key is {ordering_key!r}; give it as bytes.")
        sticky = own_key if ordering_key is None else ordering_key
        bucket_hash = 0 if sticky is None else key_hash(sticky) & _BUCKET_MASK
        if sequence_id is not None or event_time_ms is not None or properties is not None:
            sequence_id = _number("sequence_id", sequence_id)
            event_time_ms = _number("event_time_ms", event_time_ms)
            _check(properties)
        message = Outgoing(
            self._create_future() if outcome is None else outcome,
            payload,
            raw_key,
            bucket_hash,
            ordering_key,
            properties,
            event_time_ms or 0,
            sequence_id,
        )
        if value is None:
            message.null_value = True
        if isinstance(key, bytes):
            message.bytes_key = True
        return message

    def _delay(self, message: Outgoing, after_s: float | None, at_ms: int | None) -> None:
        if after_s is not None and at_ms is not None:
            raise InvalidArgument("A message is delayed by a time or until one: give one of both.")
        if after_s is not None:
            try:
                at_ms = self._context.now_ms() + round(after_s * 1000)
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgument(
                    f"deliver_after_s is {after_s!r}; give it a number of seconds."
                ) from error
        message.deliver_at_ms = _number("deliver_at_ms", at_ms)

    def _start(self, message: Outgoing, transaction: Work | None) -> asyncio.Future[MessageId]:
        future: asyncio.Future[MessageId] = message.outcome  # type: ignore[assignment]
        if transaction is not None:
            transaction.track(future)
            message.transaction = transaction
            message.txn = transaction.id
        self._unanswered.add(message)
        self._sender.send(message)
        return future

    async def _reserved(self) -> None:
        """Wait for room, in the order of asking; the place is the caller's."""
        try:
            async with asyncio.timeout(self.settings.send_timeout_s):
                await self._room.reserve()
        except TimeoutError:
            raise self._unanswered.no_room() from None
        if self._state is not _OPEN:
            self._room.offer_reserved()
            self._check_open()
        self._room.use_reserved()

    def _check_open(self) -> None:
        if self._state is _OPEN:
            return
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        raise AlreadyClosed(
            f"The producer of {self._asked_topic} is not open; ask the client for a new one."
        )

    def _enter(self, state: ProducerState) -> None:
        if state not in _NEXT[self._state]:
            raise AlreadyClosed(
                f"The producer of {self._asked_topic} is {self._state.value}; ask the client for a "
                "new one."
            )
        self._state = state

    def _expired(self) -> None:
        self._sender.prune()

    def _trouble(self) -> MagnetarError | None:
        return self._sender.trouble()

    def _fail(self, error: MagnetarError) -> None:
        """For good."""
        if self._state is _OPEN:
            self._enter(_S.FAILED)
        self._failure = error
        self._unanswered.fail_all(error)
        self._room.fail(error)

    async def _close(self) -> None:
        flushes = self._state is _OPEN
        self._enter(_S.CLOSING)
        closed = AlreadyClosed(
            f"The producer of {self._asked_topic} was closed; ask the client for a new one."
        )
        self._room.fail(closed)
        if flushes:
            self._sender.flush()
            try:
                async with asyncio.timeout(self._context.settings.close_timeout_s):
                    await self._unanswered.flush()
            except TimeoutError:
                pass
        self._unanswered.fail_all(closed, told=True)
        self._unanswered.close()
        await self._sender.close()
        self._enter(_S.CLOSED)


class _Rows(NamedTuple, Generic[T]):
    """What `send_many` was given."""

    values: Sequence[T]
    keys: Sequence[str | bytes | None] | None
    properties: Sequence[Mapping[str, str] | None] | None
    event_times_ms: Sequence[int | None] | None
    transaction: Work | None
    receipts: Receipts


def _given_up(error: BaseException) -> MagnetarError:
    """What becomes of messages that were not sent because of an error."""
    if isinstance(error, MagnetarError):
        return type(error)(*error.args)
    return AlreadyClosed("Messages that were sent together were given up before all were sent.")


def _number(name: str, number: int | None) -> int | None:
    """A whole number that metadata can carry; a float is refused before it meets its batch."""
    if number is None:
        return None
    try:
        whole = operator.index(number)
    except TypeError:
        whole = -1
    if not 0 <= whole <= LONG_MAX:
        raise InvalidArgument(
            f"{name} is {number!r}; give it a whole number (int) from 0 to {LONG_MAX}."
        )
    return whole


def _check(properties: Mapping[str, str] | None) -> None:
    for name, value in (properties or {}).items():
        _utf8("name of a property", name)
        _utf8(f"property {name!r}", value)


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise InvalidArgument(
            f"The {what} is {text!r}; give it text that can be encoded as UTF-8."
        ) from error
