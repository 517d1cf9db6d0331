"""Acknowledgements in transactions on one durable subscription: the core with records and answers.

Rules (A, W: `docs/transactions.md`):

- A1: messages are held in memory, the record becomes durable, ownership is proven, then the answer.
- A2: a commit is applied to the cursor, the cursor becomes durable, then its records are deleted.
- A3, A4: a load owns the epoch and has the cursor fenced before it scans records; it follows
  transactions before it reads their headers, and all messages of these records are held again.
- A5: a transaction without a header is released, never applied.
- A6: `rescan` deletes records that a stale owner put late, once their transactions have ended.
- A7: `finish_ended` comes before a seek.  Open transactions keep their holds over a seek.
- A8: before an acknowledgement is refused because of a hold, and before a seek, the headers of the
  holders are read, fresh, and their ends are carried out.
- W6: records of later owners are left alone.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, Self

import structlog

from config.bounds import (
    TXN_CLEANING_RETRY_MAX_S,
    TXN_RECORDS_PUT_AT_ONCE,
    TXN_SLICE_POSITIONS,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.types import ManagedLedgerClosed, ManagedLedgerFenced
from txn import records
from txn.ack_records import delete_ended, for_each
from txn.errors import (
    CorruptTransactionRecord,
    HeldByTransactions,
    SegmentOwnershipLost,
    TransactionAssertion,
)
from txn.header import state_for_writes
from txn.parts import TransactionParts
from txn.pending_ack import AckState, PendingAck, WantedAck
from txn.pending_acks_core import Apply, Effect, Forget, Hold, PendingAcksCore, Refuse, Release
from txn.records import AckedPosition, AckRecord, Header, TxnState
from txn.segment_owner import SegmentOwner

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 0.1
_STOPPING = (SegmentOwnershipLost, ManagedLedgerFenced, ManagedLedgerClosed)


class AckListener(Protocol):
    """A subscription's reactions.  All calls come from the loop and must return at once."""

    def held(self, acks: Sequence[PendingAck]) -> None:
        """The acknowledgements are durable: consumers have these messages no longer."""
        ...

    def refused(self, acks: Sequence[PendingAck]) -> None:
        """The acknowledgements failed: the messages stay with their consumers."""
        ...

    def applied(self, acks: Sequence[PendingAck]) -> None:
        """The transaction committed: the messages are acknowledged in the cursor."""
        ...

    def released(self, acks: Sequence[PendingAck]) -> None:
        """The transaction aborted: deliver these messages again, now."""
        ...


