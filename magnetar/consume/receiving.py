"""The inbox of a consumer, and how every consumer hands out what is in it."""

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
    """Where messages come from."""

    def taken(self, received: "RawMessage[object]") -> None:
        """One of its messages was taken."""

    def taken_back(self, received: "RawMessage[object]") -> None:
        """One that was taken was not handed out: it waits again."""

    def room(self) -> None:
        """The inbox is not full any more."""


S = TypeVar("S", bound=Source)


class Inbox(Generic[S]):
    """The messages that have arrived for a consumer and were not taken yet.

    - Messages are taken in the order in which they came, each by one taker; takers wait in turn.
    - It is told where it came from when a message is taken (`segment.taken(received)`), and only
      then more may be asked for; nothing is asked for while the inbox is full. What was asked for
      before still comes, so its limits are passed by that much.
    - A taker that is cancelled, or whose time is up, has taken nothing.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[RawMessage[S]] = deque()
        self._bytes = 0
        self._takers: deque[asyncio.Future[None]] = deque()
        self._without_room: dict[S, None] = {}
        self._error: MagnetarError | None = None

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def bytes_held(self) -> int:
        """Bytes that wait, with what each message costs beside its payload."""
        return self._bytes

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be asked for."""
        return len(self._messages) >= self._max_messages or self._bytes >= self._max_bytes

    def when_room(self, segment: S) -> None:
        """Call `segment.room()` once, when it is not full any more."""
        self._without_room[segment] = None

    # In

    def put(self, segment: S, messages: Sequence[RawMessage[S]]) -> None:
        """Put in messages that have come from a segment."""
        self._messages.extend(messages)
        self._bytes += _size_of(messages)
        if self._takers:
            self._wake()

    def put_back(self, received: RawMessage[S]) -> None:
        """Put back a message that could not be handed out: it is the next to be taken."""
        self._messages.appendleft(received)
        self._bytes += received.size
        received.segment.taken_back(received)
        self._wake()

    def drop(
        self, segment: S, messages: Mapping[EntryKey, int] | None = None
    ) -> list[RawMessage[S]]:
        """Forget what waits of a segment, or of those entries with the bits of `bit_of` only.

        Returns what that was.
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
            self._tell_of_room()
        return dropped

    def fail(self, error: MagnetarError) -> None:
        """Raise this to takers once nothing is left, as nothing more will come."""
        self._error = error
        self._wake_all()

    def clear(self) -> None:
        """Forget everything that waits."""
        self._messages.clear()
        self._bytes = 0
        self._without_room.clear()

    # Out

    def take_nowait(self) -> RawMessage[S] | None:
        """The next message, if one is there."""
        if not self._messages:
            return None
        received = self._messages.popleft()
        self._bytes -= len(received.payload) + MESSAGE_OVERHEAD_BYTES
        received.segment.taken(received)
        if self._without_room:
            self._tell_of_room()
        return received

    async def take(self, timeout_s: float | None = None) -> RawMessage[S]:
        """The next message.  Raises `OperationTimedOut`, or what `fail` was told."""
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
                    f"No message has come within {timeout_s} s; wait longer, or look whether "
                    "anything is sent to the topic."
                ) from None
        return received

    async def take_many(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[RawMessage[S]]:
        """All that waits, at most so many; waits for the first.  None came in time: []."""
        try:
            found = [await self.take(timeout_s)]
        except OperationTimedOut:
            return []
        while len(found) < max_messages and (received := self.take_nowait()) is not None:
            found.append(received)
        return found

    async def _arrival(self) -> None:
        """Wait until there may be a message.  Raises the error that `fail` was given."""
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
                # It was this one's turn: it is the next one's.
                self._wake()
            raise

    def _wake(self) -> None:
        """One waiting taker for each message; those that are cancelled do not count."""
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

    def _tell_of_room(self) -> None:
        if not self.is_full:
            waiting, self._without_room = self._without_room, {}
            for segment in waiting:
                segment.room()


def _size_of(messages: Sequence[RawMessage[S]]) -> int:
    return sum([len(each.payload) for each in messages]) + MESSAGE_OVERHEAD_BYTES * len(messages)


def random_name(context: ClientContext, prefix: str, length: int = 8) -> str:
    """A name that nobody else has."""
    return prefix + "".join(context.rng.choices(_NAME_LETTERS, k=length))


def check_message(message: object, topic: str | None) -> None:
    """Raises `InvalidArgument` unless it is a message, of this topic (None: of any).

    Of another topic's positions the broker knows nothing here, and would not say so.
    """
    if not isinstance(message, Message):
        raise InvalidArgument(
            f"This is of type {type(message).__name__}; give the message as receive gave it."
        )
    if topic is not None and message.topic != topic:
        raise InvalidArgument(
            f"The message is of {message.topic} and this consumer of {topic}; give it to the "
            "consumer that gave it."
        )


class Consumer(ClosedAfterwards, Generic[T]):
    """A consumer of any kind.  A subclass says where the next message comes from.

    - Messages are handed out in the order in which they arrived, one to each call; calls wait in
      turn.
    - A message whose schema is not known yet is held back until the broker has told it, and nothing
      overtakes it: who acknowledges up to a message must have been given all before it.
    - A call that is cancelled, or whose time is up, has taken nothing.
    - After `close` every call raises `AlreadyClosed`, and iterating ends; after a failure that
      cannot be mended, what is still there is handed out and then every call raises that failure.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._loop: Final = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    # For its user

    async def receive(self, timeout_s: float | None = None) -> Message[T]:
        """The next message; waits for it without limit unless `timeout_s` is given.

        Raises `OperationTimedOut`, `AlreadyClosed`, `WrongLoop`, and why the consumer has failed.
        """
        check_loop(self._loop)
        message = self._next_at_hand()
        if message is not None:
            return message
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                return await self._next()
        except OperationTimedOut:
            raise
        except TimeoutError:
            raise OperationTimedOut(
                f"No message has come within {timeout_s} s; wait longer, or look whether anything "
                "is sent to the topic."
            ) from None

    async def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[T]]:
        """The messages that are there, at most so many; waits for the first.

        None came in time: an empty list.  Raises `AlreadyClosed`, and why the consumer has failed.
        """
        if max_messages < 1:
            raise InvalidArgument(f"max_messages is {max_messages}; give it 1 or more.")
        try:
            messages = [await self.receive(timeout_s)]
        except OperationTimedOut:
            return []
        while len(messages) < max_messages and (message := self._next_at_hand()) is not None:
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
        """End it; what is not acknowledged comes again to whoever subscribes.

        It may be called again, and cancelling it does not stop it.  Raises `WrongLoop`.
        """
        check_loop(self._loop)
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    # For the subclass to say

    @abstractmethod
    async def _close(self) -> None:
        """End it, whatever state it is in.  Called once."""

    @abstractmethod
    def _take_at_hand(self) -> Message[T] | None:
        """Hand out the next message, if it is there and nothing must be waited for."""

    @abstractmethod
    async def _next(self) -> Message[T]:
        """Hand out the next message; one call at a time.  Cancelled, it has taken nothing."""

    def _next_at_hand(self) -> Message[T] | None:
        """The next message, if nobody is before this call."""
        return None if self._turn.locked() else self._take_at_hand()


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
        """The message for the user; what is taken note of when it is handed out."""

    def _take_at_hand(self) -> Message[T] | None:
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
                pass  # there is no such schema: its `value` raises that, and the others go on
            except BaseException:
                self._inbox.put_back(received)
                raise
        return self._hand_out(received)


def _version_of(received: RawMessage[S]) -> bytes | None:
    metadata = received.entry.metadata
    return metadata.schema_version if metadata.HasField("schema_version") else None
