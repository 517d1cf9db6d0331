"""One transaction coordinator: begins transactions and ends them, each with one write.

Rules (T, K, G: `docs/transactions.md`):

- T1: a transaction begins with a create-only put, under a number that no other one has.
- T2: it ends with a put on the version read; after a conflict it is read and decided anew.
- K6: whether a key's transaction has ended is decided on the stored header.
- G2, G8: an open group is changed on the version read; one in memory may be older, and then its
  change conflicts and it is read again.
- G4: only COMMIT_GROUP commits a group.
- G8: a deadline only ends a transaction that still has it on the version that is written.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.histogram import Histogram
from storage.metadata.store import VersionConflict
from txn.counters import EXECUTION_BUCKETS_MS
from txn.deadlines import Deadlines
from txn.errors import (
    InvalidTxnStatus,
    TooManyTransactions,
    TransactionAssertion,
    TransactionNotFound,
)
from txn.group import Group
from txn.header import (
    OPERATOR,
    EndVerdict,
    bounded_timeout_ms,
    decide_end,
    end_header,
    header_of,
    is_owner,
    not_open_error,
    refusal_error,
)
from txn.numbers import NumberBlocks
from txn.owner_shares import OwnerShares
from txn.parts import TransactionParts
from txn.records import Header, KeyEpoch, TxnState
from txn.store import StoredHeader
from txn.transaction_groups import TransactionGroups
from txn.transaction_key import require_key_epoch
from txn.transaction_keys import TransactionKeys


@dataclass(slots=True)
class CoordinatorCounters:
    """Counters of one coordinator since this process began to lead it."""

    created: int = 0
    committed: int = 0
    aborted: int = 0
    timed_out: int = 0
    header_writes: int = 0
    attempts: int = 0
    """The number of attempts begun in groups."""
    groups_committed: int = 0
    groups_aborted: int = 0
    groups_done: int = 0
    """Commits and begins of batches that had been committed before (G6)."""
    open_ms: Histogram = field(default_factory=lambda: Histogram(EXECUTION_BUCKETS_MS))
    """How long committed transactions were open."""


class Coordinator:
    """One transaction coordinator: begins its transactions and ends them, each with one write.

    The open transactions in memory are a cache of headers, with the versions that its own puts
    returned: so an END of one of them needs no read.  For any other transaction the header is read.
    Two coordinators of one number at the same time, as after a lost session, do no harm.

    An END that was begun is finished even if its caller is cancelled.
    """

    numbers_class: ClassVar[type[NumberBlocks]] = NumberBlocks
    keys_class: ClassVar[type[TransactionKeys]] = TransactionKeys
    groups_class: ClassVar[type[TransactionGroups]] = TransactionGroups

    def __init__(
        self,
        coordinator_id: CoordinatorId,
        parts: TransactionParts,
        deadlines: Deadlines,
        *,
        max_open: int,
    ) -> None:
        """`max_open` is the most transactions that may be open; 0: no limit.

        A role may have as many of them as it leaves to others: alone it has half at most.
        """
        self.coordinator_id = coordinator_id
        self.counters = CoordinatorCounters()
        self._parts = parts
        self._store = parts.store
        self._deadlines = deadlines
        self._max_open = max_open
        self._numbers = self.numbers_class(parts.store, coordinator_id)
        self._numbers.prepare()
        self.keys = self.keys_class(self, parts)
        """The transaction keys that hash to it."""
        self.groups = self.groups_class(self, self.keys, parts)
        """The groups of these keys."""
        self._open: dict[TxnId, StoredHeader] = {}
        self._foreign_deadlines: set[TxnId] = set()
        """Open transactions whose deadline was set by another process, so by another clock."""
        self._beginning = 0
        self._shares = OwnerShares()
        """Open transactions, and those being begun, by the roles that began them."""
        # Nobody awaits them: whoever asked may be gone.
        self._end_tasks = BackgroundTasks(expected=(Exception,))
        self._inline_ends = 0
        """The number of ENDs in progress in their callers' tasks."""
        self._inline_ends_done: asyncio.Future[None] | None = None

    async def close(self) -> None:
        """Forget the open transactions at once, and finish the requests in progress."""
        # This process may lead the coordinator again, with another object and its own deadlines.
        for txn in self._open:
            self._deadlines.discard(txn)
        self._open.clear()
        self._shares.clear()
        self._foreign_deadlines.clear()
        self.groups.close()
        await self.keys.close()
        while self._inline_ends:
            if self._inline_ends_done is None:
                self._inline_ends_done = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._inline_ends_done)
        await self._end_tasks.wait()
        await self._numbers.close()

    @property
    def open_count(self) -> int:
        """The number of open transactions that are known here."""
        return len(self._open)

    @property
    def last_number(self) -> int:
        """The last transaction number used here; -1 before the first one."""
        return self._numbers.last

    def find(self, txn: TxnId) -> StoredHeader | None:
        """An open transaction, or attempt of an open group, that is known here (G1)."""
        stored = self._open.get(txn.group)
        if stored is None or not txn.attempt_index:
            return stored
        header = header_of(stored.header, txn)
        return None if header is None else StoredHeader(txn, header, stored.version)

    def open_transactions(self) -> Sequence[StoredHeader]:
        """The open transactions that are known here, in no order."""
        return list(self._open.values())

    def adopt(self, found: Iterable[StoredHeader]) -> None:
        """Add open transactions that were begun before this process led the coordinator."""
        for stored in found:
            if stored.txn not in self._open and stored.header.state is TxnState.OPEN:
                self._track_open(stored)

    async def begin(
        self,
        timeout_ms: int,
        owner: str | None,
        key_epoch: KeyEpoch | None = None,
        group: Group | None = None,
    ) -> TxnId:
        """Begin a transaction, under a key or none, or a group, which has a key.

        `keys` has to check that the key may have another transaction.  Raises
        `TooManyTransactions`, `MetadataError`.
        """
        self._require_capacity(owner)
        self._beginning += 1
        self._shares.add(owner)
        try:
            # T1: the number was reserved, and the put makes a new record.
            number = await self._numbers.take()
            txn = TxnId(self.coordinator_id, number)
            now_ms = self._parts.clock.now_ms()
            header = Header(
                TxnState.OPEN, bounded_timeout_ms(timeout_ms), now_ms, None, owner, key_epoch, group
            )
            try:
                version = await self._store.create_header(txn, header)
            except VersionConflict:
                raise TransactionAssertion(
                    f"Transaction {txn} is there already, though its number was reserved: report "
                    "this as a defect, and begin another one."
                ) from None
            except BaseException:
                # Cancelled, or of unknown outcome: no client has its id, and no list of open
                # transactions would show it.
                self._end_tasks.start(self._abort_uncertain_begin(txn, header))
                raise
        finally:
            self._beginning -= 1
            self._shares.remove(owner)
        self._track_open(StoredHeader(txn, header, version), by_our_clock=True)
        if group is not None:
            self.groups.created(txn, group)
        self.counters.created += 1
        self.counters.header_writes += 1
        return txn

    async def require_open(
        self, txn: TxnId, owner: str | None, key: KeyEpoch | None = None
    ) -> Header:
        """The header of an open transaction or attempt of an owner, under its key, if any (K4).

        A group takes no writes, its attempts do (G1).
        Raises `TransactionNotFound`, `InvalidTxnStatus`, `InvalidTransactionKey`.
        """
        stored = self.find(txn) or await self._store.read_header(txn)
        if stored is None or not is_owner(stored.header, owner):
            raise refusal_error(txn, None, EndVerdict.NOT_FOUND)
        require_key_epoch(txn, stored.header, owner, key)
        if stored.header.state is not TxnState.OPEN:
            raise not_open_error(txn, stored.header)
        if stored.header.group is not None and not txn.attempt_index:
            raise refusal_error(txn, stored.header, EndVerdict.OF_GROUP)
        return stored.header

    async def end_transaction(
        self, txn: TxnId, action: TxnState, owner: str | None, key: KeyEpoch | None = None
    ) -> None:
        """End a transaction as COMMITTED or ABORTED.  The same end again is no error.

        Raises `TransactionNotFound`, `InvalidTxnStatus`, `InvalidTransactionKey`, `MetadataError`.
        """
        await self._end_shielded(txn, action, owner, key)

    async def read_header(self, txn: TxnId) -> StoredHeader | None:
        """Read the stored header, open or ended; None if there is none (K6)."""
        # K6: another leader may have ended a transaction that is open in memory.
        stored = await self._store.read_header(txn)
        if stored is None or stored.header.state is not TxnState.OPEN:
            self._untrack_open(txn)
        return stored

    async def change_header(self, stored: StoredHeader, header: Header) -> StoredHeader:
        """Replace the header of an open group on the version read (G2, G8).

        Raises `VersionConflict`, `MetadataError`.
        """
        # G2, G8: a group that another leader has changed conflicts here.
        version = await self._store.change_header(stored.txn, header, stored.version)
        changed = StoredHeader(stored.txn, header, version)
        self.counters.header_writes += 1
        self._track_open(changed, by_our_clock=header.deadline_ms != stored.header.deadline_ms)
        return changed

    async def commit_group(self, stored: StoredHeader, group: Group) -> None:
        """Commit a group by one write, on the version read (G4).

        Raises `VersionConflict`, `MetadataError`.
        """
        # G4: winners and end are stored together.
        await self._write_end(
            StoredHeader(stored.txn, replace(stored.header, group=group), stored.version),
            TxnState.COMMITTED,
        )

    async def abort(self, txn: TxnId) -> TxnState | None:
        """Abort a transaction unless it has ended; return its end, None if it is gone (K2)."""
        try:
            await self._end_shielded(txn, TxnState.ABORTED, OPERATOR)
        except InvalidTxnStatus:
            return TxnState.COMMITTED
        except TransactionNotFound:
            return None
        return TxnState.ABORTED

    async def abort_open(self, txn: TxnId) -> bool:
        """Abort a transaction if it is open; whether this call aborted it (G6, G7)."""
        try:
            return await self._end_shielded(txn, TxnState.ABORTED, OPERATOR)
        except (InvalidTxnStatus, TransactionNotFound):
            return False

    async def _end_shielded(
        self,
        txn: TxnId,
        action: TxnState,
        owner: str | None,
        key: KeyEpoch | None = None,
        *,
        if_due: bool = False,
    ) -> bool:
        """End a transaction, even if the caller is cancelled; whether this call ended it.

        `if_due`: only if its deadline has come.
        """
        # The caller's task writes: a separate task would cost two turns of the loop between write
        # and answer.  If the caller is cancelled a task ends it again, which is harmless (T2).
        self._inline_ends += 1
        try:
            return await self._end_on_stored_version(txn, action, owner, key, if_due=if_due)
        except asyncio.CancelledError:
            self._end_tasks.start(
                self._end_on_stored_version(txn, action, owner, key, if_due=if_due)
            )
            raise
        finally:
            self._inline_ends -= 1
            if not self._inline_ends and self._inline_ends_done is not None:
                self._inline_ends_done.set_result(None)
                self._inline_ends_done = None

    async def time_out(self, txn: TxnId) -> None:
        """Abort a transaction whose deadline has come, unless it was raised or has ended (G8).

        Raises `MetadataError`.
        """
        try:
            written = await self._end_shielded(txn, TxnState.ABORTED, OPERATOR, if_due=True)
        except (TransactionNotFound, InvalidTxnStatus):
            return
        self.counters.timed_out += written

    async def _abort_uncertain_begin(self, txn: TxnId, header: Header) -> bool:
        """Abort a transaction whose first put has an unknown outcome."""
        # After this put the header is there, whether or not the first one arrived; if that arrives
        # later it fails.
        with suppress(VersionConflict):
            await self._store.create_header(txn, header)
        return await self._end_on_stored_version(txn, TxnState.ABORTED, OPERATOR)

    async def _end_on_stored_version(
        self,
        txn: TxnId,
        action: TxnState,
        owner: str | None,
        key: KeyEpoch | None = None,
        *,
        if_due: bool = False,
    ) -> bool:
        counters, loop = self._parts.counters, asyncio.get_running_loop()
        began_s = loop.time()
        stored = self._open.get(txn)
        while True:
            if stored is None:
                stored = await self._store.read_header(txn)
            header = None if stored is None else stored.header
            verdict = decide_end(header, action, owner, is_attempt=txn.attempt_index > 0)
            if header is not None and verdict is not EndVerdict.NOT_OWNER:
                require_key_epoch(txn, header, owner, key)
            if verdict is EndVerdict.WRITE and stored is not None:
                if if_due and self._due_ms(stored) > self._parts.clock.now_ms():
                    self._track_open(stored)  # G8: the deadline was raised
                    return False
                try:
                    await self._write_end(stored, action)
                except VersionConflict:
                    # T2: read the header and decide anew.
                    counters.header_cas_conflict += 1
                    stored = None
                    continue
                break
            if stored is None or stored.header.state is not TxnState.OPEN:
                self._untrack_open(txn)
            if verdict is EndVerdict.DONE:
                break
            counters.header_cas_reject += 1
            raise refusal_error(txn, header, verdict)
        counters.end.observe(loop.time() - began_s)
        return verdict is EndVerdict.WRITE

    async def _write_end(self, stored: StoredHeader, action: TxnState) -> None:
        """Write the end on the version read (T2).  Raises `VersionConflict`, `MetadataError`."""
        now_ms = self._parts.clock.now_ms()
        await self._store.end_header(
            stored.txn, end_header(stored.header, action, now_ms), stored.version
        )
        self._untrack_open(stored.txn)
        self._parts.counters.header_cas_ok += 1
        self.counters.header_writes += 1
        if stored.header.group is not None:
            self.counters.groups_committed += action is TxnState.COMMITTED
            self.counters.groups_aborted += action is TxnState.ABORTED
        if action is TxnState.COMMITTED:
            self.counters.committed += 1
            self.counters.open_ms.observe(max(0, now_ms - stored.header.created_ms))
        else:
            self.counters.aborted += 1

    def _require_capacity(self, owner: str | None) -> None:
        if not self._max_open:
            return
        # Transactions that are being begun count too.
        in_use = len(self._open) + self._beginning
        if in_use >= self._max_open:
            raise TooManyTransactions(
                f"Coordinator {self.coordinator_id} has {in_use} open transactions, as many as it "
                "may have: end some, or raise transaction_max_open_per_coordinator."
            )
        if self._shares.is_used_up(owner, self._max_open - in_use):
            own = self._shares.count(owner)
            raise TooManyTransactions(
                f"The role of this client has {own} open transactions of coordinator "
                f"{self.coordinator_id}, and must leave as many to others: end some, or raise "
                "transaction_max_open_per_coordinator."
            )

    def _track_open(self, stored: StoredHeader, *, by_our_clock: bool = False) -> None:
        due_ms = stored.header.deadline_ms if by_our_clock else self._due_ms(stored)
        if due_ms == stored.header.deadline_ms:
            self._foreign_deadlines.discard(stored.txn)
        else:
            self._foreign_deadlines.add(stored.txn)
        if stored.txn not in self._open:
            self._shares.add(stored.header.owner)
        self._open[stored.txn] = stored
        self._deadlines.add(stored.txn, due_ms)

    def _due_ms(self, stored: StoredHeader) -> int:
        """The time of this process's clock at which the deadline has surely come."""
        known, deadline_ms = self._open.get(stored.txn), stored.header.deadline_ms
        ours = known is not None and known.header.deadline_ms == deadline_ms
        if ours and stored.txn not in self._foreign_deadlines:
            return deadline_ms
        return deadline_ms + self._parts.clock_slack_ms

    def _untrack_open(self, txn: TxnId) -> None:
        known = self._open.pop(txn, None)
        if known is not None:
            self._shares.remove(known.header.owner)
            self._foreign_deadlines.discard(txn)
            self._deadlines.discard(txn)
            self.groups.forget(txn)
