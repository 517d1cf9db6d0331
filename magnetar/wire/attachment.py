"""`Attachment`: an object that lives on a connection, and attaches again after its loss.

OPENING -> ATTACHED <-> WAITING        any state -> CLOSED
OPENING, WAITING -> FAILED
"""

import asyncio
import enum
from abc import ABC, abstractmethod
from typing import Final

from magnetar.bounds import LEAVE_S
from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    BrokerError,
    ClientError,
    ConnectionLost,
    MagnetarError,
    OperationTimedOut,
)
from magnetar.opening import completed, finished
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.frames import Frame
from magnetar.protocol.server_error import InternalError
from magnetar.protocol.state_table import StateTable
from magnetar.wire.connection import Connection

__all__ = ["Attachment", "AttachmentState", "is_retriable"]


class AttachmentState(enum.Enum):
    """The state of an attachment."""

    NEW = "new"
    OPENING = "opening"
    ATTACHED = "attached"
    WAITING = "waiting"
    FAILED = "failed"
    CLOSED = "closed"


_S: Final = AttachmentState
_NEXT: Final[StateTable[AttachmentState]] = StateTable(
    {
        _S.NEW: frozenset({_S.OPENING, _S.CLOSED}),
        _S.OPENING: frozenset({_S.ATTACHED, _S.FAILED, _S.CLOSED}),
        _S.ATTACHED: frozenset({_S.WAITING, _S.CLOSED}),
        _S.WAITING: frozenset({_S.ATTACHED, _S.FAILED, _S.CLOSED}),
        _S.FAILED: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    },
    defect=InternalError,
)


def is_retriable(error: MagnetarError) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, BrokerError | ClientError) and error.retriable


