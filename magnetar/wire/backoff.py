"""Pure: how long to wait before something is tried again.

Rules: each pause is twice the one before, up to a limit; luck takes away a part of it, so that
what was lost together does not come back together; a success starts anew.
"""

import random

from magnetar.bounds import RETRY_FIRST_S, RETRY_JITTER, RETRY_LIMIT_S

__all__ = ["Backoff"]


class Backoff:
    """The pauses of one thing."""

    __slots__ = ("_first_s", "_limit_s", "_next_s", "_rng")

    def __init__(
        self, rng: random.Random, *, first_s: float = RETRY_FIRST_S, limit_s: float = RETRY_LIMIT_S
    ) -> None:
        self._rng = rng
        self._first_s = first_s
        self._limit_s = limit_s
        self._next_s = first_s

    def pause_s(self) -> float:
        """The next pause."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._limit_s)
        return pause_s * (1 - RETRY_JITTER * self._rng.random())

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s
