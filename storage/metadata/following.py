"""Following a part of the metadata store: a watch, what it is compared with, and what to do.

Rules:

- The watch is taken first and read second.  After a resync it is read again.
- Whatever goes wrong ends the run; the next one begins with another watch and another read, so that
  nothing that was missed in between stays unknown.  For `BackgroundTasks.keep`.
"""

from collections.abc import Awaitable, Callable

from storage.metadata.store import Event, EventKind, Watch


class Following:
    """Watches a part of the metadata store, and compares it anew after a break."""

    def __init__(
        self,
        watch: Callable[[], Watch],
        read: Callable[[], Awaitable[None]],
        take: Callable[[Event], Awaitable[None]],
    ) -> None:
        """`watch` takes one; `read` reads all; `take` is given upserts and removals."""
        self._take_watch = watch
        self._read = read
        self._take = take
        self._watch: Watch | None = None
        self._begun = False

    def watch(self) -> None:
        """Take the first watch now; the first `run` goes on with it, and does not read."""
        self._watch, self._begun = self._take_watch(), True

    async def begin(self) -> None:
        """`watch`, and the first read, for whoever has to wait for it.  Raises as `read`."""
        self.watch()
        await self._read()

    async def run(self) -> None:
        """Follow until something goes wrong, or the watch ends."""
        try:
            if not self._begun or self._watch is None:
                self._watch = self._take_watch()
                await self._read()
            self._begun = False
            async for event in self._watch:
                if event.kind is EventKind.RESYNC:
                    await self._read()
                else:
                    await self._take(event)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the watch."""
        watch, self._watch, self._begun = self._watch, None, False
        if watch is not None:
            watch.close()
