"""`Inbox`, which holds the received messages of a consumer, and the bases of all consumers."""

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

from magnetar.consume.ack_tracker import bit_of
from magnetar.consume.message import MESSAGE_OVERHEAD_BYTES, EntryKey, Message, RawMessage
from magnetar.context import ClientContext, check_loop
from magnetar.errors import (
    AlreadyClosed,
    InvalidArgument,
    InvalidMessage,
    MagnetarError,
    OperationTimedOut,
)
from magnetar.opening import ClosedAfterwards
from magnetar.schema.schema import Schema

__all__ = ["Consumer", "Inbox", "InboxConsumer", "Source", "check_message", "random_name"]


T = TypeVar("T")
_NAME_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"


class Source(Protocol):
    """A source of messages, which an inbox calls back."""

    def taken(self, received: "RawMessage[object]") -> None:
        """Called when one of its messages was taken."""

    def taken_back(self, received: "RawMessage[object]") -> None:
        """Called when a message that was taken was not handed out, and is in the inbox again."""

    def inbox_has_capacity(self) -> None:
        """Called when the inbox is not full any more."""


S = TypeVar("S", bound=Source)


class Inbox(Generic[S]):
    """The messages that have arrived for a consumer and were not taken yet.

    Messages are taken in the order in which they came; waiting takers are served first come, first
    served.  A taker that is cancelled or times out has taken nothing.  Sources request no messages
    while the inbox is full; those requested before still come, and may exceed its limits.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[RawMessage[S]] = deque()
        self._bytes = 0
        self._takers: deque[asyncio.Future[None]] = deque()
        self._blocked: dict[S, None] = {}
        """Sources to call when it is not full any more."""
        self._error: MagnetarError | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def bytes_held(self) -> int:
        """Bytes of the messages, with a fixed number for each beside its payload."""
        return self._bytes

    @property
    def is_full(self) -> bool:
        """Whether no more messages are to be requested."""
        return len(self._messages) >= self._max_messages or self._bytes >= self._max_bytes

    def call_when_not_full(self, segment: S) -> None:
        """Call `segment.inbox_has_capacity()` once, when it is not full any more."""
        self._blocked[segment] = None

    # In

    def put(self, segment: S, messages: Sequence[RawMessage[S]]) -> None:
        """Append messages that came from a segment."""
        self._messages.extend(messages)
        self._bytes += _size_of(messages)
        if self._takers:
            self._wake()

    def put_back(self, received: RawMessage[S]) -> None:
        """Put back a message that could not be handed out, as the next one to take."""
        self._messages.appendleft(received)
        self._bytes += received.size
        received.segment.taken_back(received)
        self._wake()

    def drop(
        self, segment: S, messages: Mapping[EntryKey, int] | None = None
    ) -> list[RawMessage[S]]:
        """Remove and return the messages of a segment.

        `messages` limits that to messages of these entries: the bits of their indexes (`bit_of`).
        """
        kept: list[RawMessage[S]] = []
        dropped: list[RawMessage[S]] = []
        for each in self._messages:
            waits = each.segment is segment and (
                messages is None or messages.get(each.entry.key, 0) & bit_of(each.batch_index)
            )
            (dropped if waits else kept).append(each)
        if dropped:
            self._messages = deque(kept)
            self._bytes = _size_of(kept)
            self._unblock()
        return dropped

    def fail(self, error: MagnetarError) -> None:
        """Raise the error to takers once the inbox is empty: no more messages will come."""
        self._error = error
        self._wake_all()

    def clear(self) -> None:
        """Remove all messages."""
        self._messages.clear()
        self._bytes = 0
        self._blocked.clear()

    # Out

    def take_nowait(self) -> RawMessage[S] | None:
        """Take the next message, if there is one."""
        if not self._messages:
            return None
        received = self._messages.popleft()
        self._bytes -= len(received.payload) + MESSAGE_OVERHEAD_BYTES
        received.segment.taken(received)
        if self._blocked:
            self._unblock()
        return received

    async def take(self, timeout_s: float | None = None) -> RawMessage[S]:
        """Take the next message.  Raises `OperationTimedOut`, or the error given to `fail`."""
        received = self.take_nowait()
        if received is not None:
            return received
        try:
            async with asyncio.timeout(timeout_s):
                while received is None:
                    await self._arrival()
                    received = self.take_nowait()
        except TimeoutError:
            if received is None:
                raise OperationTimedOut(
                    f"No message came within {timeout_s} s; wait longer, or check whether "
                    "messages are sent to the topic."
                ) from None
        return received

    async def take_many(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[RawMessage[S]]:
        """Take the messages that are there, at most so many; waits for the first one.

        Returns an empty list if none came in time.
        """
        try:
            found = [await self.take(timeout_s)]
        except OperationTimedOut:
            return []
        while len(found) < max_messages and (received := self.take_nowait()) is not None:
            found.append(received)
        return found

    async def _arrival(self) -> None:
        """Wait until there may be a message.  Raises the error given to `fail`."""
        if self._error is not None:
            raise self._error
        taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        try:
            await taker
        except asyncio.CancelledError:
            if taker in self._takers:
                self._takers.remove(taker)
            elif not taker.cancelled():
                # It was woken, so it passes its turn to the next taker.
                self._wake()
            raise

    def _wake(self) -> None:
        """Wake one waiting taker for each message."""
        woken = 0
        while self._takers and woken < len(self._messages):
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                woken += 1

    def _wake_all(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)

    def _unblock(self) -> None:
        if not self.is_full:
            blocked, self._blocked = self._blocked, {}
            for segment in blocked:
                segment.inbox_has_capacity()


def _size_of(messages: Sequence[RawMessage[S]]) -> int:
    return sum([len(each.payload) for each in messages]) + MESSAGE_OVERHEAD_BYTES * len(messages)


def random_name(context: ClientContext, prefix: str, length: int = 8) -> str:
    """A random name with this prefix."""
    return prefix + "".join(context.rng.choices(_NAME_LETTERS, k=length))


def check_message(message: object, topic: str | None) -> None:
    """Raises `InvalidArgument` unless it is a message, of this topic (None: of any)."""
    if not isinstance(message, Message):
        raise InvalidArgument(
            f"This is of type {type(message).__name__}; give the message that receive returned."
        )
    # A broker would ignore positions of another topic without an error.
    if topic is not None and message.topic != topic:
        raise InvalidArgument(
            f"The message is of {message.topic} and this consumer of {topic}; pass it to the "
            "consumer that received it."
        )


class Consumer(ClosedAfterwards, Generic[T]):
    """A consumer of any kind; a subclass supplies the next message.

    Messages are handed out in the order in which they arrived, one to each call; waiting calls are
    served first come, first served.  A call that is cancelled or times out has taken nothing.  No
    message overtakes one whose schema is still being fetched.  After `close` every call raises
    `AlreadyClosed`, and iteration ends.  After an error for good the remaining messages are handed
    out, and then every call raises that error.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._loop: Final = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    # For applications

    async def receive(self, timeout_s: float | None = None) -> Message[T]:
        """Receive the next message; waits without limit unless `timeout_s` is given.

        Raises `OperationTimedOut`, `AlreadyClosed`, `WrongLoop`, and the error with which the
        consumer has failed.
        """
        check_loop(self._loop)
        message = self._receive_nowait()
        if message is not None:
            return message
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                return await self._next()
        except OperationTimedOut:
            raise
        except TimeoutError:
            raise OperationTimedOut(
                f"No message came within {timeout_s} s; wait longer, or check whether messages "
                "are sent to the topic."
            ) from None

    async def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[T]]:
        """Receive the messages that have arrived, at most so many; waits for the first one.

        Returns an empty list if none came in time.  Raises `AlreadyClosed`, and the error with
        which the consumer has failed.
        """
        if max_messages < 1:
            raise InvalidArgument(f"max_messages is {max_messages}; give it 1 or more.")
        try:
            messages = [await self.receive(timeout_s)]
        except OperationTimedOut:
            return []
        while len(messages) < max_messages and (message := self._receive_nowait()) is not None:
            messages.append(message)
        return messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message[T]:
        try:
            return await self.receive()
        except AlreadyClosed:
            raise StopAsyncIteration from None

    @abstractmethod
    async def open(self) -> None:
        """Make it usable, or raise."""

    async def close(self) -> None:
        """Close the consumer; messages that are not acknowledged go to other consumers.

        It may be called again, and cancelling it does not stop it.  Raises `WrongLoop`.
        """
        check_loop(self._loop)
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    # For subclasses

    @abstractmethod
    async def _close(self) -> None:
        """Close it, in any state.  Called once."""

    @abstractmethod
    def _take_nowait(self) -> Message[T] | None:
        """Hand out the next message, if that needs no waiting."""

    @abstractmethod
    async def _next(self) -> Message[T]:
        """Hand out the next message; one call at a time.  If cancelled, it has taken nothing."""

    def _receive_nowait(self) -> Message[T] | None:
        """The next message, if that needs no waiting and no other call waits."""
        return None if self._turn.locked() else self._take_nowait()


