"""What acknowledging returns: it acts when it is called, whether that is awaited or not.

Rules: what is not awaited warns of nothing and reports nothing; a transaction knows of its
acknowledgements by itself.  Cancelling who waits changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator, Iterable

__all__ = ["AllOf", "awaited_or_not", "begun"]


def awaited_or_not(outcome: "asyncio.Future[None]") -> "asyncio.Future[None]":
    """A future for the caller of what is told to others too."""
    answer = asyncio.shield(outcome)
    answer.add_done_callback(_see)
    return answer


def begun(work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
    """The outcome of what goes on from now on, whether somebody waits for it or not."""
    return awaited_or_not(asyncio.ensure_future(work))


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
