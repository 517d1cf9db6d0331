"""A disk that takes time, fails by seed, and keeps after a crash what a real one might.

The bytes are `SimulatedDisk`'s; here they get virtual time.  A write is in the page cache at once
and durable when its sync has ended; a crash in between leaves any part of it, and a maintenance job
that was under way stops in its middle.
"""

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from storage.ledger.local.disk import AppendDone
from tests.simulation.loop import SimulatedLoop
from tests.unit.storage.ledger.local.simulated_disk import Crash, SimulatedDisk, Survival

T = TypeVar("T")


@dataclass
class DiskFaults:
    """How bad the disk is.  Times in seconds, the rest are probabilities."""

    sync: tuple[float, float] = (0.0003, 0.004)
    stall: float = 0.0
    """That a sync takes up to two seconds."""
    failure: float = 0.0
    """That an append or a sync fails."""


class TimedDisk(SimulatedDisk):
    """See the module's rules."""

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: random.Random,
        faults: DiskFaults,
        files: dict[str, bytes] | None = None,
    ) -> None:
        super().__init__(files)
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self.fail_append = self._fails
        self.fail_sync = self._fails
        self.fenced = False
        """Another host has this disk now: nothing that is written reaches it."""
        self._jobs = asyncio.Lock()
        self._running: Callable[[], object] | None = None
        self._unsynced: dict[str, int] = {}

    def _fails(self) -> OSError | None:
        if self.fenced or (self._faults.failure and self._rng.random() < self._faults.failure):
            return OSError(errno.EIO, "Input/output error")
        return None

    def _sync_s(self) -> float:
        if self._faults.stall and self._rng.random() < self._faults.stall:
            return self._rng.uniform(0.05, 2.0)
        return self._rng.uniform(*self._faults.sync)

    def append(
        self, name: str, buffers: Sequence[bytes], *, create: bool, done: AppendDone
    ) -> None:
        seconds = self._rng.uniform(0, 0.0002)
        self._loop.call_later(seconds, self._write, name, buffers, create, done)

    def _write(self, name: str, buffers: Sequence[bytes], create: bool, done: AppendDone) -> None:
        """Into the page cache now; `_append` would do all of it in one instant."""
        if create:
            self._new(name)
        inode = self.directory[name]
        error = self.fail_append()
        data = b"".join(buffers)
        inode.written += data if error is None else data[: self._rng.randrange(len(data) + 1)]
        self._loop.call_later(self._sync_s(), self._synced, name, len(buffers), create, error, done)

    def _new(self, name: str) -> None:
        assert name not in self.directory, f"{name} is made twice"
        self.write(name, 0, ())

    def _synced(
        self, name: str, count: int, create: bool, error: OSError | None, done: AppendDone
    ) -> None:
        error = error or self.fail_sync()
        if error is None:
            self.sync(name)
            if create:
                self.sync_directory()
            self.appended.append(count)
        done(error)

    async def read(self, job: Callable[[], T]) -> T:
        await asyncio.sleep(self._rng.uniform(0.00005, 0.002))
        return job()

    async def maintain(self, job: Callable[[], T]) -> T:
        async with self._jobs:
            self._running = job
            await asyncio.sleep(self._rng.uniform(0.0001, 0.005))
            self._running = None
            if self.fenced:
                raise OSError(errno.EIO, "Input/output error")
            return job()

    def after_crash(self) -> dict[str, bytes]:
        """What the next start finds."""
        if self._running is not None and self._rng.random() < 0.7:
            self.crash_at = self.steps + self._rng.randrange(1, 12)
            try:
                self._running()
            except (Crash, OSError):
                pass
        how: Survival = self._rng.choice(("torn", "torn", "durable", "written"))
        return self.survivors(how, self._rng)
