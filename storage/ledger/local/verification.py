"""Reads all sealed log files through once: in the background after a start, or before it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from functools import partial

import structlog

from storage.ledger.local.codec import RECORD_HEADER_BYTES, LogFormatError
from storage.ledger.local.disk import Disk
from storage.ledger.local.entry_reader import rebuild_index
from storage.ledger.local.inspection import is_readable
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.log_files import LogFile, LogFiles
from storage.ledger.local.recovery import write_index

_log = structlog.get_logger(__name__)

LostEntry = tuple[int, int]
"""Ledger id, entry id."""


class Verifier:
    """Verifies every record of the ledgers that lived at the start, newest file first.

    `on_lost` is called on the loop with each entry that does not verify.  The file's index is then
    written again with the mark of a damaged file, so the next start verifies it before it serves.
    """

    def __init__(
        self,
        disk: Disk,
        files: LogFiles,
        limits: LedgerLimits,
        on_lost: Callable[[int, int], None],
    ) -> None:
        self._disk = disk
        self._files = files
        self._step_bytes = limits.verify_step_bytes
        self._bytes_per_s = limits.verify_bytes_per_s
        self._log_s = limits.verify_log_s
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    def start(self, living: AbstractSet[int]) -> None:
        """Start in the background, paced; `living` are the ids of the ledgers to verify."""
        files = self._whole_files()
        if files:
            self._task = asyncio.get_running_loop().create_task(self._run(files, living))

    async def run(self, living: AbstractSet[int]) -> None:
        """Verify everything now, as fast as the disk reads, and log how much and how fast.

        Raises `OSError`, `LogFormatError`.
        """
        files = self._whole_files()
        progress = _Progress(sum(file.end for file in files), self._log_s)
        for file in files:
            await self._verify(file, living, progress)
        progress.log_end()

    def _whole_files(self) -> list[LogFile]:
        files = sorted(self._files.sealed, key=lambda file: file.number, reverse=True)
        return [file for file in files if not file.damaged]

    async def close(self) -> None:
        """Stop.  The next start begins anew."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, files: list[LogFile], living: AbstractSet[int]) -> None:
        for file in files:
            try:
                await self._verify(file, living)
            except FileNotFoundError:
                continue  # It was reclaimed meanwhile.
            except (OSError, LogFormatError) as error:
                _log.warning("ledger_log_not_verified", file=file.name, error=str(error))
            except Exception:  # noqa: BLE001 - else the other files would not be verified
                _log.exception("ledger_log_not_verified", file=file.name)

    async def _verify(
        self, file: LogFile, living: AbstractSet[int], progress: "_Progress | None" = None
    ) -> None:
        """Verify one file; without `progress` paced."""
        steps = self._steps(file, living)
        any_lost = False
        while (step := await self._disk.read(partial(next, steps, None))) is not None:
            size, lost = step
            for ledger_id, entry_id in lost:
                self._on_lost(ledger_id, entry_id)
            any_lost |= bool(lost)
            if progress is None:
                await asyncio.sleep(size / self._bytes_per_s)
            else:
                progress.add(size)
        if any_lost:
            try:
                await self._disk.maintain(partial(self._mark, file))
            except OSError as error:
                # A full disk, perhaps: the next start finds the loss by verification again.
                _log.warning("ledger_log_not_marked", file=file.name, error=str(error))

    def _steps(
        self, file: LogFile, living: AbstractSet[int]
    ) -> Iterator[tuple[int, list[LostEntry]]]:
        """Job side: bytes verified, and the entries among them that are lost."""
        data = self._disk.map(file.name)
        size, lost = 0, list[LostEntry]()
        for run in file.index(self._disk).runs():
            if run.ledger_id not in living:
                continue
            for entry_id in range(run.first, run.last + 1):
                place = run.place(entry_id)
                if not is_readable(self._disk, file, data, run.ledger_id, entry_id, place):
                    lost.append((run.ledger_id, entry_id))
                size += RECORD_HEADER_BYTES + place.size
                if size >= self._step_bytes:
                    yield size, lost
                    size, lost = 0, []
        yield size, lost

    def _mark(self, file: LogFile) -> None:
        """Job side: write the index again, with the mark of a damaged file."""
        rebuild_index(self._disk, file)
        file.damaged = True
        replaces = () if file.header is None else file.header.replaces
        write_index(self._disk, file, replaces)


class _Progress:
    """Logs what a start waits for: at its begin, every few seconds, and at its end."""

    def __init__(self, total_bytes: int, log_s: float) -> None:
        self._log_s = log_s
        self._begun_s = self._logged_s = time.monotonic()
        self._bytes = 0
        _log.info(
            "ledger_logs_being_verified",
            bytes=total_bytes,
            reason='damaged_data is "refuse_start": every entry is read before the start',
        )

    def add(self, size: int) -> None:
        """Count verified bytes."""
        self._bytes += size
        now_s = time.monotonic()
        if now_s - self._logged_s >= self._log_s:
            self._logged_s = now_s
            self._log("ledger_logs_verified_so_far", now_s)

    def log_end(self) -> None:
        """Log the sums."""
        self._log("ledger_logs_verified", time.monotonic())

    def _log(self, event: str, now_s: float) -> None:
        taken_s = now_s - self._begun_s
        _log.info(
            event,
            bytes=self._bytes,
            seconds=round(taken_s, 1),
            bytes_per_s=round(self._bytes / max(taken_s, 1e-3)),
        )
