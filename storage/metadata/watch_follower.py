"""Following a part of the metadata store: a watch, a read of all, then the events."""

from collections.abc import Awaitable, Callable

from storage.metadata.store import Event, EventKind, Watch


class WatchFollower:
    """Watches a part of the metadata store, and reads all of it again after a break.

    Any failure ends `run`; the next one begins with a new watch and a new read, so that no change
    in between is missed.  For `storage.supervised`.
    """

    def __init__(
        self,
        watch: Callable[[], Watch],
        read: Callable[[], Awaitable[None]],
        take: Callable[[Event], Awaitable[None]],
    ) -> None:
        """`watch` opens a watch; `read` reads all; `take` is given upserts and removals."""
        self._take_watch = watch
        self._read = read
        self._take = take
        self._watch: Watch | None = None
        self._begun = False

    def watch(self) -> None:
        """Open the first watch now; the first `run` goes on with it, and does not read."""
        self._watch, self._begun = self._take_watch(), True

    async def begin(self) -> None:
        """Open the first watch and read, for callers that wait for it.  Raises as `read`."""
        self.watch()
        await self._read()

    async def run(self) -> None:
        """Follow until something fails, or the watch ends."""
        try:
            # Watch first, then read: a change in between comes as an event.
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
        """Close the watch."""
        watch, self._watch, self._begun = self._watch, None, False
        if watch is not None:
            watch.close()
