"""The ends of transactions, for participants: one watch on the headers that they follow."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from config.bounds import TXN_CLEANING_RETRY_MAX_S, TXN_CONCURRENT_ENDS, TXN_SLICE_ENDS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import Event
from storage.metadata.watch_follower import WatchFollower
from txn import records
from txn.errors import CorruptTransactionRecord
from txn.header import header_of
from txn.records import Header, TxnState
from txn.store import TransactionStore, stored_header

log = structlog.get_logger(__name__)

Follower = Callable[[TxnId, TxnState | None], None]
"""A function that is called with the final state, or with None if the header is gone."""

_HEADERS = records.HEADERS.removesuffix("/")
_FIRST_RETRY_S = 0.1


class Decisions:
    """A watch of headers that calls the followers of a transaction when it has ended.

    Participants follow a transaction first and read its header second (W2, W7): then a later end
    calls the follower, and an earlier one is in the header.  A follower is called once for each
    transaction, from the loop and never from within `follow`.  For an attempt it is called at the
    end of the group, with the attempt's own state (G1).

    A header that nobody follows is never read, so brokers that take no part in a transaction add
    nothing to its cost.
    """

    def __init__(self, store: TransactionStore) -> None:
        self._store = store
        self._followers: dict[TxnId, dict[Follower, None]] = {}
        self._attempts: dict[TxnId, dict[TxnId, None]] = {}
        """Followed attempts, by group."""
        self._following = WatchFollower(
            lambda: store.metadata.watch_children(_HEADERS, wanted=self._is_followed),
            self._read_all,
            self._take_event,
        )
        self._unread: dict[TxnId, Backoff | None] = {}
        """The transactions and groups whose headers are to be read; with pauses after an error."""
        self._stopped = False
        self._wake = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Begin to watch headers and to call followers."""
        self._following.watch()
        self._tasks.keep("transaction_ends", self._following.run)
        self._tasks.keep("transaction_headers", self._read_unread)

    async def stop(self) -> None:
        """Call no follower any more."""
        self._stopped = True
        await self._tasks.stop()
        self._following.close()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def follow(self, txn: TxnId, follower: Follower) -> None:
        """Call `follower` when the transaction has ended."""
        self._followers.setdefault(txn, {})[follower] = None
        if txn.attempt_index:
            self._attempts.setdefault(txn.group, {})[txn] = None

    def forget(self, txn: TxnId, follower: Follower) -> None:
        """Do not call `follower` for this transaction any more."""
        followers = self._followers.get(txn)
        if followers is not None:
            followers.pop(follower, None)
            if not followers:
                self._remove_followers(txn)

    @property
    def followed(self) -> int:
        """The number of transactions that are followed."""
        return len(self._followers)

    async def _read_all(self) -> None:
        self._read_soon(self._followers)

    async def _take_event(self, event: Event) -> None:
        try:
            self._take_header_event(event)
        except CorruptTransactionRecord as error:
            log.error("transaction_header_corrupt", error=str(error))

    def _is_followed(self, key: str) -> bool:
        """Whether the header's transaction, or an attempt of it, is followed."""
        if not self._followers:
            return False
        try:
            of = records.txn_of_header(key)
        except CorruptTransactionRecord:
            return False
        return of in self._followers or of in self._attempts

    def _take_header_event(self, event: Event) -> None:
        of = records.txn_of_header(event.key)
        followed = self._followed_at(of)
        if not followed:
            return
        if event.record is None:
            # The event may be old.  A header that is gone is reported as None: its followers then
            # read their own records (W9).
            self._read_soon(followed)
            return
        try:
            stored = stored_header(event.record).header
        except CorruptTransactionRecord:
            self._read_soon(followed)
            raise
        self._call_followers(followed, stored)

    def _followed_at(self, of: TxnId) -> Sequence[TxnId]:
        """The followed transactions that a header is of: its own, and its attempts (G1)."""
        # G1: attempts have no header of their own.
        own = (of,) if of in self._followers else ()
        return (*own, *self._attempts[of]) if of in self._attempts else own

    def _remove_followers(self, txn: TxnId) -> Mapping[Follower, None]:
        """Remove and return the followers of a transaction."""
        attempts = self._attempts.get(txn.group) if txn.attempt_index else None
        if attempts is not None:
            attempts.pop(txn, None)
            if not attempts:
                del self._attempts[txn.group]
        return self._followers.pop(txn, {})

    def _call_followers(self, txns: Sequence[TxnId], stored: Header | None) -> None:
        """Call the followers of TXN_SLICE_ENDS transactions now, the others in later turns."""
        if self._stopped:
            return
        for txn in txns[:TXN_SLICE_ENDS]:
            header = None if stored is None else header_of(stored, txn)
            if header is None or header.state is not TxnState.OPEN:
                self._call_followers_of(txn, None if header is None else header.state)
        rest = txns[TXN_SLICE_ENDS:]
        if rest:
            asyncio.get_running_loop().call_soon(self._call_followers, rest, stored)

    def _call_followers_of(self, txn: TxnId, state: TxnState | None) -> None:
        for follower in self._remove_followers(txn):
            try:
                follower(txn, state)
            except Exception:
                log.exception("transaction_follower_failed", txn=str(txn))

    def _read_soon(self, txns: Iterable[TxnId], backoff: Backoff | None = None) -> None:
        for txn in txns:
            self._unread.setdefault(txn.group, backoff)
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
                await asyncio.gather(*(self._read(txn, backoff) for txn, backoff in page))
            except BaseException:  # also a cancellation
                self._read_soon(txn for txn, _ in page)
                raise

    async def _read(self, of: TxnId, backoff: Backoff | None) -> None:
        if not self._followed_at(of):
            return
        try:
            stored = await self._store.read_header(of)
        except MagnetarError as error:
            # Read again later, as long as it is followed; other headers do not wait for it.
            backoff = backoff or Backoff(_FIRST_RETRY_S, TXN_CLEANING_RETRY_MAX_S)
            pause_s = backoff.pause_s()
            log.warning(
                "transaction_header_not_read", txn=str(of), error=str(error), next_try_s=pause_s
            )
            self._read_later(of, pause_s, backoff)
            return
        self._call_followers(self._followed_at(of), None if stored is None else stored.header)

    def _read_later(self, txn: TxnId, pause_s: float, backoff: Backoff) -> None:
        def again() -> None:
            self._timers.discard(timer)
            self._read_soon((txn,), backoff)

        timer = asyncio.get_running_loop().call_later(pause_s, again)
        self._timers.add(timer)
