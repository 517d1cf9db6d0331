"""Callbacks that are dropped, and callbacks so many that they are called in slices."""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Generic, TypeVar

from config import bounds

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def ignore(*_: object) -> None:
    """Stand for a callback that is dropped, so that its object is freed at once.

    Objects that call each other stay in memory until a garbage collection.
    """


class SlicedCalls(Generic[K, T]):
    """Calls a function with each of many listeners, LISTENERS_CALLED_AT_ONCE in a turn of the loop.

    The first ones are called at once, and so are all if they are few.
    """

    __slots__ = ("_call", "_calling", "_loop", "_waiting")

    def __init__(self, call: Callable[[T], None]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[K, T] = {}
        """Listeners that are still to be called, in this order."""
        self._calling = False

    def call_all(self, listeners: Mapping[K, T]) -> None:
        """Call each listener once more.

        Those that have not been called since the last time keep their place in front of those that
        have: calls in close succession keep nobody from being called.
        """
        self._waiting.update(listeners)
        if self._waiting and not self._calling:
            self._call_slice()

    def discard(self, key: K) -> None:
        """Do not call this listener."""
        self._waiting.pop(key, None)

    def clear(self) -> None:
        """Call nobody any more, until the next `call_all`."""
        self._waiting.clear()

    def _call_slice(self) -> None:
        waiting = self._waiting
        self._calling = True
        try:
            for key in list(islice(waiting, bounds.LISTENERS_CALLED_AT_ONCE)):
                if key in waiting:  # not discarded by the one before
                    self._call(waiting.pop(key))
        finally:
            # One that raises does not keep the rest.
            self._calling = bool(waiting)
            if waiting:
                self._loop.call_soon(self._call_slice)
