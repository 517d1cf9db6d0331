"""`Opening[T]`: something that is being opened, to be awaited or entered.

    client = await magnetar.connect(url)             # to be closed by `await client.close()`
    async with magnetar.connect(url) as client: ...  # closes it

Rules: nothing happens before it is awaited or entered; it can be used once; an opening that fails
or is cancelled has closed what it had begun when it returns; leaving the block is the business of
what was opened (`__aexit__`), so a transaction commits or aborts there.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from magnetar.errors import InvalidArgument, MagnetarError

__all__ = ["ClosedAfterwards", "Openable", "Opening", "completed", "finished", "resolve"]

R = TypeVar("R")


class Openable(Protocol):
    """What can be opened."""

    async def open(self) -> None:
        """Make it usable, or raise; called once."""

    async def close(self) -> None:
        """End it, whatever state it is in; bounded in time; may be called again."""

    async def __aenter__(self) -> Self:
        """Gives itself."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What the end of an `async with` block does."""


class ClosedAfterwards(ABC):
    """What `async with` gives as it is, and closes."""

    @abstractmethod
    async def close(self) -> None:
        """As of `Openable`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


T = TypeVar("T", bound=Openable)


async def finished(task: asyncio.Task[R]) -> R:
    """What it gives in the end, or raises; it goes on if the caller is cancelled."""
    await asyncio.wait((task,))
    return task.result()


def resolve(outcome: asyncio.Future[None] | None, error: MagnetarError | None) -> None:
    """Say how something ended, if somebody waits for that and was not told before."""
    if outcome is None or outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


async def completed(work: Coroutine[None, None, R]) -> R:
    """What `work` gives, which goes on to its end even if the caller is cancelled meanwhile.

    The caller's cancellation is raised then.  So `work` must be bounded in time.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        if not task.cancelled():
            task.exception()  # seen: what is raised is the cancellation
        raise cancellation
    return task.result()


class Opening(Generic[T]):
    """Something that is opened when it is awaited, or entered by `async with`."""

    __slots__ = ("_make", "_opened")

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` builds what is then opened; it is called when the opening begins."""
        self._make: Callable[[], T] | None = make
        self._opened: T | None = None

    if not TYPE_CHECKING:  # for who runs no type checker; those that do are told by it

        def __getattr__(self, name: str) -> object:
            raise AttributeError(
                f"{name!r} is not there yet, as this is not open: await it first, or enter it by "
                "`async with ... as`.",
                name=name,
                obj=self,
            )

        def __enter__(self) -> object:
            raise TypeError("This is entered by `async with`; magnetar.sync has what `with` takes.")

        def __exit__(self, *_: object) -> None:
            """Never called: nothing was entered."""

    def __await__(self) -> Generator[None, None, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.__aexit__(kind, error, traceback)

    async def _open(self) -> T:
        make, self._make = self._make, None
        if make is None:
            raise InvalidArgument(
                "This was opened before; ask the client for another one, and await it once."
            )
        opened = make()
        try:
            await opened.open()
        except BaseException:
            await completed(opened.close())
            raise
        return opened
