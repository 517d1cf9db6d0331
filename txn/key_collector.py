"""Rounds through the transaction keys of the coordinators that this process leads."""

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
        """The coordinators that this process leads."""
        ...


class TransactionKeyCollector:
    """The periodic rounds through the keys of coordinators led here.

    A round counts keys for metrics, deletes idle ones (K7), and aborts transactions that an
    interrupted OPEN left open (K2).  A coordinator that was just won has one at once; all have one
    every interval.
    """

    def __init__(
        self, coordinators: LedCoordinators, *, interval_s: float, retention_s: float
    ) -> None:
        self._coordinators = coordinators
        self._interval_s = interval_s
        self._retention_ms = int(retention_s * 1000)
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Run rounds from now on, the first at once."""
        self._changed.set()
        self._tasks.keep("transaction_keys_collector", self._run)

    async def stop(self) -> None:
        """Run no more rounds.  May be called again."""
        await self._tasks.stop()

    def notice_change(self) -> None:
        """Have a round for coordinators that were won since the last one."""
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
        """Run one round; a coordinator whose round fails is logged and left to the next one.

        `only_new`: only coordinators that have had no round.
        """
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
            # A pause as long as the work: rounds use at most half of the store's capacity.
            await asyncio.sleep(loop.time() - began_s)
