"""Whether both stores take writes: what the health check of REST asks.

Rules:

- A check writes a record and an entry, and waits until both are durable.  Checks that come while
  one runs share its outcome, so a flood of them costs no more than one after the other.
- The entries are in a ledger of its own that no record names.  It is replaced when it is full, has
  failed, or is so old that it could be taken for an orphan, and deleted with the end of the
  process; one that a crash left is an orphan, which the next start sweeps if the stores are its
  own, and an operator if they are shared.  On bookies its component tells what it is.
"""

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
    """Checks that both stores take writes, by writing to them."""

    def __init__(self, metadata: MetadataStore, ledgers: LedgerStore, clock: Clock) -> None:
        self._metadata = metadata
        self._ledgers = ledgers
        self._clock = clock
        self._ledger: WritableLedger | None = None
        self._entries = 0
        self._made_ms = 0
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when both stores have stored something.  Raises `MetadataError`, `LedgerError`."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
            self._running.add_done_callback(self._ended)
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """Delete the ledger.  Raises `MetadataError`, `LedgerError`."""
        if self._running is not None:
            await asyncio.wait({self._running})
        await self._let_go()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _run(self) -> None:
        await self._metadata.put(HEALTH_KEY, str(self._clock.now_ms()).encode())
        now_ms = self._clock.now_ms()
        if self._entries >= HEALTH_LEDGER_ENTRIES or now_ms - self._made_ms >= LEDGER_NAMING_MS:
            await self._let_go()
        if self._ledger is None:
            custom = {**HEALTH_LEDGER, INSTANCE: await instance_of(self._metadata)}
            self._ledger, self._entries = await self._ledgers.create(custom=custom), 0
            self._made_ms = now_ms
        try:
            await self._write(self._ledger)
        except AppendRefused:  # of a store that is busy: the ledger is as good as before
            raise
        except LedgerError:
            await self._forget_failed()
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

    async def _let_go(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await self._ledgers.delete(ledger.ledger_id)

    async def _forget_failed(self) -> None:
        try:
            await self._let_go()
        except MagnetarError as error:
            log.warning("health_ledger_not_deleted", error=str(error))
