"""Turns for slow checks: few at once, and the addresses that wait share them.

The next turn goes to the address with the fewest wrong passwords, and among equals to the one that
has had no turn for the longest time.  So guesses from many addresses do not keep out a user who
comes from another one, and logins from one address wait for each other alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class TooManyWait(Exception):
    """Too many callers wait for a turn: this one may not begin to wait, or was removed."""


class Turns:
    """At most `at_once` turns at a time, for which at most `most_waiting` callers wait.

    Above that the newest caller of the address with the most callers is removed, and gets
    `TooManyWait`.  `failures` gives the number of wrong passwords of an address.
    """

    def __init__(self, at_once: int, most_waiting: int, failures: Callable[[str], int]) -> None:
        self._free = at_once
        self._most_waiting = most_waiting
        self._failures = failures
        # The address that has had no turn for the longest time is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._count = 0

    async def take(self, address: str) -> None:
        """Wait for a turn, which the caller ends by `give_back`.  Raises `TooManyWait`."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        if self._count >= self._most_waiting:
            self._make_room(address)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(turn)
        self._count += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(address, turn)
            elif turn.exception() is None:
                self.give_back()
            raise

    def give_back(self) -> None:
        """End a turn; the next one begins."""
        self._free += 1
        while self._free and self._waiting:
            address = min(self._waiting, key=self._failures)
            turns = self._waiting.pop(address)
            turn = turns.popleft()
            self._count -= 1
            if turns:
                self._waiting[address] = turns
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _make_room(self, address: str) -> None:
        busiest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        own = len(self._waiting.get(address, ()))
        if len(self._waiting[busiest]) <= own + 1:
            raise TooManyWait
        turn = self._waiting[busiest][-1]
        self._remove(busiest, turn)
        if not turn.done():
            turn.set_exception(TooManyWait())

    def _remove(self, address: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(address)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        self._count -= 1
        if not turns:
            del self._waiting[address]
