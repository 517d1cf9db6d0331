"""How every consumer hands out messages.

Rules:

- Messages are handed out in the order in which they arrived, one to each call; calls wait in turn.
- A message whose schema is not known yet is held back until the broker has told it, and nothing
  overtakes it: who acknowledges up to a message must have been given all before it.
- A call that is cancelled, or whose time is up, has taken nothing.
- After `close` every call raises `AlreadyClosed`, and iterating ends; after a failure that cannot
  be mended, what is still there is handed out and then every call raises that failure.
"""

import asyncio
from abc import abstractmethod
from typing import Final, Generic, Self, TypeVar

from magnetar.consume.inbox import Inbox, Source
from magnetar.consume.received import Received
from magnetar.context import check_loop
from magnetar.errors import AlreadyClosed, InvalidArgument, InvalidMessage, OperationTimedOut
from magnetar.message import Message
from magnetar.opening import ClosedAfterwards
from magnetar.schema.schema import Schema

__all__ = ["HandingOut", "Receiving", "check_given"]

T = TypeVar("T")
S = TypeVar("S", bound=Source)


def check_given(message: object, topic: str | None) -> None:
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


class HandingOut(ClosedAfterwards, Generic[T]):
    """See the module's rules.  A subclass says where the next message comes from."""

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


class Receiving(HandingOut[T], Generic[T, S]):
    """What hands out the messages of an inbox.  A subclass is a consumer: it fills the inbox."""

    def __init__(self, inbox: Inbox[S]) -> None:
        super().__init__()
        self._inbox = inbox

    @abstractmethod
    def _schema_of(self, received: Received[S]) -> Schema[T]:
        """The schema that decodes a message."""

    @abstractmethod
    def _hand_out(self, received: Received[S]) -> Message[T]:
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


def _version_of(received: Received[S]) -> bytes | None:
    metadata = received.entry.metadata
    return metadata.schema_version if metadata.HasField("schema_version") else None
