"""Deletes the headers of ended transactions, once nothing is left that they speak for.

Rules:

- A header goes when its transaction ended longer ago than the retention, and a fresh listing made
  after that shows no claim and no acknowledgement record of it (W10).  It is deleted on the version
  that was read.  Retention exceeds the time for which clients send an END again (T3).
- The key of its transaction, if it has one, tells the end of its last one by then (K8).
- While few records are stored, one listing of them all speaks for a page of headers; otherwise each
  header has its own.
- If records are left, whoever owns their segments is asked to look at them (W11), once in a round
  for each segment, and the header waits for the next round.
- A round goes through all headers that are due, in pages, a bounded number at once, and rests after
  each page for as long as the page took: it takes half of what it could.  Rounds begin evenly, one
  interval apart; one that takes longer is followed by the next at once.
- Every process collects what the coordinators that it leads began.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from config.bounds import TXN_PAGE, TXN_TOPIC_LOADS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.store import VersionConflict
from txn.key_store import TransactionKeyStore
from txn.parts import TransactionParts
from txn.records import AckRecord, Claim, TxnState
from txn.store import StoredHeader

log = structlog.get_logger(__name__)

RecordsLeft = Callable[[str, Sequence[Claim | AckRecord]], Awaitable[bool]]
"""Has the owner of a segment look at records of ended transactions; False if it is not here."""


class Collector:
    """The periodic deletion of headers of ended transactions, for the coordinators led here."""

    def __init__(
        self,
        parts: TransactionParts,
        leads: Callable[[CoordinatorId], bool],
        records_left: RecordsLeft,
        *,
        interval_s: float,
        retention_s: float,
    ) -> None:
        self._parts = parts
        self._store = parts.store
        self._leads = leads
        self._records_left = records_left
        self._interval_s = interval_s
        self._retention_ms = int(retention_s * 1000)
        self._left: dict[str, list[Claim | AckRecord]] = {}
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Begin with a round after one interval."""
        self._tasks.keep("transaction_collector", self._run)

    async def stop(self) -> None:
        """Collect nothing more.  May be called again."""
        await self._tasks.stop()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time() + self._interval_s
        while True:
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            next_s = max(next_s + self._interval_s, loop.time())
            try:
                collected = await self.collect()
            except MagnetarError as error:
                log.warning("transaction_collection_failed", error=str(error))
            else:
                log.debug("transactions_collected", headers=collected)

    async def collect(self) -> int:
        """One round; how many headers were deleted.  Raises `MetadataError`."""
        loop = asyncio.get_running_loop()
        self._left = {}  # what a round that broke off has found is found again
        up_to_ms = self._parts.clock.now_ms() - self._retention_ms
        collected = 0
        for state in (TxnState.COMMITTED, TxnState.ABORTED):
            began_s = loop.time()
            async for page in self._store.ended_headers(state, up_to_ms):
                collected += await self._collect_page(page)
                await asyncio.sleep(loop.time() - began_s)
                began_s = loop.time()
        await self._ask_owners()
        await self._store.recount()
        return collected

    async def _collect_page(self, page: Sequence[StoredHeader]) -> int:
        """How many of them were deleted; all of them ended before this listing (W10)."""
        mine = [stored for stored in page if self._leads(stored.txn.coordinator)]
        with_records = await self._store.transactions_with_records(TXN_PAGE) if mine else None
        return sum(
            await asyncio.gather(
                *(
                    self._collect_one(
                        stored, listed=with_records is None or stored.txn in with_records
                    )
                    for stored in mine
                )
            )
        )

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        """Whether its header is gone by this (W10, K8); `listed`: it may have records."""
        try:
            found = await self._store.operations_of(stored.txn) if listed else ()
            if not found:
                if stored.header.key_epoch is not None:
                    keys = TransactionKeyStore(self._store.metadata, stored.txn.coordinator)
                    await keys.note_end(stored.txn, stored.header)
                return await self._store.delete_header(stored)
        except VersionConflict:
            return False
        except MagnetarError as error:
            log.warning("transaction_not_collected", txn=str(stored.txn), error=str(error))
            return False
        for record in found:
            self._left.setdefault(record.segment, []).append(record)
        return False

    async def _ask_owners(self) -> None:
        """W11: for each segment with records left."""
        left, self._left = self._left, {}
        room = asyncio.Semaphore(TXN_TOPIC_LOADS)

        async def ask(segment: str, found: Sequence[Claim | AckRecord]) -> None:
            async with room:
                try:
                    if not await self._records_left(segment, found):
                        await self._store.request_cleanup(segment, self._parts.clock.now_ms())
                except MagnetarError as error:
                    log.warning("transaction_records_left", segment=segment, error=str(error))

        await asyncio.gather(*(ask(segment, found) for segment, found in left.items()))