class Attachment(ABC):
    """An object that lives on a connection, and attaches again after its loss.

    An attempt finds the connection (`find`) and attaches there (`attach`).  A retriable error is
    followed by another attempt after a pause, which grows; any other error fails the attachment.
    The attempts of `open` share its timeout; later ones go on until `close`.  An attempt that the
    broker may have carried out without an answer is undone by `leave` before the next one.  No task
    runs while it is attached.

    A subclass is its own `Handler`, or names others in `attach`.
    """

    def __init__(self, context: ClientContext, backoff: Backoff | None = None) -> None:
        self.context = context
        self.connection: Connection | None = None
        """The connection while it is attached, else None."""
        self.state = AttachmentState.NEW
        self.error: MagnetarError | None = None
        """The error with which it failed, or that of the last attempt."""
        self._backoff = backoff or context.backoff()
        self._touched: Connection | None = None
        self._undone: MagnetarError | None = None
        self._attempts: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._hurried = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    # For its owner

    async def open(self, timeout_s: float | None) -> None:
        """Attach for the first time; waits until this has succeeded.  None is no timeout.

        Raises an error that is not retriable, or `OperationTimedOut` with the last error.  When it
        raises or is cancelled, it is closed.
        """
        if self.state is not _S.NEW:
            raise AlreadyClosed("This has been opened before; ask the client for another one.")
        self._enter(_S.OPENING)
        self._attempts = self.context.loop.create_task(self._attempt(pause=False))
        self._attempts.add_done_callback(self._attempts_ended)
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError as error:
            reason = f"; the last try failed: {self.error}" if self.error else ""
            await self.close()
            raise OperationTimedOut(
                f"{self.describe()} could not be opened within {timeout_s} s{reason} "
                "Check whether the brokers are well, or raise operation_timeout_s."
            ) from (self.error or error)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._is(_S.FAILED) and self.error is not None:
            raise self.error
        if self._is(_S.CLOSED):
            raise AlreadyClosed(f"{self.describe()} was closed while it was opened.")

    async def close(self) -> None:
        """Stop all attempts, and leave the broker; bounded in time, in any state.

        Cancelling it does not stop that.
        """
        if self._closing is None:
            self._closing = self.context.loop.create_task(self._close())
        await completed(finished(self._closing))

    def again(self, error: MagnetarError) -> None:
        """Attach again after a pause, or fail if the error is not retriable.

        An attempt that is under way fails with this error.  Does nothing if it is closed or failed.
        """
        if self.state is _S.ATTACHED:
            connection, self.connection = self.connection, None
            self._enter(_S.WAITING)
            self.error = error
            if connection is not None:
                connection.detach_all(self)
            if not is_retriable(error):
                self._fail(error)
                return
            self._attempts = self.context.loop.create_task(self._attempt(pause=True))
            self._attempts.add_done_callback(self._attempts_ended)
            self.detached(error)
        elif self.state in (_S.OPENING, _S.WAITING):
            self._undone = error

    def hurry(self) -> None:
        """Begin the next attempt now, if it waits before one."""
        self._hurried.set()

    # For subclasses

    @abstractmethod
    async def find(self) -> Connection:
        """Find the connection to attach to."""

    @abstractmethod
    async def attach(self, connection: Connection) -> None:
        """Attach on a connection.  Raises an error if that fails.

        The request to the broker must come last: a refusal then means that the broker has nothing.
        The handlers of `self` on the connection are detached if this fails, and at the end.
        """

    def attached(self) -> None:  # noqa: B027 - optional
        """Called when it is attached, before `open` returns."""

    def detached(self, error: MagnetarError) -> None:  # noqa: B027 - optional
        """Called when it is no longer attached, and will attach again."""

    def failed(self, error: MagnetarError) -> None:  # noqa: B027 - optional
        """Called when it fails for good; `open` raises the error too if it never was attached."""

    async def leave(self, connection: Connection) -> None:  # noqa: B027 - optional
        """Undo the attachment at the broker, which may have it.  Errors are ignored."""

    def describe(self) -> str:
        """The name used in errors, as the beginning of a sentence."""
        return type(self).__name__

    def received(self, frame: Frame) -> None:  # noqa: B027 - optional
        """Handle a command that the broker sends unasked."""

    def connection_lost(self, error: ConnectionLost) -> None:
        """Attach again, as the connection is lost."""
        self._touched = None
        self.again(error)

    # Attempts

    def _is(self, state: AttachmentState) -> bool:
        return self.state is state

    def _enter(self, state: AttachmentState) -> None:
        self.state = _NEXT.move(self.state, state, "{}", self.describe())

    async def _attempt(self, *, pause: bool) -> None:
        """Try until it is attached or fails."""
        while True:
            if pause:
                await self._pause()
            try:
                await self._leave_touched()
                self._undone = None
                await self._attach()
                return
            except MagnetarError as error:
                self.error = error
                if not is_retriable(error):
                    await self._leave_touched()
                    self._fail(error)
                    return
            pause = True

    async def _pause(self) -> None:
        self._hurried.clear()
        try:
            async with asyncio.timeout(self._backoff.pause_s()):
                await self._hurried.wait()
        except TimeoutError:
            pass

    async def _attach(self) -> None:
        connection = await self.find()
        self._touched = connection
        try:
            await self.attach(connection)
            if self._undone is not None:
                raise self._undone
            if connection.is_lost:
                raise ConnectionLost("The connection was lost at once; read the broker's log.")
        except BrokerError:
            # The broker refused it, so there is nothing to undo.
            if self._undone is None:
                self._touched = None
            connection.detach_all(self)
            raise
        except ClientError:
            connection.detach_all(self)
            raise
        self.error = None
        self.connection = connection
        self._backoff.reset()
        self._enter(_S.ATTACHED)
        self.attached()
        self._settled.set()

    async def _leave_touched(self) -> None:
        """Leave the broker of the last attempt or attachment, if it may still have it."""
        connection, self._touched = self._touched, None
        if connection is None:
            return
        try:
            if not connection.is_lost:
                async with asyncio.timeout(LEAVE_S):
                    await self.leave(connection)
        except (MagnetarError, TimeoutError):
            pass
        finally:
            connection.detach_all(self)

    def _fail(self, error: MagnetarError) -> None:
        self.error = error
        self._enter(_S.FAILED)
        self.failed(error)
        self._settled.set()

    def _attempts_ended(self, task: asyncio.Task[None]) -> None:
        """Fail it if the task ended with a defect in `find`, `attach` or `attached`."""
        if task is not self._attempts or task.cancelled():
            return
        error = task.exception()
        if error is not None and self.state in (_S.OPENING, _S.ATTACHED, _S.WAITING):
            if self.state is _S.ATTACHED:
                connection, self.connection = self.connection, None
                self._enter(_S.WAITING)
                if connection is not None:
                    connection.detach_all(self)
            failure = InternalError(
                f"{self.describe()} failed with an unexpected error ({error!r}); report this as a "
                "bug."
            )
            failure.__cause__ = error
            self._fail(failure)

    async def _close(self) -> None:
        if self.state is not _S.CLOSED:
            self._enter(_S.CLOSED)
        self.connection = None
        self._settled.set()
        if self._attempts is not None:
            self._attempts.cancel()
            await asyncio.wait((self._attempts,))
            # Its frames have this: a circle would wait for a garbage collection.
            self._attempts = None
        await self._leave_touched()
