"""Writes the index files of finished log files, in the background."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from storage.ledger.local.disk import Disk
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.log_files import LogFile, LogFiles
from storage.ledger.local.recovery import write_index

_log = structlog.get_logger(__name__)


class Sealer:
    """Writes the index file of each finished log file, in order, in the background.

    Until then the index stays in memory; failures (a full disk) are tried again.  `on_sealed` runs
    after each file.
    """

    def __init__(
        self, disk: Disk, files: LogFiles, limits: LedgerLimits, on_sealed: Callable[[], None]
    ) -> None:
        self._disk = disk
        self._files = files
        self._limits = limits
        self._on_sealed = on_sealed
        self._waiting: deque[LogFile] = deque()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, file: LogFile) -> None:
        """Seal this file as soon as those before it are."""
        self._waiting.append(file)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        # In order, as recovery needs the file after one without an index file: its header has the
        # durable end of that one.
        while self._waiting:
            if await self._seal(self._waiting[0]):
                self._waiting.popleft()
                self._on_sealed()
                continue
            if not self._closing.is_set():
                await self._pause()
            if self._closing.is_set():
                return
        self._task = None

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._limits.seal_retry_s):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def _seal(self, file: LogFile) -> bool:
        try:
            header = await self._disk.maintain(partial(write_index, self._disk, file))
        except OSError as error:
            _log.warning("ledger_index_not_written", file=file.name, error=str(error))
            return False
        except Exception:  # noqa: BLE001 - else no file would ever be sealed again
            _log.exception("ledger_index_not_written", file=file.name)
            return False
        self._files.seal(file, header)
        return True

    async def close(self) -> None:
        """Write the index files that can be written now; the next start writes the others."""
        self._closing.set()
        if self._task is not None:
            await self._task
