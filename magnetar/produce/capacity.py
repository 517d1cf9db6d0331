"""`Capacity`, which bounds the messages of a producer that have no receipt."""

import asyncio
from collections import deque

from magnetar.errors import MagnetarError


class Capacity:
    """Bounds the messages and bytes without receipt; tasks wait for a slot in order.

    A message counts from when it is sent until its outcome is known.  It is admitted while neither
    limit is reached, so one message may exceed the limit of bytes.  Waiting tasks get slots first
    come, first served.  A slot that was offered (`offer_reserved`) can be used without waiting
    until the end of the turn of the loop; then the next waiting task gets it.
    """

    __slots__ = (
        "_bytes",
        "_max_bytes",
        "_max_messages",
        "_messages",
        "_offered",
        "_reserved",
        "_waiters",
    )

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages = 0
        self._bytes = 0
        self._reserved = 0
        self._offered = 0  # The part of `_reserved` that was offered.
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether no message is admitted; reserved slots count."""
        taken = self._messages + self._reserved
        return taken >= self._max_messages or self._bytes >= self._max_bytes

    @property
    def is_contended(self) -> bool:
        """Whether a new message has to wait: it is full, or other tasks wait or have a slot."""
        return self._reserved > 0 or bool(self._waiters) or self.is_full

    @property
    def free(self) -> tuple[int, int]:
        """How many messages and how many bytes are admitted now; neither is below 0."""
        taken = self._messages + self._reserved
        return max(0, self._max_messages - taken), max(0, self._max_bytes - self._bytes)

    @property
    def messages(self) -> int:
        """The number of messages without receipt."""
        return self._messages

    def take(self, size: int, messages: int = 1) -> None:
        """Count messages that are sent; `size` is their bytes together."""
        self._messages += messages
        self._bytes += size

    def give_back(self, messages: int, size: int) -> None:
        """Stop counting messages whose outcome is known; `size` is their bytes together."""
        self._messages -= messages
        self._bytes -= size
        if self._waiters:
            self._wake()

    async def reserve(self) -> None:
        """Wait for a slot for one message; it stays reserved until `use_reserved`."""
        if not self.is_contended:
            self._reserved += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif not waiter.cancelled() and waiter.exception() is None:
                self._reserved -= 1
                self._wake()
            raise

    def use_reserved(self) -> None:
        """Use the reserved slot; the caller calls `take` at once."""
        self._reserved -= 1

    def leave_unused(self) -> None:
        """Give a used slot on, as the message that had it failed before `take`."""
        self._wake()

    def offer_reserved(self) -> None:
        """Offer the reserved slot to `use_offered` in this turn of the loop, then to a waiter."""
        if not self._offered:
            asyncio.get_running_loop().call_soon(self._withdraw)
        self._offered += 1

    def use_offered(self) -> bool:
        """Use an offered slot; returns whether there was one."""
        if not self._offered:
            return False
        self._offered -= 1
        self._reserved -= 1
        return True

    def fail(self, error: MagnetarError) -> None:
        """Raise the error in all waiting tasks."""
        waiters = [waiter for waiter in self._waiters if not waiter.done()]
        self._waiters.clear()
        for waiter in waiters:
            waiter.set_exception(type(error)(*error.args))

    def _withdraw(self) -> None:
        self._reserved -= self._offered
        self._offered = 0
        self._wake()

    def _wake(self) -> None:
        while self._waiters and not self.is_full:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._reserved += 1
                waiter.set_result(None)
