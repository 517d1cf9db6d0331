"""How participants learn that a transaction ended: one watch on the index of ended headers.

Rules:

- Follow first, read the header second (W7): what ends after `follow` is told, what ended before is
  in the header that is read.
- A follower is told once for each transaction, from the loop, never from within `follow`.
- After a resync every followed header is read again.  A header that is gone is told as None: the
  transaction ended and was collected, and the follower must look at its own records (W9).
- A read that fails is tried again, later each time, for as long as somebody follows.
"""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from config.bounds import TXN_CLEANING_RETRY_MAX_S, TXN_PAGE
from storage.metadata.store import EventKind, MetadataError
from txn import records
from txn.errors import CorruptTransactionRecord
from txn.records import TxnState
from txn.store import TransactionStore, stored_header
from txn.txn_id import TxnId

log = structlog.get_logger(__name__)

Follower = Callable[[TxnId, TxnState | None], None]
"""Called with the final state, or None when the header is gone."""

_FINAL = ("A", "D")
"""Bounds of all final states in their index: ABORTED and COMMITTED."""
_FIRST_RETRY_S = 0.1


class Decisions:
    """See the module's rules."""

    def __init__(self, store: TransactionStore) -> None:
        self._store = store
        self._followers: dict[TxnId, dict[Follower, None]] = {}
        self._watch = store.metadata.watch_index(records.FINAL_STATE_INDEX, *_FINAL)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Tell nothing more."""
        self._watch.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def follow(self, txn: TxnId, follower: Follower) -> None:
        """Tell `follower` when the transaction has ended."""
        self._followers.setdefault(txn, {})[follower] = None

    def forget(self, txn: TxnId, follower: Follower) -> None:
        """Do not tell it, if it has not been told."""
        followers = self._followers.get(txn)
        if followers is not None:
            followers.pop(follower, None)
            if not followers:
                del self._followers[txn]

    @property
    def followed(self) -> int:
        """Transactions that somebody waits for."""
        return len(self._followers)

    async def _run(self) -> None:
        async for event in self._watch:
            if event.kind is EventKind.RESYNC:
                await self._read_again(list(self._followers))
            elif event.record is not None:
                try:
                    stored = stored_header(event.record)
                except CorruptTransactionRecord as error:
                    log.error("transaction_header_corrupt", error=str(error))
                    continue
                self._tell(stored.txn, stored.header.state)
            else:
                await self._read_again([records.txn_of_header(event.key)])

    def _tell(self, txn: TxnId, state: TxnState | None) -> None:
        for follower in self._followers.pop(txn, {}):
            follower(txn, state)

    async def _read_again(self, txns: Iterable[TxnId]) -> None:
        """Read headers until each was read or nobody follows it any more."""
        waiting = [txn for txn in txns if txn in self._followers]
        pause_s = _FIRST_RETRY_S
        while waiting:
            page, waiting = waiting[:TXN_PAGE], waiting[TXN_PAGE:]
            try:
                for txn in list(page):
                    stored = await self._store.read_header(txn)
                    page.remove(txn)
                    if stored is None:
                        self._tell(txn, None)
                    elif stored.header.state is not TxnState.OPEN:
                        self._tell(txn, stored.header.state)
            except (MetadataError, CorruptTransactionRecord) as error:
                log.warning("transaction_header_not_read", error=str(error), next_try_s=pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S)
                waiting = [txn for txn in [*page, *waiting] if txn in self._followers]
