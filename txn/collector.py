"""Deletion of the headers of ended transactions that no record names any more.

Rules (T, W, K: `docs/transactions.md`):

- W10: a header is deleted when a fresh listing, made after the end, shows no claim and no
  acknowledgement record of its transaction; on the version read.
- W11: where records are left, the owners of their segments are asked to clean up, and the header
  waits for the next round.
- T3: headers are kept for the retention, which is longer than clients repeat an END.
- K8: before that the end of a key's last transaction is noted in the key.
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
"""Has the owner of a segment clean up records of ended transactions; False if it is not here."""


class Collector:
    """The periodic deletion of headers of ended transactions, for the coordinators led here.

    A round reads all headers that are due, in pages, and pauses after each page for as long as the
    page took, so that it uses at most half of the store's capacity.  A round that takes longer than
    an interval is followed by the next at once.
    """

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
        """Run a round every interval, the first after one interval."""
        self._tasks.keep("transaction_collector", self._run)

    async def stop(self) -> None:
        """Run no more rounds.  May be called again."""
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
        """Run one round; return how many headers were deleted.  Raises `MetadataError`."""
        loop = asyncio.get_running_loop()
        self._left = {}  # an earlier round may have failed half-way
        # T3: later ones stay, as their clients may repeat the END.
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
        """Delete the headers of a page that may go; return how many (W10)."""
        mine = [stored for stored in page if self._leads(stored.txn.coordinator)]
        # W10: listed after all of them have ended.  One listing serves the page while few records
        # are stored; else each header has its own.
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
        """Delete a header if no record is left; whether it was deleted (W10, K8).

        `listed`: its transaction may have records.
        """
        try:
            found = await self._store.operations_of(stored.txn) if listed else ()
            if not found:
                if stored.header.key_epoch is not None:
                    # K8: nobody knows the end once the header is gone.
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
        """Have the owner of each segment with records left clean up, here or elsewhere (W11)."""
        left, self._left = self._left, {}
        slots = asyncio.Semaphore(TXN_TOPIC_LOADS)

        async def ask(segment: str, found: Sequence[Claim | AckRecord]) -> None:
            async with slots:
                try:
                    # W11: once in a round for each segment.
                    if not await self._records_left(segment, found):
                        await self._store.request_cleanup(segment, self._parts.clock.now_ms())
                except MagnetarError as error:
                    log.warning("transaction_records_left", segment=segment, error=str(error))

        await asyncio.gather(*(ask(segment, found) for segment, found in left.items()))
