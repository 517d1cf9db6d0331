"""`Backoff`: pauses that double, up to a limit.  Pure."""

from collections.abc import Callable


class Backoff:
    """The pauses of one series of attempts: each is twice the one before, up to a limit.

    `luck` returns a factor for each pause, so that attempts that failed together do not come back
    together.  It does not change later pauses.
    """

    __slots__ = ("_first_s", "_limit_s", "_luck", "_next_s")

    def __init__(
        self, first_s: float, limit_s: float, luck: Callable[[], float] | None = None
    ) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._luck = luck
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause, in seconds; the one after it is twice as long."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._limit_s)
        return pause_s if self._luck is None else pause_s * self._luck()

    def reset(self) -> None:
        """Begin with the first pause again, after a success."""
        self._next_s = self._first_s