class _NoListener:
    """The `AckListener` of a closed subscription."""

    def held(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""

    def refused(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""

    def applied(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""

    def released(self, acks: Sequence[PendingAck]) -> None:
        """See `AckListener`."""


def _always_wanted() -> None:
    """Raise nothing: the acknowledgement is wanted, however long it waits."""


class PendingAcks:
    """The acknowledgements in transactions on one durable subscription.  Create it with `load`.

    When the segment or the cursor was lost it stops: it deletes nothing more and refuses all
    requests.
    """

    core_class: ClassVar[type[PendingAcksCore]] = PendingAcksCore

    def __init__(
        self,
        segment: str,
        subscription: str,
        cursor: Cursor,
        owner: SegmentOwner,
        parts: TransactionParts,
        listener: AckListener,
    ) -> None:
        self.core = self.core_class(cursor)
        """The core, for queries; only this object may call its events."""
        self._segment = segment
        self._subscription = subscription
        self._cursor = cursor
        self._owner = owner
        self._parts = parts
        self._store = parts.store
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._checked: set[TxnId] = set()
        self._holding = BackgroundTasks(
            log,
            failure_event="transactional_ack_failed",
            expected=(MagnetarError,),
            segment=segment,
        )
        self._waiting: dict[TxnId, asyncio.Task[None]] = {}
        """For each transaction, its last acknowledgement that waits for the ends of others."""
        self._writing: dict[TxnId, set[asyncio.Future[None]]] = {}
        """Futures that are done when the records of an acknowledgement are durable, or failed."""
        self._background = BackgroundTasks(
            log, failure_event="pending_acks_failed", segment=segment
        )
        self._cleaner: asyncio.Task[None] | None = None
        self._cleaning = asyncio.Lock()
        self._stopped: MagnetarError | None = None

    @classmethod
    async def load(
        cls,
        segment: str,
        subscription: str,
        cursor: Cursor,
        owner: SegmentOwner,
        parts: TransactionParts,
        listener: AckListener,
    ) -> Self:
        """Load the records of earlier owners, with a cursor that was read after it was fenced (A3).

        Raises `MetadataError`, `CorruptTransactionRecord`, `SegmentOwnershipLost`.
        """
        loaded = cls(segment, subscription, cursor, owner, parts, listener)
        try:
            await loaded._rebuild()
        except BaseException:
            await loaded.close()
            raise
        return loaded

    @property
    def busy(self) -> bool:
        """Whether messages are held, or records are being written or deleted."""
        return bool(self.core.positions or self._holding.busy or self._cleaner)

    # Taking

    def acknowledge(
        self,
        txn: TxnId,
        acks: Sequence[AckedPosition],
        *,
        cumulative: bool = False,
        consumer: str = "",
        require: Callable[[], None] = _always_wanted,
    ) -> asyncio.Task[None]:
        """Hold the messages; the task ends when the records are durable and ownership is proven.

        If other transactions hold them, their headers are read first (A8); after that `require` is
        called again, which raises if the acknowledgement is not wanted any more.  `consumer`: see
        `AckRecord`.  Await the task through `asyncio.shield`.

        Raises `TransactionConflict`, `InvalidTxnStatus`, `TransactionNotFound`,
        `TooManyPendingAcks`; the task raises these too, and `MetadataError`.
        """
        wanted = WantedAck(txn, acks, cumulative, consumer, require)
        # Acknowledgements of one transaction are taken in their order.
        before = self._waiting.get(txn)
        try:
            taken = None if before is not None else self._reserve(wanted)
        except HeldByTransactions:
            taken = None
        if taken is None:
            task = self._holding.start(self._hold_after_reading_headers(wanted, before))
            self._waiting[txn] = task
        else:
            task = self._holding.start(self._hold(txn, taken, self._begin_writing(txn)))
        return task

    async def acknowledge_many(
        self,
        txn: TxnId,
        acks: Sequence[AckedPosition],
        *,
        consumer: str = "",
        require: Callable[[], None] = _always_wanted,
    ) -> asyncio.Task[None]:
        """As `acknowledge`, with TXN_SLICE_POSITIONS messages held in a turn of the loop.

        Returns its task when all messages are held, or the task has failed and none is.  `require`
        is called before each slice.
        """
        wanted = WantedAck(txn, acks, False, consumer, require)
        all_held: asyncio.Future[None] = self._loop.create_future()
        work = self._hold_after_reading_headers(wanted, self._waiting.get(txn), all_held)
        task = self._waiting[txn] = self._holding.start(work)
        await asyncio.wait((task, all_held), return_when=asyncio.FIRST_COMPLETED)
        return task

    def _reserve(self, wanted: WantedAck) -> Sequence[PendingAck]:
        self._require_running()
        wanted.require()
        # Messages that wait for their slice are held by no open transaction.
        self._end_all()
        new = not self.core.has(wanted.txn)
        taken = self.core.reserve(
            wanted.txn, wanted.acks, cumulative=wanted.cumulative, consumer=wanted.consumer
        )
        if new:
            self._parts.decisions.follow(wanted.txn, self.decided)
        return taken

    async def _hold_after_reading_headers(
        self,
        wanted: WantedAck,
        before: asyncio.Task[None] | None,
        all_held: asyncio.Future[None] | None = None,
    ) -> None:
        """Reserve after the holders' headers were read, each once (A8), and hold then.

        `all_held` is done when all messages are reserved.
        """
        task = asyncio.current_task()
        try:
            if before is not None:
                await asyncio.wait((before,))
            asked: set[TxnId] = set()
            while True:
                try:
                    taken, written = await self._reserve_in_slices(wanted)
                    break
                except HeldByTransactions as conflict:
                    # A8: a holder may have ended without this owner's knowledge.
                    unasked = conflict.holders - asked - {wanted.txn}
                    if not unasked:
                        raise
                    asked |= unasked
                await self.learn_ends(unasked)
        finally:
            if self._waiting.get(wanted.txn) is task:
                del self._waiting[wanted.txn]
        if all_held is not None:
            all_held.set_result(None)
        await self._hold(wanted.txn, taken, written)

    async def _reserve_in_slices(
        self, wanted: WantedAck
    ) -> tuple[Sequence[PendingAck], asyncio.Future[None]]:
        """Reserve all messages or none (L5), one slice in each turn of the loop."""
        written = self._begin_writing(wanted.txn)
        taken: list[PendingAck] = []
        try:
            for first in range(0, len(wanted.acks), TXN_SLICE_POSITIONS):
                if first:
                    await asyncio.sleep(0)
                part = wanted.acks[first : first + TXN_SLICE_POSITIONS]
                taken += self._reserve(replace(wanted, acks=part))
        except BaseException:
            await self._let_go(taken)
            # Before this one waits for others, which may wait for it.
            self._end_writing(wanted.txn, written)
            raise
        return taken, written

    async def _let_go(self, taken: Sequence[PendingAck]) -> None:
        """Hold messages no longer whose acknowledgement failed, one record's in each turn."""
        for number, ack in enumerate(taken):
            if number:
                await asyncio.sleep(0)
            self._carry_out(self.core.failed((ack,)))

    def _begin_writing(self, txn: TxnId) -> asyncio.Future[None]:
        """Register a write, in the turn of its reservation: `learn_ends` waits for it."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._writing.setdefault(txn, set()).add(written)
        return written

    def _end_writing(self, txn: TxnId, written: asyncio.Future[None]) -> None:
        written.set_result(None)
        self._writing[txn].discard(written)
        if not self._writing[txn]:
            del self._writing[txn]

    async def _hold(
        self, txn: TxnId, taken: Sequence[PendingAck], written: asyncio.Future[None]
    ) -> None:
        try:
            await self._make_durable(txn, taken)
        except BaseException as error:
            if isinstance(error, _STOPPING):
                self._stop(error)
            await self._let_go(taken)
            raise
        else:
            for number, ack in enumerate(taken):
                if number:
                    await asyncio.sleep(0)
                # Consumers lose the messages first, and get them again if the transaction has
                # aborted.  An end that comes between two records finds those before held.
                self._carry_out(self.core.confirmed((ack,)))
                self._carry_out(self.core.end_late((ack,)))
        finally:
            self._end_writing(txn, written)
        if taken[-1].state is AckState.RELEASED:
            self.core.require_not_ended(txn)

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        """Put the records, and then prove ownership (A1)."""
        epoch = await self._owner.take()
        for ack in taken:
            record = AckRecord(
                txn,
                self._segment,
                self._subscription,
                epoch,
                self._owner.next_number(),
                ack.cumulative,
                ack.acks,
                ack.consumer,
            )
            self.core.putting(ack, record)
        await for_each(taken, self._put_one, at_once=TXN_RECORDS_PUT_AT_ONCE)
        self.core.stored(taken)
        self._check_header(txn)
        # A1: so no later owner has loaded without these records.
        await self._owner.confirm()

    async def _put_one(self, ack: PendingAck) -> None:
        if ack.record is not None:
            await self._store.put_ack(ack.record)

    # Ends

    def decided(self, txn: TxnId, outcome: TxnState | None) -> None:
        """The transaction has ended; None: its header is gone."""
        if self._stopped is None:
            was_ending = self.core.ending
            self._carry_out(self.core.decided(txn, outcome))
            if self.core.ending and not was_ending:
                # Two turns later, so that the answer to the END goes out first.
                self._loop.call_soon(self._loop.call_soon, self._end_some)

    def _end_some(self) -> None:
        """Carry out one slice, and the next one in a later turn of the loop."""
        if self._stopped is None and self.core.ending:
            try:
                self._carry_out(self.core.end_some())
            finally:
                self._loop.call_soon(self._end_some)

    def _end_all(self) -> None:
        """Carry out all slices of the ends that are known, for callers that need whole ends."""
        while self.core.ending:
            self._carry_out(self.core.end_some())

    async def carry_out_end(self, txn: TxnId, end: TxnState) -> None:
        """Carry out the end of a transaction whole; returns when none of its messages is held.

        The header must have it already.
        """
        self.decided(txn, end)
        while self._stopped is None and self.core.ending:
            self._carry_out(self.core.end_some())
            await asyncio.sleep(0)
        # An acknowledgement that is still being written takes the end when that is done.
        written = list(self._writes_of(txn))
        if written:
            await asyncio.wait(written)

    async def learn_ends(self, txns: Collection[TxnId]) -> set[TxnId]:
        """Read transactions' headers and carry out their ends (A8); return those still open.

        Raises `MetadataError`, `CorruptTransactionRecord`.
        """
        if not txns:
            return set()
        # A8: fresh, so that every end that a client knows of is read.
        async for txn, header in self._store.read_headers(sorted(txns), fresh=True):
            self._take_header(txn, header)
        self._require_running()
        self._end_all()
        still_open = {txn for txn in txns if self.core.is_open(txn)}
        # Acknowledgements of an ended transaction that are being written hold until that is done.
        written = [each for txn in txns if txn not in still_open for each in self._writes_of(txn)]
        if written:
            await asyncio.wait(written)
        return still_open

    async def _learn_all_ends(self) -> None:
        """As `learn_ends` for all open transactions; one with a corrupt header stays open."""
        txns = list(self.core.open_transactions)
        try:
            await self.learn_ends(txns)
        except CorruptTransactionRecord:
            for txn in txns:
                try:
                    await self.learn_ends((txn,))
                except CorruptTransactionRecord as error:
                    log.error("transaction_header_corrupt", error=str(error))

    def _writes_of(self, txn: TxnId) -> Iterable[asyncio.Future[None]]:
        return self._writing.get(txn, ())

    def _check_header(self, txn: TxnId) -> None:
        """Read the header of a transaction, once."""
        # A5: it may have ended before it was followed, and then the watch does not tell.
        if txn not in self._checked:
            self._checked.add(txn)
            self._background.start(self._read_until_known(txn))

    async def _read_until_known(self, txn: TxnId) -> None:
        backoff = Backoff(_FIRST_RETRY_S, TXN_CLEANING_RETRY_MAX_S)
        while self.core.has(txn):
            try:
                await self._read_header(txn)
            except MagnetarError as error:
                log.warning("transaction_header_not_read", txn=str(txn), error=str(error))
                await asyncio.sleep(backoff.pause_s())
            else:
                return

    async def _read_header(self, txn: TxnId) -> None:
        stored = await self._store.read_header(txn)
        self._take_header(txn, None if stored is None else stored.header)

    def _take_header(self, txn: TxnId, header: Header | None) -> None:
        state = None if header is None else state_for_writes(header, txn)
        if state is TxnState.OPEN:
            self.core.opened(txn)
        else:
            self.decided(txn, state)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Hold(acks):
                    self._call_listener(self._listener.held, acks)
                case Apply(acks):
                    self._apply(acks)
                case Release(acks):
                    self._call_listener(self._listener.released, acks)
                case Refuse(acks):
                    self._call_listener(self._listener.refused, acks)
                case Forget(txn):
                    self._checked.discard(txn)
                    self._parts.decisions.forget(txn, self.decided)
        if self._cleaner is None and self._stopped is None and self.core.to_clean:
            self._cleaner = self._background.start(self._clean())

    def _call_listener(
        self, method: Callable[[Sequence[PendingAck]], None], acks: Sequence[PendingAck]
    ) -> None:
        try:
            method(acks)
        except Exception:
            # An error of the listener must not keep later effects from the cursor.
            log.exception(
                "ack_listener_failed", segment=self._segment, subscription=self._subscription
            )

    def _apply(self, acks: Sequence[PendingAck]) -> None:
        try:
            self._acknowledge(acks)
        except BaseException:
            # A2: the cursor may lack some of them, so their records must stay for the next owner.
            self._stop(
                TransactionAssertion(
                    f"A commit could not be applied on {self._segment}: report this as a defect."
                )
            )
            raise
        self._call_listener(self._listener.applied, acks)

    def _acknowledge(self, acks: Sequence[PendingAck]) -> None:
        cursor = self._cursor
        for ack in acks:
            for position, ack_set, batch_size in (
                (each.position, each.ack_set, each.batch_size) for each in ack.acks
            ):
                if ack.cumulative:
                    cursor.acknowledge_up_to(position, ack_set)
                elif ack_set:
                    cursor.acknowledge_batch(position, ack_set, batch_size)
                else:
                    cursor.acknowledge(position)

    # Cleaning

    async def _clean(self) -> None:
        backoff = Backoff(_FIRST_RETRY_S, TXN_CLEANING_RETRY_MAX_S)
        try:
            while self._stopped is None and self.core.to_clean:
                try:
                    await self._clean_once()
                    backoff.reset()
                except _STOPPING as error:
                    self._stop(error)
                except MagnetarError as error:
                    pause_s = backoff.pause_s()
                    log.warning(
                        "pending_acks_not_cleaned",
                        segment=self._segment,
                        subscription=self._subscription,
                        error=str(error),
                        next_try_s=pause_s,
                    )
                    await asyncio.sleep(pause_s)
        finally:
            self._cleaner = None

    async def _clean_once(self) -> None:
        async with self._cleaning:
            self._require_running()
            await self._finish_applying()
            await self._delete(self.core.deletable)

    async def _finish_applying(self) -> None:
        """Make the cursor durable, before records of what it has are deleted (A2)."""
        applying = self.core.applying
        if applying:
            await self._cursor.persist()
            # A2: `durable` makes their records deletable.
            self.core.durable(applying)

    async def _delete(self, acks: Sequence[PendingAck]) -> None:
        await for_each(acks, self._delete_one, at_once=TXN_SLICE_POSITIONS)

    async def _delete_one(self, ack: PendingAck) -> None:
        if ack.record is not None:
            await self._store.delete_operation(ack.txn, records.ack_key(ack.record))
        self._carry_out(self.core.deleted(ack))

    async def finish_ended(self) -> None:
        """Return when no acknowledgement is left of transactions that have ended by now (A7, A8).

        Raises `MetadataError` and the errors of the cursor; then the cursor may not be reset.
        """
        await self._learn_all_ends()
        # A7: a crash would apply these commits again, over the position of the seek.
        while self.core.finishing:
            self._require_running()
            self._end_all()
            if self.core.to_clean:
                await self._clean_once()
            elif self._holding.busy:
                await asyncio.wait(self._holding.running, return_when=asyncio.FIRST_COMPLETED)
            else:
                raise TransactionAssertion(
                    f"Acknowledgements of an ended transaction are stuck on {self._segment}: "
                    "report this as a defect."
                )

    # Loading, and records of stale owners

    async def _rebuild(self) -> None:
        """Scan records, and then read headers (A3); the records hold their messages again (A4).

        The epoch was taken before, and the cursor fenced and read.
        """
        for record in await self._scan():
            # A3: followed before the headers are read, so that no end falls between.
            if not self.core.has(record.txn):
                self._parts.decisions.follow(record.txn, self.decided)
            self._checked.add(record.txn)
            # A4: from here on the messages are held.
            self.core.load(record)
        txns = list(self.core.open_transactions)
        async for txn, header in self._store.read_headers(txns):
            self._take_header(txn, header)

    async def _scan(self) -> list[AckRecord]:
        """The records of this owner and earlier ones (W6)."""
        found = await self._store.acks_on(self._segment, self._subscription)
        # W6: later ones are a successor's.  Without an epoch this is the only owner there can be.
        epoch = self._owner.epoch
        return [record for record in found if not epoch or record.epoch <= epoch]

    async def rescan(self) -> None:
        """Delete unknown records of ended transactions (A6).

        Raises `MetadataError`, `CorruptTransactionRecord`, and the error that stopped it, if any.
        """
        self._require_running()
        # A6: a record that is not known here was never answered.
        strays = [record for record in await self._scan() if not self.core.knows(record)]
        await delete_ended(self._store, strays)

    # The end of this instance

    async def close(self) -> None:
        """Take no more acknowledgements; returns when no record is being written."""
        self._stop(
            SegmentOwnershipLost(f"{self._segment} is being closed here: connect again to find it.")
        )
        for txn in self.core.transactions:
            self._parts.decisions.forget(txn, self.decided)
        self._background.cancel()
        waiting = self._background.running | self._holding.running
        if waiting:
            await asyncio.wait(waiting)
        # The listener has these acknowledgements: a circle would wait for a garbage collection.
        self._listener = _NoListener()

    def _stop(self, error: MagnetarError) -> None:
        if self._stopped is None:
            self._stopped = error

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
