"""Rounds through the transaction keys of the coordinators that this process leads.

Rules:

- A round counts keys, for metrics, deletes idle ones (K7), and ends what an OPEN that was cut short
  left open (K2).  A coordinator that was won has one at once, all have one each interval.
- It rests after each coordinator for as long as that took: it takes half of what it could.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import structlog

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from txn.coordinator import Coordinator

log = structlog.get_logger(__name__)


class LedCoordinators(Protocol):
    """The source of the coordinators that this process leads."""

    def led(self) -> Sequence[Coordinator]:
        """Return the coordinators that this process serves."""
        ...


class TransactionKeyCollector:
    """The periodic rounds that count keys and delete idle ones, for coordinators led here."""

    def __init__(
        self, coordinators: LedCoordinators, *, interval_s: float, retention_s: float
    ) -> None:
        self._coordinators = coordinators
        self._interval_s = interval_s
        self._retention_ms = int(retention_s * 1000)
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Begin with those that are led."""
        self._changed.set()
        self._tasks.keep("transaction_keys_collector", self._run)

    async def stop(self) -> None:
        """Collect nothing more.  May be called again."""
        await self._tasks.stop()

    def look(self) -> None:
        """There may be coordinators that were won."""
        self._changed.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._interval_s
        while True:
            try:
                async with asyncio.timeout_at(next_s):
                    await self._changed.wait()
            except TimeoutError:
                next_s = loop.time() + self._interval_s
                await self.collect()
            else:
                self._changed.clear()
                await self.collect(only_new=True)

    async def collect(self, *, only_new: bool = False) -> None:
        """One round; what fails is logged, and left to the next one."""
        loop = asyncio.get_running_loop()
        for one in self._coordinators.led():
            if only_new and one.keys.tally is not None:
                continue
            began_s = loop.time()
            try:
                await one.keys.collect(self._retention_ms)
            except MagnetarError as error:
                log.warning(
                    "transaction_keys_not_collected",
                    coordinator=one.coordinator_id,
                    error=str(error),
                )
            await asyncio.sleep(loop.time() - began_s)
