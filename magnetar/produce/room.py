"""How much a producer may have without receipt, and who waits for room.

Rules: a message takes room from when it is sent until its outcome is known.  It may be taken while
both limits are not reached, so one message may exceed the bytes.  Who waits gets a place in the
order of asking, and nobody who asks later overtakes.  Who has a place and does not take it offers
it: until the end of the turn of the loop one message may take it without waiting, then the next
who waits has it.
"""

import asyncio
from collections import deque

from magnetar.errors import MagnetarError


class Room:
    """Bounds the messages and bytes without receipt, and lets those who wait for room go on."""

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
        self._offered = 0  # of what is reserved
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether nothing may be taken; what is reserved counts."""
        taken = self._messages + self._reserved
        return taken >= self._max_messages or self._bytes >= self._max_bytes

    @property
    def is_contended(self) -> bool:
        """Whether who asks has to wait, be it for a moment: others asked before."""
        return self._reserved > 0 or bool(self._waiters) or self.is_full

    @property
    def free(self) -> tuple[int, int]:
        """How many messages, and how many bytes, may be taken; neither is below 0."""
        taken = self._messages + self._reserved
        return max(0, self._max_messages - taken), max(0, self._max_bytes - self._bytes)

    @property
    def messages(self) -> int:
        """How many take room."""
        return self._messages

    def take(self, size: int, messages: int = 1) -> None:
        """For messages of so many bytes together."""
        self._messages += messages
        self._bytes += size

    def give_back(self, messages: int, size: int) -> None:
        """So many messages, of so many bytes together, are decided."""
        self._messages -= messages
        self._bytes -= size
        if self._waiters:
            self._wake()

    async def reserve(self) -> None:
        """Return when there is a place for one message; it is kept until `use_reserved`."""
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
        """The place is taken now: `take` follows at once."""
        self._reserved -= 1

    def offer_reserved(self) -> None:
        """The place is for whoever takes it in this turn of the loop, else for who waits."""
        if not self._offered:
            asyncio.get_running_loop().call_soon(self._withdraw)
        self._offered += 1

    def use_offered(self) -> bool:
        """Whether a place was offered; it is taken now."""
        if not self._offered:
            return False
        self._offered -= 1
        self._reserved -= 1
        return True

    def fail(self, error: MagnetarError) -> None:
        """There will be no room for those who wait."""
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
