"""A fair share of the event loop for each connection.  Pure.

Two rules account for the cost of what a peer requests:

- The handlers of one connection run for at most `TURN_S` in one turn of the loop.  `Turn` measures
  that once per `TURN_FRAMES` frames of one read; the connection adds up its reads.
- A connection has one costly request in progress, and all connections together have
  `COSTLY_REQUESTS_AT_ONCE`.  `CostlyRequests` starts those that wait round robin by connection, and
  the requests of one connection in the order of their arrival.  A request that is late does not
  count among them, because it waits for a store more than it computes, and a store may hang.
"""

from collections import deque
from collections.abc import Callable, Hashable

from config.bounds import COSTLY_REQUESTS_LATE, TURN_FRAMES, TURN_S

Start = Callable[[], None]


class Turn:
    """The time that one connection's handlers have used in one turn of the loop."""

    __slots__ = ("_began_s", "_now", "next_check")

    def __init__(self, now: Callable[[], float], began_s: float) -> None:
        """Of a turn that began at `began_s` of the clock `now`, in seconds."""
        self._now = now
        self._began_s = began_s
        self.next_check = TURN_FRAMES
        """Index of the frame before which the time is measured next."""

    def is_over(self, at: int) -> bool:
        """Measure the time before the frame with index `at`."""
        self.next_check = at + TURN_FRAMES
        return self._now() - self._began_s >= TURN_S


class CostlyRequests:
    """Starts costly requests: one of each connection, `at_once` of all, round robin.

    A request is the callback that starts it.  `finished` must follow for each that was started.
    As many as `late_at_most` that were reported as late do not count among `at_once`.
    """

    def __init__(self, at_once: int, late_at_most: int = COSTLY_REQUESTS_LATE) -> None:
        self._at_once = at_once
        self._late_at_most = late_at_most
        self._in_progress: set[Hashable] = set()
        self._late: set[Hashable] = set()
        self._waiting: dict[Hashable, deque[Start]] = {}
        self._unwritable: set[Hashable] = set()
        self._ready: dict[Hashable, None] = {}
        """Connections of which a request can start, in the order of their turns."""

    def add(self, connection: Hashable, start: Start) -> None:
        """Start a request now, or when it is this connection's turn."""
        self._waiting.setdefault(connection, deque()).append(start)
        self._take_place(connection)
        self._start_ready()

    def late(self, connection: Hashable) -> None:
        """Note that the request of a connection that is in progress takes long."""
        if connection in self._in_progress:
            self._late.add(connection)
            self._start_ready()

    def finished(self, connection: Hashable) -> None:
        """End the request of a connection that is in progress, and start the next ones."""
        self._in_progress.discard(connection)
        self._late.discard(connection)
        self._take_place(connection)
        self._start_ready()

    def withdraw(self, connection: Hashable, start: Start) -> bool:
        """Remove a request that waits; False if it does not wait (any more)."""
        waiting = self._waiting.get(connection)
        if waiting is None or start not in waiting:
            return False
        waiting.remove(start)
        if not waiting:
            self._drop_waiting(connection)
        return True

    def drop(self, connection: Hashable) -> None:
        """Remove all requests of a connection that wait: it has ended."""
        self._unwritable.discard(connection)
        self._drop_waiting(connection)

    def set_writable(self, connection: Hashable, writable: bool) -> None:
        """Start no request of a connection while its peer reads no answers."""
        if writable:
            self._unwritable.discard(connection)
            self._take_place(connection)
            self._start_ready()
        else:
            self._unwritable.add(connection)
            self._ready.pop(connection, None)

    def waiting(self, connection: Hashable) -> int:
        """The number of a connection's requests that wait."""
        return len(self._waiting.get(connection, ()))

    def _drop_waiting(self, connection: Hashable) -> None:
        self._waiting.pop(connection, None)
        self._ready.pop(connection, None)

    def _take_place(self, connection: Hashable) -> None:
        """Put a connection at the end of the queue of turns, if a request of it can start."""
        if (
            connection in self._waiting
            and connection not in self._in_progress
            and connection not in self._unwritable
        ):
            self._ready.setdefault(connection)

    def _counted(self) -> int:
        """The number of requests in progress, without late ones."""
        return len(self._in_progress) - min(len(self._late), self._late_at_most)

    def _start_ready(self) -> None:
        while self._ready and self._counted() < self._at_once:
            connection = next(iter(self._ready))
            del self._ready[connection]
            waiting = self._waiting[connection]
            start = waiting.popleft()
            if not waiting:
                del self._waiting[connection]
            self._in_progress.add(connection)
            start()
