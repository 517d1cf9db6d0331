"""What was handed out of a segment and is not acknowledged yet, for whoever must leave in order.

Rules: what was handed out before the connection was lost comes again, so only what is handed out
since then counts for leaving, but all of it can be acknowledged; acknowledging up to a message
acknowledges every one before it; what is said in a transaction counts when that is answered.
Places are kept, not messages.
"""

import asyncio
from collections import deque

from magnetar.consume.received import Received
from magnetar.message_id import EntryId, place_of

__all__ = ["HandedOut"]


class HandedOut:
    """Of one segment consumer that is not shared."""

    __slots__ = ("_acknowledged", "_before", "_out", "_said", "_waiter")

    def __init__(self) -> None:
        self._out: deque[EntryId] = deque()
        self._acknowledged: set[EntryId] = set()
        """Those of `_out` that were acknowledged one by one, out of order."""
        self._said: set[EntryId] = set()
        """Those of `_out` that were said in a transaction."""
        self._before: dict[EntryId, None] = {}
        """Handed out on earlier attachments, and nothing said of it."""
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._out)

    def add(self, received: "Received[object]") -> None:
        """A message is handed out."""
        message_id = received.entry_id
        self._before.pop(message_id, None)
        self._out.append(message_id)

    def take_back(self, received: "Received[object]") -> None:
        """The last one was not handed out after all."""
        if self._out and self._out[-1] == received.entry_id:
            self._out.pop()
            self._tell()

    def acknowledged(self, message_id: EntryId) -> None:
        """One message is acknowledged."""
        self._before.pop(message_id, None)
        out, done = self._out, self._acknowledged
        if not out:
            return
        done.add(message_id)
        while out and out[0] in done:
            done.discard(out[0])
            self._said.discard(out.popleft())
        self._tell()

    def acknowledged_up_to(self, message_id: EntryId) -> list[EntryId]:
        """A message and all before it are acknowledged; those of them that were not before."""
        out, done = self._out, self._acknowledged
        last = place_of(message_id)
        found = self._take_before(last)
        while out and place_of(out[0]) <= last:
            each = out.popleft()
            self._said.discard(each)
            if each in done:
                done.discard(each)
            else:
                found.append(each)
        self._tell()
        return found

    def said_up_to(self, message_id: EntryId) -> list[EntryId]:
        """As `acknowledged_up_to`, in a transaction; those of which nothing was said before."""
        last = place_of(message_id)
        found = self._take_before(last)
        for each in self._out:
            if place_of(each) > last:
                break
            if each not in self._acknowledged and each not in self._said:
                self._said.add(each)
                found.append(each)
        return found

    def attached(self) -> None:
        """A new attachment: everything comes again."""
        spoken_of = self._acknowledged | self._said
        self._before.update((each, None) for each in self._out if each not in spoken_of)
        self._clear()

    def give_up(self) -> None:
        """Nobody can acknowledge any more."""
        self._before.clear()
        self._clear()

    def _clear(self) -> None:
        self._out.clear()
        self._acknowledged.clear()
        self._said.clear()
        self._tell()

    def _take_before(self, last: tuple[int, int, int]) -> list[EntryId]:
        found = [each for each in self._before if place_of(each) <= last]
        for each in found:
            del self._before[each]
        return found

    async def all_acknowledged(self) -> None:
        """Until nothing is left."""
        while self._out:
            if self._waiter is None or self._waiter.done():
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._waiter,))

    def _tell(self) -> None:
        if not self._out and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
