"""Acknowledgements in transactions on one durable subscription: the core with records and answers.

Rules:

- A1: messages are held in memory, the record becomes durable, ownership is proven, then the answer.
- A2: a commit is applied to the cursor, the cursor becomes durable, then those records go.
- A3, A4: a load owns the epoch and has the cursor fenced before it scans; it follows before it
  reads headers, and brings every pending position back.
- A5: what has no header is released, never applied.  A header is read once for each transaction
  here, after its first record is durable: the watch may have told its end before anybody followed.
- A6: `rescan` deletes what a stale owner put late, once its transaction has ended.
- A large end is carried out in slices, each in a turn of the loop of its own; what asks for
  messages in between (an acknowledgement in a transaction, a seek) has it finished first.
- A7: `finish_ended` comes before a seek.  What open transactions hold they keep over a seek.
- Who lost the segment or the cursor stops: it deletes nothing and refuses everything.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import ClassVar, Protocol, Self

import structlog

from config.bounds import TXN_CLEANING_RETRY_MAX_S, TXN_SLICE_POSITIONS
from protocol.server_error import MagnetarError
from storage.cursor import Cursor
from storage.managed_ledger_types import ManagedLedgerClosed, ManagedLedgerFenced
from txn import records
from txn.ack_records import all_of, delete_ended, for_each
from txn.errors import SegmentOwnershipLost, TransactionAssertion
from txn.header import state_for_use
from txn.parts import TransactionParts
from txn.pending_ack import AckState, PendingAck
from txn.pending_acks_core import Apply, Effect, Forget, Hold, PendingAcksCore, Refuse, Release
from txn.records import AckedPosition, AckRecord, TxnState
from txn.segment_owner import SegmentOwner
from txn.txn_id import TxnId

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 0.1
_STOPPING = (SegmentOwnershipLost, ManagedLedgerFenced, ManagedLedgerClosed)


class AckListener(Protocol):
    """What the subscription does about it.  All calls come from the loop and return at once."""

    def held(self, acks: Sequence[PendingAck]) -> None:
        """Answered: consumers are relieved of these messages."""
        ...

    def refused(self, acks: Sequence[PendingAck]) -> None:
        """Failed: the messages stay with whoever has them, and may be delivered."""
        ...

    def applied(self, acks: Sequence[PendingAck]) -> None:
        """Committed: the cursor has these messages."""
        ...

    def released(self, acks: Sequence[PendingAck]) -> None:
        """Aborted: deliver these messages again, now."""
        ...


class PendingAcks:
    """See the module's rules.  Made by `load`."""

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
        """To ask; its events belong to this shell."""
        self._segment = segment
        self._subscription = subscription
        self._cursor = cursor
        self._owner = owner
        self._parts = parts
        self._store = parts.store
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._checked: set[TxnId] = set()
        self._holding: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()
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
        """What earlier owners left, with a cursor that was read after it was fenced (A3).

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
        """Whether anything is held, being written or to be cleaned."""
        return bool(self.core.positions or self._holding or self._cleaner)

    # Taking

    def acknowledge(
        self, txn: TxnId, acks: Sequence[AckedPosition], *, cumulative: bool = False
    ) -> asyncio.Task[None]:
        """Hold the messages at once; the task ends when they are held for good.

        Await it through `asyncio.shield`.  Raises `TransactionConflict`, `InvalidTxnStatus`,
        `TransactionNotFound`, `TooManyPendingAcks`; the task too, and what the store raises.
        """
        self._require_running()
        self._end_all()
        new = not self.core.has(txn)
        taken = self.core.reserve(txn, acks, cumulative=cumulative)
        if new:
            self._parts.decisions.follow(txn, self.decided)
        task = asyncio.get_running_loop().create_task(self._hold(txn, taken))
        self._holding.add(task)
        task.add_done_callback(self._hold_ended)
        return task

    async def _hold(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        try:
            await self._make_durable(txn, taken)
        except BaseException as error:
            if isinstance(error, _STOPPING):
                self._stop(error)
            self._do(self.core.failed(taken))
            raise
        self._do(self.core.confirmed(taken))
        if taken[0].state is AckState.RELEASED:
            self.core.require_not_ended(txn)

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        """A1: records durable, then proof that no other owner can have loaded without them."""
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
            )
            self.core.putting(ack, record)
        await all_of(self._store.put_ack(ack.record) for ack in taken if ack.record is not None)
        self.core.stored(taken)
        self._check_header(txn)
        await self._owner.confirm()

    def _hold_ended(self, task: asyncio.Task[None]) -> None:
        self._holding.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, MagnetarError):
            log.error("transactional_ack_failed", segment=self._segment, exc_info=error)

    # Ends

    def decided(self, txn: TxnId, outcome: TxnState | None) -> None:
        """The transaction has ended; None: its header is gone."""
        if self._stopped is None:
            was_ending = self.core.ending
            self._do(self.core.decided(txn, outcome))
            if self.core.ending and not was_ending:
                # A turn later, for the same commit is being answered to who asked for it.
                self._loop.call_soon(self._loop.call_soon, self._end_some)

    def _end_some(self) -> None:
        """One slice, then everybody else's turn."""
        if self._stopped is None and self.core.ending:
            try:
                self._do(self.core.end_some())
            finally:
                self._loop.call_soon(self._end_some)

    def _end_all(self) -> None:
        """For those who must find the ends that were told as wholes."""
        while self.core.ending:
            self._do(self.core.end_some())

    def _check_header(self, txn: TxnId) -> None:
        """Read the header once: it may have ended before it was followed."""
        if txn not in self._checked:
            self._checked.add(txn)
            self._start(self._read_until_known(txn))

    async def _read_until_known(self, txn: TxnId) -> None:
        pause_s = _FIRST_RETRY_S
        while self.core.has(txn):
            try:
                await self._read_header(txn)
            except MagnetarError as error:
                log.warning("transaction_header_not_read", txn=str(txn), error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S)
            else:
                return

    async def _read_header(self, txn: TxnId) -> None:
        stored = await self._store.read_header(txn)
        state = None if stored is None else state_for_use(stored.header, txn)
        if state is TxnState.OPEN:
            self.core.opened(txn)
        else:
            self.decided(txn, state)

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Hold(acks):
                    self._listener.held(acks)
                case Apply(acks):
                    self._apply(acks)
                case Release(acks):
                    self._listener.released(acks)
                case Refuse(acks):
                    self._listener.refused(acks)
                case Forget(txn):
                    self._checked.discard(txn)
                    self._parts.decisions.forget(txn, self.decided)
        if self._cleaner is None and self._stopped is None and self.core.to_clean:
            self._cleaner = self._start(self._clean())

    def _apply(self, acks: Sequence[PendingAck]) -> None:
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
        self._listener.applied(acks)

    # Cleaning

    async def _clean(self) -> None:
        pause_s = _FIRST_RETRY_S
        try:
            while self._stopped is None and self.core.to_clean:
                try:
                    await self._clean_once()
                    pause_s = _FIRST_RETRY_S
                except _STOPPING as error:
                    self._stop(error)
                except MagnetarError as error:
                    log.warning(
                        "pending_acks_not_cleaned",
                        segment=self._segment,
                        subscription=self._subscription,
                        error=str(error),
                        next_try_s=pause_s,
                    )
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S)
        finally:
            self._cleaner = None

    async def _clean_once(self) -> None:
        async with self._cleaning:
            self._require_running()
            await self._finish_applying()
            await self._delete(self.core.deletable)

    async def _finish_applying(self) -> None:
        """A2: the cursor is durable before any record of what it has taken over goes."""
        applying = self.core.applying
        if applying:
            await self._cursor.persist()
            self.core.durable(applying)

    async def _delete(self, acks: Sequence[PendingAck]) -> None:
        await for_each(acks, self._delete_one, at_once=TXN_SLICE_POSITIONS)

    async def _delete_one(self, ack: PendingAck) -> None:
        if ack.record is not None:
            await self._store.delete_operation(ack.txn, records.ack_key(ack.record))
        self._do(self.core.deleted(ack))

    async def finish_ended(self) -> None:
        """Return when nothing is left of the transactions that are known to have ended (A7).

        Raises what the store and the cursor raise; then nothing may be reset.
        """
        while self.core.finishing:
            self._require_running()
            self._end_all()
            if self.core.to_clean:
                await self._clean_once()
            elif self._holding:
                await asyncio.wait(self._holding, return_when=asyncio.FIRST_COMPLETED)
            else:
                raise TransactionAssertion(
                    f"Acknowledgements of an ended transaction are stuck on {self._segment}: "
                    "report this as a defect."
                )

    # Loading, and what others left

    async def _rebuild(self) -> None:
        """A3: (before this: the epoch; the cursor, fenced and read;) records, then headers.

        A4: what is found holds its messages again.
        """
        for record in await self._scan():
            if not self.core.has(record.txn):
                self._parts.decisions.follow(record.txn, self.decided)
            self._checked.add(record.txn)
            self.core.load(record)
        txns = list(self.core.open_transactions)
        await for_each(txns, self._read_header)

    async def _scan(self) -> list[AckRecord]:
        """Records of this owner and earlier ones (W6); without an epoch it is the first."""
        found = await self._store.acks_on(self._segment, self._subscription)
        epoch = self._owner.epoch
        return [record for record in found if not epoch or record.epoch <= epoch]

    async def rescan(self) -> None:
        """A6: records of ended transactions that nobody here knows were never answered: delete."""
        self._require_running()
        strays = [record for record in await self._scan() if not self.core.knows(record)]
        await delete_ended(self._store, strays)

    # The end of this instance

    async def close(self) -> None:
        """Take nothing more; returns when nothing is being written."""
        self._stop(
            SegmentOwnershipLost(f"{self._segment} is being closed here: connect again to find it.")
        )
        for txn in self.core.transactions:
            self._parts.decisions.forget(txn, self.decided)
        for task in self._background:
            task.cancel()
        waiting = {*self._background, *self._holding}
        if waiting:
            await asyncio.wait(waiting)

    def _stop(self, error: MagnetarError) -> None:
        if self._stopped is None:
            self._stopped = error

    def _require_running(self) -> None:
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("pending_acks_failed", segment=self._segment, exc_info=error)
