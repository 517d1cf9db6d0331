"""`Producer[T]`, which writes messages to a topic."""

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
from magnetar.produce.capacity import Capacity
from magnetar.produce.outgoing import OutgoingMessage
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.produce.receipts import Receipts, RowOutcome
from magnetar.produce.topic_sender import TopicSender
from magnetar.produce.unanswered import UnansweredMessages
from magnetar.protocol.ids import LONG_MAX
from magnetar.protocol.key_hash import KEY_SPACE, key_hash
from magnetar.schema.schema import Schema
from magnetar.transactions.work import Work

__all__ = ["Producer"]

T = TypeVar("T")
_BUCKET_MASK: Final = KEY_SPACE - 1


class ProducerState(enum.Enum):
    """The state of a producer."""

    NEW = "new"
    OPEN = "open"
    CLOSING = "closing"
    FAILED = "failed"
    CLOSED = "closed"


_S: Final = ProducerState
_OPEN: Final = _S.OPEN
# Not a StateTable: a move that is not listed is a mistake of the application, not of the client.
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
    """Publishes to one topic.  Made by `Client.producer`.

    Messages are sent in the order of the calls.  The messages of one key are stored in that order,
    also over splits and merges of segments.

    A message whose caller is cancelled is not sent if it was not sent yet; else it may be stored.
    If the outcome cannot be known, a message may be stored although an error says otherwise, or
    stored twice: after a timeout; if a segment was sealed and pruned during a lost connection; if
    the connection was lost to a broker that does not recognise messages that are sent again.  In a
    transaction such a message fails, and is never stored twice.
    """

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
        self._capacity = Capacity(settings.max_pending_messages, settings.max_pending_bytes)
        self._unanswered = UnansweredMessages(
            self._capacity, settings.send_timeout_s, self._prune, self._trouble
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
        """The topic's name, as the broker resolved it."""
        return self._sender.watch.topic

    @property
    def name(self) -> str:
        """The given name; empty if brokers choose one for each segment."""
        return self.settings.name or ""

    @property
    def failure(self) -> MagnetarError | None:
        """The error with which it has failed, or None."""
        return self._failure

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id that is stored, also by earlier producers of its name; else -1.

        That of earlier producers is known where brokers deduplicate, from all segments that had not
        been pruned when this one was opened, active and sealed.
        """
        return max(self._unanswered.last_sequence_id, self._sender.last_sequence_id)

    async def open(self) -> None:
        """Make it usable.  Called once, by its opening.

        Raises an error if the topic cannot be written to.  An error of one segment may come only
        with the first message for it.
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
        """Send a message, and return its id when it is stored.

        `value` None is sent as a message without value.  `key` chooses the segment, and messages of
        one key stay in order; bytes are sent as base64.  `ordering_key` replaces it where consumers
        share keys.  `event_time_ms` and `deliver_at_ms` are since 1970; a delayed message is sent
        alone.  `sequence_id` must rise from message to message; a broker that deduplicates drops a
        message whose sequence id is not above the last.  A commit of `transaction` waits for the
        message from this call on.

        Waits while too many messages are pending, for `send_timeout_s` at most, and then as long
        for the receipt.

        Raises `OperationTimedOut` after that time, `MessageTooLarge`, `InvalidArgument`,
        `AlreadyClosed`, the error with which the broker refuses, and `ProducerFenced` if another
        producer has taken exclusive access to the topic.
        """
        self._check_open()
        message = self._message(value, key, ordering_key, properties, event_time_ms, sequence_id)
        self._delay(message, deliver_after_s, deliver_at_ms)
        if self._capacity.is_contended:
            await self._take_slot()
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
        """Send a message like `send`, without waiting; the future gets the id or the error.

        Raises `ProducerQueueFull` while too many messages are pending or other tasks wait in
        `room()`, `InvalidArgument`, `AlreadyClosed` and `ProducerFenced`.  An error that no one
        retrieves from its future is raised by `flush`; without `flush` asyncio reports it
        ("exception was never retrieved").  An error of a message in a transaction is raised by the
        commit instead.
        """
        if self._state is not _OPEN:
            self._check_open()
        message = self._message(value, key, ordering_key, properties, event_time_ms, sequence_id)
        if deliver_after_s is not None or deliver_at_ms is not None:
            self._delay(message, deliver_after_s, deliver_at_ms)
        if self._capacity.is_contended and not self._capacity.use_offered():
            raise ProducerQueueFull(
                f"{self._capacity.messages} messages for {self.topic} wait for their receipts, and "
                "other tasks may wait for their turn: await room(), or use send()."
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
        """Send messages in order, like `send_nowait`, and wait while too many are pending.

        Returns when all are on their way; `Receipts.stored` of the result waits until they are
        stored.  This takes about half the time of sending each by itself.  Each sequence has an
        item for each value, with the meaning of the same parameter of `send`.

        Raises the errors of `send`.  Messages before the one that cannot be sent are on their way
        then, and the transaction can no longer commit.
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
                if self._capacity.is_contended:
                    await self._take_slot()
                    end = self._send_rows(rows, begin, begin + 1)
                else:
                    end = self._send_rows(rows, begin, min(begin + SEND_TURN, len(values)))
                    await asyncio.sleep(0)
                begin = end
        except BaseException as error:
            receipts.failed(_error_of_unsent(error))
            receipts.outcome.exception()  # Retrieved: the error is raised here.
            raise
        return receipts

    async def room(self) -> None:
        """Wait until `send_nowait` can send.  Raises `AlreadyClosed` and `ProducerFenced`."""
        check_loop(self._loop)
        self._check_open()
        if self._capacity.is_contended:
            await self._capacity.reserve()
            self._capacity.offer_reserved()
            self._check_open()

    async def flush(self) -> None:
        """Wait until every message sent before has its receipt or its error.

        Raises the first error that was not retrieved from its future.  Errors of messages in a
        transaction are raised by its commit.
        """
        check_loop(self._loop)
        self._sender.flush()
        await self._unanswered.flush()
        failure = self._unanswered.unread_failure()
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Flush, then close the producer at the brokers; both bounded in time.

        Messages without receipt by then fail with `AlreadyClosed`.  It raises no errors of
        messages, and asyncio reports none.  Cancelling it does not stop the closing.
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

    # Messages

    def _send_rows(self, rows: "_Rows[T]", begin: int, end: int) -> int:
        """Send rows from `begin` up to `end`, as many as capacity allows; returns the next row."""
        self._check_open()
        messages: list[OutgoingMessage] = []
        most, size = self._capacity.free
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
            if not messages:
                self._capacity.leave_unused()
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
    ) -> OutgoingMessage:
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
        message = OutgoingMessage(
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

    def _delay(self, message: OutgoingMessage, after_s: float | None, at_ms: int | None) -> None:
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

    def _start(
        self, message: OutgoingMessage, transaction: Work | None
    ) -> asyncio.Future[MessageId]:
        future: asyncio.Future[MessageId] = message.outcome  # type: ignore[assignment]
        if transaction is not None:
            try:
                transaction.track(future)
            except MagnetarError:
                self._capacity.leave_unused()
                raise
            message.transaction = transaction
            message.txn = transaction.id
        self._unanswered.add(message)
        self._sender.send(message)
        return future

    async def _take_slot(self) -> None:
        """Wait for a slot for one message, first come first served, and take it."""
        try:
            async with asyncio.timeout(self.settings.send_timeout_s):
                await self._capacity.reserve()
        except TimeoutError:
            raise self._unanswered.queue_full() from None
        if self._state is not _OPEN:
            self._capacity.offer_reserved()
            self._check_open()
        self._capacity.use_reserved()

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

    def _prune(self) -> None:
        self._sender.prune()

    def _trouble(self) -> MagnetarError | None:
        return self._sender.trouble()

    def _fail(self, error: MagnetarError) -> None:
        """Fail for good: all messages, and all waiting tasks."""
        if self._state is _OPEN:
            self._enter(_S.FAILED)
        self._failure = error
        self._unanswered.fail_all(error)
        self._capacity.fail(error)

    async def _close(self) -> None:
        flushes = self._state is _OPEN
        self._enter(_S.CLOSING)
        closed = AlreadyClosed(
            f"The producer of {self._asked_topic} was closed; ask the client for a new one."
        )
        self._capacity.fail(closed)
        if flushes:
            self._sender.flush()
            try:
                async with asyncio.timeout(self._context.settings.close_timeout_s):
                    await self._unanswered.flush()
            except TimeoutError:
                pass
        self._unanswered.fail_all(closed, retrieved=True)
        self._unanswered.close()
        await self._sender.close()
        self._enter(_S.CLOSED)


class _Rows(NamedTuple, Generic[T]):
    """The arguments of `send_many`."""

    values: Sequence[T]
    keys: Sequence[str | bytes | None] | None
    properties: Sequence[Mapping[str, str] | None] | None
    event_times_ms: Sequence[int | None] | None
    transaction: Work | None
    receipts: Receipts


def _error_of_unsent(error: BaseException) -> MagnetarError:
    """The error of the messages that were not sent because of `error`."""
    if isinstance(error, MagnetarError):
        return type(error)(*error.args)
    return AlreadyClosed("send_many was interrupted before all its messages were sent.")


def _number(name: str, number: int | None) -> int | None:
    """Check that it is a whole number that metadata can carry.  Raises `InvalidArgument`."""
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
