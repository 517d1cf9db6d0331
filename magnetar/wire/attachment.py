"""What lives on a connection and comes back after its loss.

    OPENING -> ATTACHED <-> WAITING        any state but FAILED -> CLOSED
    OPENING, WAITING -> FAILED

Rules:

- An attempt finds the connection (`find`) and says what is to be said there (`attach`).  What fails
  for now is tried again after a pause that grows; what fails for good (`retriable`) is `failed`.
- The first attempts, all together, have a limit of time; later ones go on until `close`.
- What arrives in the middle of an attempt and undoes it (`again`) makes that attempt fail.
- What an attempt may have made at the broker without an answer is taken back (`leave`) before the
  next attempt, and by `close`.
- No task runs while it is attached.
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
    """Where an attachment is."""

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
    """Whether the same may succeed later."""
    return isinstance(error, BrokerError | ClientError) and error.retriable


class Attachment(ABC):
    """Something that lives on a connection and attaches again after its loss.

    A subclass is its own `Handler`, or names others in `attach`.
    """

    def __init__(self, context: ClientContext, backoff: Backoff | None = None) -> None:
        self.context = context
        self.connection: Connection | None = None
        """While attached."""
        self.state = AttachmentState.NEW
        self.error: MagnetarError | None = None
        """Why it failed, or why the last attempt did."""
        self._backoff = backoff or context.backoff()
        self._touched: Connection | None = None
        self._undone: MagnetarError | None = None
        self._attempts: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._hurried = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    # For its owner

    async def open(self, timeout_s: float | None) -> None:
        """Return when it is attached for the first time.

        Raises why it cannot be: what the broker refuses for good, or `OperationTimedOut` with the
        last reason.  Once this raises, or is cancelled, nothing of it is left.  None: no limit.
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
                "Look whether the brokers are well, or allow more by operation_timeout_s."
            ) from (self.error or error)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._is(_S.FAILED) and self.error is not None:
            raise self.error
        if self._is(_S.CLOSED):
            raise AlreadyClosed(f"{self.describe()} was closed while it was opened.")

    async def close(self) -> None:
        """End the trying, and take leave of the broker; bounded in time, in any state.

        Cancelling it does not stop that.
        """
        if self._closing is None:
            self._closing = self.context.loop.create_task(self._close())
        await completed(finished(self._closing))

    def again(self, error: MagnetarError) -> None:
        """What is attached is of no use any more: anew, after a pause; or never, if the error is
        for good.  Nothing happens when it is closed, or failed, or waits already.
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
        """If it waits before another attempt, do not."""
        self._hurried.set()

    # For the subclass to say

    @abstractmethod
    async def find(self) -> Connection:
        """Where to."""

    @abstractmethod
    async def attach(self, connection: Connection) -> None:
        """What makes it attached; raises.

        What is made at the broker is made last: a refusal means that it has nothing.  What `self`
        is attached to on the connection is detached for it, when this fails and when it ends.
        """

    def attached(self) -> None:  # noqa: B027 - not everybody minds
        """It is attached; before whoever opens it goes on."""

    def detached(self, error: MagnetarError) -> None:  # noqa: B027 - not everybody minds
        """It was attached and is not any more; it will be again."""

    def failed(self, error: MagnetarError) -> None:  # noqa: B027 - not everybody minds
        """It will not be again; `open` raises it too if it never was."""

    async def leave(self, connection: Connection) -> None:  # noqa: B027 - not everybody minds
        """What is said to the broker that may have something of it.  Errors are of no matter."""

    def describe(self) -> str:
        """What it is, as the beginning of a sentence."""
        return type(self).__name__

    def received(self, frame: Frame) -> None:  # noqa: B027 - not everybody minds
        """Handler: what the broker sends it unasked."""

    def connection_lost(self, error: ConnectionLost) -> None:
        """Handler: the connection that it was attached to has gone."""
        self._touched = None
        self.again(error)

    # How it is done

    def _is(self, state: AttachmentState) -> bool:
        return self.state is state

    def _enter(self, state: AttachmentState) -> None:
        self.state = _NEXT.move(self.state, state, "{}", self.describe())

    async def _attempt(self, *, pause: bool) -> None:
        """Try until it is attached or cannot be."""
        while True:
            if pause:
                await self._pause()
            try:
                await self._take_back()
                self._undone = None
                await self._attach()
                return
            except MagnetarError as error:
                self.error = error
                if not is_retriable(error):
                    await self._take_back()
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
                raise ConnectionLost("The connection was lost at once; look into the broker's log.")
        except BrokerError:
            # Answered: the broker has made nothing.
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

    async def _take_back(self) -> None:
        """What the broker may have of an attempt that was not answered, or of before."""
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
        """A defect in `find`, `attach` or `attached` fails it, too."""
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
                f"{self.describe()} failed in a way that nobody expected ({error!r}); report it."
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
        await self._take_back()
