"""Checks files with certificates, keys and passwords for changes, and has changed ones loaded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import structlog

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import OperatorError
from security.errors import InvalidSecret

log = structlog.get_logger(__name__)


class Reloadable(Protocol):
    """A part that is loaded from files."""

    @property
    def part(self) -> str:
        """Its name, for logs and metrics."""
        ...

    def reload(self) -> bool:
        """Load the files if they have changed since they were loaded; return whether they had.

        Called in a thread.  Raises `OperatorError` or `InvalidSecret`: then the part goes on with
        what it had.
        """
        ...


class Reloader:
    """Has the parts look for changes at an interval, and when `check_soon` is called.

    A file that cannot be used leaves in use what was loaded before it.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._parts: list[Reloadable] = []
        self._failures: dict[str, int] = {}
        self._unusable: set[str] = set()
        """Parts whose files could not be loaded at the last check."""
        self._due = asyncio.Event()
        self._tasks = BackgroundTasks(log)

    @property
    def parts(self) -> Sequence[Reloadable]:
        """The parts, in the order in which they were added."""
        return self._parts

    @property
    def failures(self) -> Mapping[str, int]:
        """How often each part could not be loaded, since the start."""
        return self._failures

    def add(self, part: Reloadable) -> None:
        """Check a part too."""
        self._parts.append(part)
        self._failures[part.part] = 0

    def start(self) -> None:
        """Begin to check; nothing happens without parts."""
        if self._parts:
            self._tasks.keep("security_reload", self._run)

    async def stop(self) -> None:
        """Check no more."""
        await self._tasks.stop()

    def check_soon(self) -> None:
        """Check now instead of at the end of the interval."""
        self._due.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            await self.check()

    async def check(self) -> None:
        """Load what has changed.  Failures are counted and logged, and so is their end."""
        for each in self._parts:
            try:
                changed = await asyncio.to_thread(each.reload)
            except (OperatorError, InvalidSecret) as error:
                self._failures[each.part] += 1
                self._unusable.add(each.part)
                log.error("security_files_unusable", part=each.part, error=str(error))
            else:
                if changed:
                    log.info("security_files_loaded", part=each.part)
                elif each.part in self._unusable:
                    log.info("security_files_usable_again", part=each.part)
                self._unusable.discard(each.part)
