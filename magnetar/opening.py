"""`Opening[T]`: an object that opens when it is awaited or entered.

client = await magnetar.connect(url)             # to be closed by `await client.close()`
async with magnetar.connect(url) as client: ...  # closes it
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
    """An object that can be opened and closed."""

    async def open(self) -> None:
        """Make it usable, or raise; called once."""

    async def close(self) -> None:
        """End it, whatever state it is in; bounded in time; may be called again."""

    async def __aenter__(self) -> Self:
        """Return itself."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the `async with` block: close it, and commit or abort if it is a transaction."""


class ClosedAfterwards(ABC):
    """An object that `async with` returns as it is, and closes at the end of the block."""

    @abstractmethod
    async def close(self) -> None:
        """See `Openable.close`."""

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
    """Wait for the result of a task, which goes on if the caller is cancelled."""
    await asyncio.wait((task,))
    return task.result()


def resolve(outcome: asyncio.Future[None] | None, error: MagnetarError | None) -> None:
    """Set the result or the error of a future, unless it is None or done."""
    if outcome is None or outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


async def completed(work: Coroutine[None, None, R]) -> R:
    """Run `work` to its end and return its result, even if the caller is cancelled meanwhile.

    A cancellation is raised after that.  So `work` must be bounded in time.
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
            task.exception()  # Retrieved, so that asyncio does not report it.
        raise cancellation
    return task.result()


class Opening(Generic[T]):
    """An object that is opened when this is awaited, or entered by `async with`.

    It can be used once, and does nothing before.  If opening fails or is cancelled, the object is
    closed.  The end of a block is left to the object's `__aexit__`.
    """

    __slots__ = ("_make", "_opened")

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` makes the object that is then opened; it is called when the opening begins."""
        self._make: Callable[[], T] | None = make
        self._opened: T | None = None

    if not TYPE_CHECKING:  # For users without a type checker, which would report these mistakes.

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
