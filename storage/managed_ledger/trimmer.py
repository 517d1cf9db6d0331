"""When a managed ledger drops ledgers: after rolling over, after acknowledgements, by time.

Rules:

- `trimming` decides; here it is carried out: out of the list by a conditional write, then
  deleted.
- A look that finds nothing costs no task.  If only time keeps the next ledger, a timer looks again.
- Ledgers of which the copy is enough are deleted after those that go altogether.  If that fails, it
  is tried again after a pause, whatever happens meanwhile.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.cursors import Cursors
from storage.managed_ledger.offload import StreamOffload
from storage.managed_ledger.trimming import TrimDecision, decide, hot_to_drop
from storage.managed_ledger.types import ManagedLedgerState, RetentionSource

log = structlog.get_logger(__name__)
_LEAST_PAUSE_MS = 1000
_LONGEST_PAUSE_MS = 24 * 3600 * 1000
_RETRY_MS = 30_000


class Trimmer:
    """Deletes ledgers that no cursor and no retention policy keeps."""

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

    def soon(self) -> None:
        """Look now; if something may go, a task takes it out."""
        if self._task is not None or not self._running():
            return
        drop, hot = self._decide()
        if drop or hot or self._core.has_garbage:
            self._task = self._core.loop.create_task(self._run())

    async def trim(self) -> None:
        """Take out what may go now.  Raises `MetadataError`, `LedgerError`, and when fenced."""
        core = self._core
        async with core.lock:
            if not self._running():
                return
            drop, _ = self._decide()
            if drop:
                await core.save(without=drop)
                self._trimmed()
        await core.collect()
        _, hot = self._decide()
        if hot:
            self._hot_pause_until_ms = core.stores.clock.now_ms() + _RETRY_MS
            await self._offload.drop_hot(hot)
            self._hot_pause_until_ms = 0

    async def stop(self) -> None:
        """No more looks; waits for the one that runs."""
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
        """When something that is here may go: now, later, or (None) not by time alone."""
        now_ms = self._core.stores.clock.now_ms()
        decisions = (self._decision(now_ms), self._hot_decision(now_ms))
        if any(decision.drop for decision in decisions):
            return now_ms
        return _earliest(decisions)

    def _decide(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ledgers that may go altogether, and those of which the copy is enough."""
        now_ms = self._core.stores.clock.now_ms()
        decision, hot = self._decision(now_ms), self._hot_decision(now_ms)
        next_ms = _earliest((decision, hot))
        if next_ms is not None:
            self._look_in(next_ms - now_ms)
        return decision.drop, hot.drop

    def _decision(self, now_ms: int) -> TrimDecision:
        return decide(
            self._core.ledgers.infos,
            self._cursors.who_reads(),
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

    def _look_in(self, pause_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        pause_ms = min(max(pause_ms, _LEAST_PAUSE_MS), _LONGEST_PAUSE_MS)
        self._timer = self._core.loop.call_later(pause_ms / 1000, self._due)

    def _due(self) -> None:
        self._timer = None
        self.soon()

    async def _run(self) -> None:
        again = False
        try:
            await self.trim()
            again = not self._core.has_garbage
        except MagnetarError as error:
            log.warning("trim_failed", name=self._core.name, error=str(error))
            if self._running():
                self._look_in(_RETRY_MS)
        finally:
            self._task = None
        if again:
            self.soon()


def _earliest(decisions: Iterable[TrimDecision]) -> int | None:
    """When the first of them is to be looked at again."""
    looks = [each.next_look_ms for each in decisions if each.next_look_ms is not None]
    return min(looks, default=None)
