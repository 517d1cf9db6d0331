"""What has arrived for a consumer and was not taken yet.

Signatures for whoever builds on it:

    Inbox(max_messages, max_bytes)
    put(segment, messages)                  by a segment consumer; never waits
    await take(timeout_s) -> Received       raises OperationTimedOut, what fail() was told
    await take_many(max_messages, timeout_s) -> list[Received]     at least one; [] when time is up
    take_nowait() -> Received | None;  put_back(received)          what was taken and not handed out
    drop(segment, keys=None) -> int         what waits of a segment, or of those entries of it
    fail(error);  clear()
    is_full;  when_room(segment)            segment.room() is called once there is room

Rules:

- Messages are taken in the order in which they came, each by one taker; takers wait in turn.
- It is told where it came from when a message is taken (`segment.taken(received)`), and only then
  more may be asked for; nothing is asked for while the inbox is full.  What was asked for before
  still comes, so its limits are passed by that much.
- A taker that is cancelled, or whose time is up, has taken nothing.
"""

import asyncio
from collections import deque
from collections.abc import Container, Sequence
from typing import Generic, Protocol, TypeVar

from magnetar.consume.received import RECEIVED_OVERHEAD, EntryKey, Received
from magnetar.errors import MagnetarError, OperationTimedOut

__all__ = ["Inbox", "Source"]


class Source(Protocol):
    """Where messages come from."""

    def taken(self, received: "Received[object]") -> None:
        """One of its messages was taken."""

    def taken_back(self, received: "Received[object]") -> None:
        """One that was taken was not handed out: it waits again."""

    def room(self) -> None:
        """The inbox is not full any more."""


S = TypeVar("S", bound=Source)


class Inbox(Generic[S]):
    """See the module's rules."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[Received[S]] = deque()
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

    def put(self, segment: S, messages: Sequence[Received[S]]) -> None:
        """What has come from a segment."""
        self._messages.extend(messages)
        self._bytes += _size_of(messages)
        if self._takers:
            self._wake()

    def put_back(self, received: Received[S]) -> None:
        """What was taken and could not be handed out is the next that is taken, again."""
        self._messages.appendleft(received)
        self._bytes += received.size
        received.segment.taken_back(received)
        self._wake()

    def drop(self, segment: S, keys: Container[EntryKey] | None = None) -> int:
        """Forget what waits of a segment, or only of those entries; returns how many it were."""
        kept = [
            each
            for each in self._messages
            if each.segment is not segment or (keys is not None and each.entry.key not in keys)
        ]
        dropped = len(self._messages) - len(kept)
        if dropped:
            self._messages = deque(kept)
            self._bytes = _size_of(kept)
            self._tell_of_room()
        return dropped

    def fail(self, error: MagnetarError) -> None:
        """Nothing more will come: takers are told when nothing is left."""
        self._error = error
        self._wake_all()

    def clear(self) -> None:
        """Forget everything that waits."""
        self._messages.clear()
        self._bytes = 0
        self._without_room.clear()

    # Out

    def take_nowait(self) -> Received[S] | None:
        """The next message, if one is there."""
        if not self._messages:
            return None
        received = self._messages.popleft()
        self._bytes -= len(received.payload) + RECEIVED_OVERHEAD
        received.segment.taken(received)
        if self._without_room:
            self._tell_of_room()
        return received

    async def take(self, timeout_s: float | None = None) -> Received[S]:
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
    ) -> list[Received[S]]:
        """All that waits, at most so many; waits for the first.  None came in time: []."""
        try:
            found = [await self.take(timeout_s)]
        except OperationTimedOut:
            return []
        while len(found) < max_messages and (received := self.take_nowait()) is not None:
            found.append(received)
        return found

    async def _arrival(self) -> None:
        """Until there may be a message.  Raises what `fail` was told."""
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


def _size_of(messages: Sequence[Received[S]]) -> int:
    return sum([len(each.payload) for each in messages]) + RECEIVED_OVERHEAD * len(messages)
