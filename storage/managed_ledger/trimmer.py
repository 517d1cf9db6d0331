"""Trims a managed ledger: after a roll-over, after acknowledgements, and by time."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

import structlog

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.cursors import Cursors
from storage.managed_ledger.offload import StreamOffload
from storage.managed_ledger.trimming import TrimDecision, decide, hot_to_drop
from storage.managed_ledger.types import NO_RETENTION, ManagedLedgerState, RetentionSource

log = structlog.get_logger(__name__)
_LEAST_PAUSE_MS = 1000
_LONGEST_PAUSE_MS = 24 * 3600 * 1000
_RETRY_MS = 30_000


class Trimmer:
    """Deletes ledgers that no cursor and no retention policy keeps, as `trimming` decides."""

    __slots__ = (
        "_core",
        "_cursors",
        "_hot_pause_until_ms",
        "_offload",
        "_stopped",
        "_task",
        "_timer",
        "_trimmed",
        "retention",
    )

    def __init__(
        self,
        core: StreamCore,
        cursors: Cursors,
        retention: RetentionSource,
        trimmed: Callable[[], None],
        offload: StreamOffload,
    ) -> None:
        self._core = core
        self._cursors = cursors
        self.retention = retention
        self._trimmed = trimmed
        self._offload = offload
        self._hot_pause_until_ms = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def trim_soon(self) -> None:
        """Start a task that trims, if a ledger may go now; else a timer checks again when due."""
        if self._task is not None or not self._running():
            return
        drop, hot = self._decide()
        if drop or hot or self._core.has_garbage:
            self._task = self._core.loop.create_task(self._run())

    async def trim(self) -> None:
        """Drop the ledgers that may go now.

        Raises `MetadataError`, `LedgerError`, `ManagedLedgerFenced`.
        """
        await self._trim(None)

    async def drop_up_to(self, last: Position) -> None:
        """Drop the ended ledgers without entries behind `last` that all cursors have read.

        No policy keeps them.  Raises as `trim`.
        """
        await self._trim(last)

    async def _trim(self, last: Position | None) -> None:
        core = self._core
        async with core.lock:
            if not self._running():
                return
            drop, _ = self._decide()
            if last is not None:
                drop = self._up_to(last)
            if drop:
                await core.save(without=drop)
                self._trimmed()
                self._cursors.refresh_boundaries()
        await core.collect()
        _, hot = self._decide()
        if core.has_garbage and self._running():
            # What could not be deleted, of a stream that may be quiet from now on.
            self._check_in(_RETRY_MS)
        if hot:
            # Deleting takes time and may fail: until this time no other trim attempts it.
            self._hot_pause_until_ms = core.stores.clock.now_ms() + _RETRY_MS
            await self._offload.drop_hot(hot)
            self._hot_pause_until_ms = 0

    async def stop(self) -> None:
        """Trim no more; wait for the task that runs."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await asyncio.wait({self._task})

    def _running(self) -> bool:
        stopped = self._core.state in (ManagedLedgerState.FENCED, ManagedLedgerState.CLOSED)
        return not (stopped or self._stopped)

    def due_ms(self) -> int | None:
        """Wall-clock time at which a ledger may go; None if none may by time alone."""
        now_ms = self._core.stores.clock.now_ms()
        decisions = (self._decision(now_ms), self._hot_decision(now_ms))
        if any(decision.drop for decision in decisions):
            return now_ms
        return _earliest(decisions)

    def _decide(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ledgers to drop from the stream, and offloaded ledgers to delete beside their copy."""
        now_ms = self._core.stores.clock.now_ms()
        decision, hot = self._decision(now_ms), self._hot_decision(now_ms)
        next_ms = _earliest((decision, hot))
        if next_ms is not None:
            self._check_in(next_ms - now_ms)
        return decision.drop, hot.drop

    def _up_to(self, last: Position) -> tuple[int, ...]:
        readers = self._cursors.reader_positions()
        slowest = last if readers.slowest is None else min(readers.slowest, last)
        return decide(
            self._core.ledgers.infos,
            replace(readers, slowest=slowest),
            retention=NO_RETENTION,
            unsubscribed_retention_ms=0,
            now_ms=self._core.stores.clock.now_ms(),
        ).drop

    def _decision(self, now_ms: int) -> TrimDecision:
        return decide(
            self._core.ledgers.infos,
            self._cursors.reader_positions(),
            retention=self.retention(),
            unsubscribed_retention_ms=self._core.stores.limits.unsubscribed_retention_ms,
            now_ms=now_ms,
        )

    def _hot_decision(self, now_ms: int) -> TrimDecision:
        copied = [info for info in self._offload.copied() if info.hot]
        if not copied:
            return TrimDecision((), None)
        lag_ms = self._core.stores.offload_lag_ms(self._core.name)
        decision = hot_to_drop(copied, lag_ms=lag_ms, now_ms=now_ms)
        if decision.drop and now_ms < self._hot_pause_until_ms:
            return TrimDecision((), self._hot_pause_until_ms)
        return decision

    def _check_in(self, pause_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pause_ms = min(max(pause_ms, _LEAST_PAUSE_MS), _LONGEST_PAUSE_MS)
        self._timer = self._core.loop.call_later(pause_ms / 1000, self._due)

    def _due(self) -> None:
        self._timer = None
        self.trim_soon()

    async def _run(self) -> None:
        again = False
        try:
            await self.trim()
            again = not self._core.has_garbage
        except MagnetarError as error:
            log.warning("trim_failed", name=self._core.name, error=str(error))
            if self._running():
                self._check_in(_RETRY_MS)
        finally:
            self._task = None
        if again:
            self.trim_soon()


def _earliest(decisions: Iterable[TrimDecision]) -> int | None:
    """Wall-clock time of the first of their next checks."""
    checks = [each.next_check_ms for each in decisions if each.next_check_ms is not None]
    return min(checks, default=None)
