"""An attachment that is opened when it is first needed, and awaited by all who need it.

Rules: whoever waits is told when it is attached, and gets the connection; or why it never will be.
Who stops waiting leaves the others undisturbed.  Waiting has no limit of its own.
"""

import asyncio
from abc import ABC

from magnetar.context import ClientContext
from magnetar.errors import AlreadyClosed, MagnetarError
from magnetar.wire.attachment import Attachment, AttachmentState
from magnetar.wire.connection import Connection

__all__ = ["StandingAttachment"]


class StandingAttachment(Attachment, ABC):
    """An attachment that is opened at its first use, and awaited by all who need it."""

    def __init__(self, context: ClientContext) -> None:
        super().__init__(context)
        self._changed: asyncio.Future[None] | None = None
        self._opening: asyncio.Task[None] | None = None

    async def ready(self) -> Connection:
        """The connection, when it is attached.  Raises why it will not be."""
        if self.state is AttachmentState.NEW:
            self._opening = self.context.loop.create_task(self._open())
            await asyncio.sleep(0)  # it has begun
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
        """As `Attachment.close`; whoever waits is told."""
        await super().close()
        self._wake()
        if self._opening is not None:
            await asyncio.wait((self._opening,))

    def attached(self) -> None:
        """Whoever waits goes on."""
        self._wake()

    def failed(self, error: MagnetarError) -> None:
        """Whoever waits is told."""
        self._wake()

    async def _open(self) -> None:
        try:
            await self.open(None)
        except MagnetarError:
            pass  # `ready` tells
        finally:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)
