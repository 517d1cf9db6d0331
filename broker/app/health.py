"""The health check: whether both stores take writes."""

import asyncio

import structlog

from config.bounds import HEALTH_LEDGER_ENTRIES, LEDGER_NAMING_MS
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.ledger.store import AppendRefused, LedgerError, LedgerStore, WritableLedger
from storage.managed_ledger.core import COMPONENT, INSTANCE
from storage.managed_ledger.orphans import HEALTH
from storage.metadata.instance import instance_of
from storage.metadata.store import MetadataStore

log = structlog.get_logger(__name__)

HEALTH_KEY = "/magnetar/health"
HEALTH_LEDGER = {"application": b"magnetar", COMPONENT: HEALTH}


class HealthCheck:
    """Checks that both stores take writes, by writing to them.

    The entries are in a ledger that no record names.  It is deleted at the end of the process.  One
    that a crash left is an orphan: the next start deletes it if the stores are the broker's own, an
    operator if they are shared.  On bookies its component is `HEALTH`.
    """

    def __init__(self, metadata: MetadataStore, ledgers: LedgerStore, clock: Clock) -> None:
        self._metadata = metadata
        self._ledgers = ledgers
        self._clock = clock
        self._ledger: WritableLedger | None = None
        self._entries = 0
        self._created_ms = 0
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Write a record and an entry, and return when both are durable.

        Raises `MetadataError`, `LedgerError`.
        """
        # Checks that come during another one share its outcome, so many of them cost little.
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
            self._running.add_done_callback(self._ended)
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """Delete the ledger.  Raises `MetadataError`, `LedgerError`."""
        if self._running is not None:
            await asyncio.wait({self._running})
        await self._delete_ledger()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # no caller may be left that retrieves it

    async def _run(self) -> None:
        await self._metadata.put(HEALTH_KEY, str(self._clock.now_ms()).encode())
        now_ms = self._clock.now_ms()
        # An older ledger without a record could be taken for an orphan.
        if self._entries >= HEALTH_LEDGER_ENTRIES or now_ms - self._created_ms >= LEDGER_NAMING_MS:
            await self._delete_ledger()
        if self._ledger is None:
            custom = {**HEALTH_LEDGER, INSTANCE: await instance_of(self._metadata)}
            self._ledger, self._entries = await self._ledgers.create(custom=custom), 0
            self._created_ms = now_ms
        try:
            await self._write(self._ledger)
        except AppendRefused:  # The store is busy; the ledger is as good as before.
            raise
        except LedgerError:
            await self._delete_failed_ledger()
            raise
        self._entries += 1

    async def _write(self, ledger: WritableLedger) -> None:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(_entry_id: int, error: LedgerError | None) -> None:
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        ledger.append(b"health", done)
        await written

    async def _delete_ledger(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await self._ledgers.delete(ledger.ledger_id)

    async def _delete_failed_ledger(self) -> None:
        try:
            await self._delete_ledger()
        except MagnetarError as error:
            log.warning("health_ledger_not_deleted", error=str(error))
