"""`LazyAttachment`: an attachment that is opened when it is first needed."""

import asyncio
from abc import ABC

from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, MagnetarError
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection

__all__ = ["LazyAttachment"]


class LazyAttachment(Attachment, ABC):
    """An attachment that is opened at its first use, for which any number of tasks can wait."""

    def __init__(self, context: ClientContext) -> None:
        super().__init__(context)
        self._changed: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[None] | None = None

    async def ready(self) -> Connection:
        """Wait until it is attached; returns the connection.  Has no timeout of its own.

        Raises the error if it fails, and `AlreadyClosed`.
        """
        if self.state is AttachmentState.NEW:
            self._opening = self.context.loop.create_task(self._open())
            await asyncio.sleep(0)  # Lets the task begin, so that the state changes.
        while self.connection is None:
            if self.state is AttachmentState.FAILED and self.error is not None:
                raise self.error
            if self.state is AttachmentState.CLOSED:
                raise AlreadyClosed(f"{self.describe()} is closed; connect anew.")
            if self._changed is None:
                self._changed = self.context.loop.create_future()
            await asyncio.wait((self._changed,))
        return self.connection

    async def close(self) -> None:
        """Close it, and fail all waiting tasks."""
        await super().close()
        self._wake()
        if self._opening is not None:
            await asyncio.wait((self._opening,))

    def attached(self) -> None:
        """Wake all waiting tasks."""
        self._wake()

    def failed(self, error: MagnetarError) -> None:
        """Wake all waiting tasks, which raise the error."""
        self._wake()

    async def _open(self) -> None:
        try:
            await self.open(None)
        except MagnetarError:
            pass  # `ready` raises it.
        finally:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
