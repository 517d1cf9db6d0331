"""What acknowledging returns: it acts when it is called, whether that is awaited or not.

Rules: what is not awaited warns of nothing and reports nothing; a transaction knows of its
acknowledgements by itself.  Cancelling who waits changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Generator, Iterable

__all__ = ["AllOf", "awaited_or_not"]


def awaited_or_not(outcome: "asyncio.Future[None]") -> "asyncio.Future[None]":
    """A future for the caller of what is told to others too."""
    answer = asyncio.shield(outcome)
    answer.add_done_callback(_see)
    return answer


def _see(answer: "asyncio.Future[None]") -> None:
    if not answer.cancelled():
        answer.exception()


class AllOf:
    """Awaiting it ends when all are over, and raises the first error."""

    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: Iterable[Awaitable[None]]) -> None:
        self._outcomes = tuple(outcomes)

    def __await__(self) -> Generator[object, None, None]:
        return self._over().__await__()

    async def _over(self) -> None:
        for outcome in await asyncio.gather(*self._outcomes, return_exceptions=True):
            if outcome is not None:
                raise outcome