class InboxConsumer(Consumer[T], Generic[T, S]):
    """A consumer that hands out the messages of an inbox; a subclass fills it."""

    def __init__(self, inbox: Inbox[S]) -> None:
        super().__init__()
        self._inbox = inbox

    @abstractmethod
    def _schema_of(self, received: RawMessage[S]) -> Schema[T]:
        """The schema that decodes a message."""

    @abstractmethod
    def _hand_out(self, received: RawMessage[S]) -> Message[T]:
        """Make the message for the application, and note that it is handed out."""

    def _take_nowait(self) -> Message[T] | None:
        received = self._inbox.take_nowait()
        if received is None:
            return None
        if not self._schema_of(received).knows(_version_of(received)):
            self._inbox.put_back(received)
            return None
        return self._hand_out(received)

    async def _next(self) -> Message[T]:
        received = await self._inbox.take()
        version = _version_of(received)
        schema = self._schema_of(received)
        if version is not None and not schema.knows(version):
            try:
                await schema.learn(version)
            except InvalidMessage:
                pass  # There is no such schema: `Message.value` raises, and the others go on.
            except BaseException:
                self._inbox.put_back(received)
                raise
        return self._hand_out(received)


def _version_of(received: RawMessage[S]) -> bytes | None:
    metadata = received.entry.metadata
    return metadata.schema_version if metadata.HasField("schema_version") else None
