"""How participants learn that a transaction ended: one watch on the index of ended headers.

Rules:

- Follow first, read the header second (W7): what ends after `follow` is told, what ended before is
  in the header that is read.
- Followers of an attempt are told of its group's end, with what that means for it (G1).
- A follower is told once for each transaction, from the loop, never from within `follow`.
- What nobody follows costs nothing but a look at its key.
- After a resync, and when a watch broke, every followed header is read again.  One that is gone is
  told as None: the transaction ended and was collected, and the follower must look at its own
  records (W9).
- A header that cannot be read is read again, later each time, for as long as somebody follows;
  others do not wait for it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from config.bounds import TXN_CLEANING_RETRY_MAX_S, TXN_CONCURRENT_ENDS
from protocol.server_error import MagnetarError
from storage.metadata.following import Following
from storage.metadata.store import Event
from storage.supervised import Supervised
from txn import records
from txn.errors import CorruptTransactionRecord
from txn.header import header_of
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
        self._attempts: dict[TxnId, dict[TxnId, None]] = {}
        """Followed attempts, by group."""
        self._following = Following(
            lambda: store.metadata.watch_index(records.FINAL_STATE_INDEX, *_FINAL),
            self._read_all,
            self._take_event,
        )
        self._unread: dict[TxnId, float] = {}
        """To be read, with the pause after a failure."""
        self._wake = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks = Supervised()

    def start(self) -> None:
        """Begin to tell."""
        self._following.watch()
        self._tasks.keep("transaction_ends", self._following.run)
        self._tasks.keep("transaction_headers", self._read_unread)

    async def stop(self) -> None:
        """Tell nothing more."""
        await self._tasks.stop()
        self._following.close()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def follow(self, txn: TxnId, follower: Follower) -> None:
        """Tell `follower` when the transaction has ended."""
        self._followers.setdefault(txn, {})[follower] = None
        if txn.attempt:
            self._attempts.setdefault(txn.group, {})[txn] = None

    def forget(self, txn: TxnId, follower: Follower) -> None:
        """Do not tell it, if it has not been told."""
        followers = self._followers.get(txn)
        if followers is not None:
            followers.pop(follower, None)
            if not followers:
                self._pop(txn)

    @property
    def followed(self) -> int:
        """Transactions that somebody waits for."""
        return len(self._followers)

    async def _read_all(self) -> None:
        self._read_soon(self._followers)

    async def _take_event(self, event: Event) -> None:
        try:
            self._take(event)
        except CorruptTransactionRecord as error:
            log.error("transaction_header_corrupt", error=str(error))

    def _take(self, event: Event) -> None:
        of = records.txn_of_header(event.key)
        followed = self._followed_at(of)
        if not followed:
            return
        if event.record is None:
            self._read_soon(followed)
            return
        try:
            stored = stored_header(event.record).header
        except CorruptTransactionRecord:
            self._read_soon(followed)
            raise
        for txn in followed:
            header = header_of(stored, txn)
            self._tell(txn, None if header is None else header.state)

    def _followed_at(self, of: TxnId) -> Sequence[TxnId]:
        """The transactions that somebody follows of whom this header tells (G1)."""
        own = (of,) if of in self._followers else ()
        return (*own, *self._attempts[of]) if of in self._attempts else own

    def _pop(self, txn: TxnId) -> Mapping[Follower, None]:
        """Its followers, who are to be told nothing more."""
        attempts = self._attempts.get(txn.group) if txn.attempt else None
        if attempts is not None:
            attempts.pop(txn, None)
            if not attempts:
                del self._attempts[txn.group]
        return self._followers.pop(txn, {})

    def _tell(self, txn: TxnId, state: TxnState | None) -> None:
        for follower in self._pop(txn):
            try:
                follower(txn, state)
            except Exception:
                log.exception("transaction_follower_failed", txn=str(txn))

    def _read_soon(self, txns: Iterable[TxnId], pause_s: float = _FIRST_RETRY_S) -> None:
        for txn in txns:
            self._unread.setdefault(txn, pause_s)
        self._wake.set()

    async def _read_unread(self) -> None:
        while True:
            await self._wake.wait()
            page = [*self._unread.items()][:TXN_CONCURRENT_ENDS]
            for txn, _ in page:
                del self._unread[txn]
            if not self._unread:
                self._wake.clear()
            try:
                await asyncio.gather(*(self._read(txn, pause_s) for txn, pause_s in page))
            except BaseException:  # a cancellation of what one waited for, too
                self._read_soon(txn for txn, _ in page)
                raise

    async def _read(self, txn: TxnId, pause_s: float) -> None:
        if txn not in self._followers:
            return
        try:
            stored = await self._store.read_header(txn)
        except MagnetarError as error:
            log.warning(
                "transaction_header_not_read", txn=str(txn), error=str(error), next_try_s=pause_s
            )
            self._read_later(txn, pause_s)
            return
        if stored is None:
            self._tell(txn, None)
        elif stored.header.state is not TxnState.OPEN:
            self._tell(txn, stored.header.state)

    def _read_later(self, txn: TxnId, pause_s: float) -> None:
        def again() -> None:
            self._timers.discard(timer)
            self._read_soon((txn,), min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S))

        timer = asyncio.get_running_loop().call_later(pause_s, again)
        self._timers.add(timer)
