"""The write side of transactions on one segment: carries out the effects of `buffer_core`.

Rules (W: `docs/transactions.md`):

- W2: the header is read after the claim is durable, by the task that put the claim.
- W6: a load takes up claims up to the own epoch only, and claims are deleted by their exact keys.
- W7, W8: in a cluster the epoch is taken, then the log is opened, which fences it; then claims are
  scanned, their transactions followed, their headers read, and the aborted set is read last.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import structlog

from config.bounds import TXN_PRUNE_S, TXN_SLICE_ENDS
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import InternalError, MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    ManagedLedgerState,
    ManagedLedgerTerminated,
)
from txn import records
from txn.buffer_core import SegmentBufferCore
from txn.buffer_effects import (
    Admission,
    AdmitWrites,
    DeleteClaims,
    Effect,
    ForgetAborted,
    Log,
    MaxReadPositionMoved,
    OpenOnSegment,
    PutClaim,
    ReadAborted,
    ReadHeader,
    RecordAborted,
    RefuseWrites,
    StopFollowing,
    StopOwner,
)
from txn.errors import SegmentOwnershipLost, TransactionEnded
from txn.forget_segment import forget_segment
from txn.header import state_for_writes
from txn.membership import ENDED
from txn.owner_work import OwnerWork
from txn.parts import TransactionParts
from txn.records import Claim, TxnState
from txn.segment_owner import SegmentOwner

log = structlog.get_logger(__name__)

Then = Callable[[MagnetarError | None], None]
T = TypeVar("T")


class SegmentLog(Log, Protocol):
    """The part of a managed ledger that the buffer uses."""

    @property
    def state(self) -> ManagedLedgerState:
        """The state of the ledger."""
        ...


class _JoinWaiter:
    """The future of one ADD_PARTITION_TO_TXN; only wakes a task, so it may be called at once."""

    __slots__ = ("done",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def __call__(self, error: MagnetarError | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class SegmentBuffer:
    """The write side of transactions on one segment: carries out its core's effects.

    Each effect that awaits is one task, so that writes of the same time share the store's commits.
    Only the first SEND of a transaction waits, to join; later ones are plain calls.

    Joining is tried once, and all that wait for it get the error.  Cleaning up is retried until it
    succeeds, with pauses up to TXN_CLEANING_RETRY_MAX_S.  After `close` or `stop` nothing more is
    written under this owner.
    """

    core_class: ClassVar[type[SegmentBufferCore]] = SegmentBufferCore

    def __init__(
        self, segment: str, ledger: SegmentLog, owner: SegmentOwner, parts: TransactionParts
    ) -> None:
        """Internal: use `load`."""
        self.segment = segment
        self.owner = owner
        self._ledger = ledger
        self._store = parts.store
        self._decisions = parts.decisions
        self._cleanup_slots = parts.cleanup_slots
        self._core = self.core_class(segment, ledger)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[TxnId, list[Then]] = {}
        self._claimed: TxnId | None = None
        """The transaction whose claim has just become durable; its task reads the header too."""
        self._listeners: dict[object, Callable[[], None]] = {}
        self._work = OwnerWork(segment)
        self._todo: deque[Effect] = deque()
        self._flushing = False
        self._prune_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def load(
        cls, segment: str, ledger: SegmentLog, owner: SegmentOwner, parts: TransactionParts
    ) -> "SegmentBuffer":
        """Load the buffer of a segment whose log was just opened (W7).

        Raises `MetadataError`, `CorruptTransactionRecord`.
        """
        buffer = cls(segment, ledger, owner, parts)
        try:
            await buffer._load()
        except BaseException:
            buffer._end()
            raise
        buffer._prune()
        return buffer

    # Loading

    async def _load(self) -> None:
        """Load claims, then headers, and the aborted set last (W7, W8)."""
        self._core.scanned(self._may_load(await self._store.claims_on(self.segment)))
        txns = list(self._core.members)
        # W7: followed before the header is read, so that no end falls between.
        for txn in txns:
            self._decisions.follow(txn, self._decided)
        await self._load_headers(txns)
        # W8: last, as a stale owner may record an abort and then delete its claim meanwhile.
        self._core.loaded(await self._store.aborted_on(self.segment))

    async def _load_headers(self, txns: Sequence[TxnId]) -> None:
        async for txn, header in self._store.read_headers(txns):
            self._core.header_loaded(txn, None if header is None else header.state)

    def _may_load(self, claims: Iterable[Claim]) -> list[Claim]:
        """The claims up to the own epoch (W6); all of them if none was taken."""
        # W6: later ones are a successor's.  Without an epoch this is the only owner there can be.
        epoch = self.owner.epoch
        return [claim for claim in claims if not epoch or claim.epoch <= epoch]

    # Queries

    @property
    def max_read_position(self) -> Position:
        """The last entry that may be read; it never moves back."""
        return self._core.max_read_position

    @property
    def anything_aborted(self) -> bool:
        """Whether the aborted set is not empty."""
        return bool(self._core.aborted)

    @property
    def idle(self) -> bool:
        """Whether no work is in progress and no transaction is known."""
        return not self._work.busy and not self._core.members

    def is_aborted(self, txn: TxnId) -> bool:
        """Whether its entries at or before the max read position are never to be delivered."""
        return self._core.is_aborted(txn)

    @property
    def open_count(self) -> int:
        """The number of transactions with claims here whose end is not known."""
        return sum(member.state not in ENDED for member in self._core.members.values())

    @property
    def commits(self) -> int:
        """The number of transactions with claims here that committed since the load."""
        return self._core.commits

    @property
    def aborts(self) -> int:
        """The number of transactions with claims here that aborted since the load."""
        return self._core.aborts

    @property
    def unfinished(self) -> int:
        """The number of transactions that `open_transactions` lists."""
        return len(self._core.members)

    @property
    def aborted_count(self) -> int:
        """The number of transactions in the aborted set."""
        return len(self._core.aborted)

    def start_of(self, txn: TxnId) -> Position | None:
        """The first entry of an unfinished transaction, or the floor of loaded claims, if any."""
        member = self._core.members.get(txn)
        if member is None:
            return None
        return member.first if member.floor is None else member.floor

    def open_transactions(self, limit: int | None = None) -> Sequence[OpenOnSegment]:
        """List the unfinished transactions and their pins; with a limit, the lowest pins first."""
        return self._core.open_transactions(limit)

    def on_max_read_position(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when the end of a transaction lets more be read; returns its removal."""
        token = object()
        self._listeners[token] = listener
        return lambda: (self._listeners.pop(token, None), None)[1]

    # Writing

    def admit(self, txn: TxnId, then: Then) -> bool:
        """Whether a write may be appended now; if not, `then` is called once, from the loop.

        `then` gets None when the transaction has joined (call `admit` again, as it may have ended
        since), else the error.
        """
        if self._ledger.state is ManagedLedgerState.TERMINATED:
            # No claim: nothing more is written to a terminated segment.
            self._loop.call_soon(then, self._terminated_error())
            return False
        answer = self._core.admit(txn) if not self._work.ended else Admission.STOPPED
        if answer is Admission.JOINED:
            return True
        if answer is Admission.WAITS:
            self._waiting.setdefault(txn, []).append(then)
            self._flush()
        elif answer is Admission.ENDED:
            self._loop.call_soon(then, self._ended_error(txn))
        else:
            self._loop.call_soon(then, self._stopped_error())
        return False

    def is_joined(self, txn: TxnId) -> bool:
        """Whether `admit` would be True; changes nothing."""
        return not self._work.ended and self._core.is_joined(txn)

    async def join(self, txn: TxnId) -> None:
        """ADD_PARTITION_TO_TXN: join the transaction before its first SEND.

        A terminated segment takes no writes, so nothing is done there.  Raises `TransactionEnded`,
        `SegmentOwnershipLost`, `MetadataError`.
        """
        if self._ledger.state is ManagedLedgerState.TERMINATED:
            return
        joined = _JoinWaiter(self._loop)
        if not self.admit(txn, joined):
            await joined.done

    def issued(self, txn: TxnId) -> None:
        """An admitted append is handed to the log now."""
        self._core.issued(txn)

    def not_taken(self, txn: TxnId) -> None:
        """The log refused an append: its entry will never exist."""
        self._core.not_appended(txn)
        self._flush()

    def appended(self, txn: TxnId, position: Position | None, error: MagnetarError | None) -> None:
        """Take the outcome of an append.  Calls come in the order of `issued`."""
        core = self._core
        if position is not None:
            core.appended(txn, position)
        elif error is None or isinstance(error, InternalError | AppendOutcomeUnknown):
            # W4: the entry may still appear.
            core.append_unknown(error or self._stopped_error())
        else:
            core.not_appended(txn)
        if core.has_effects:
            self._flush()

    def stop(self, error: MagnetarError) -> None:
        """Stop this owner: the log is lost, and appends in flight may still appear (W4)."""
        self._core.append_unknown(error)
        self._flush()

    async def carry_out_end(self, txn: TxnId, end: TxnState) -> None:
        """Carry out the end of a transaction; returns when it holds readers back no longer.

        The header must have it already.
        """
        if self._work.ended:
            return
        self._decided(txn, end)
        if self._core.is_joining(txn):
            # The end is carried out when claim and header are settled: then writes are refused.
            refused = _JoinWaiter(self._loop)
            self._waiting.setdefault(txn, []).append(refused)
            with suppress(MagnetarError):
                await refused.done

    # Rescan and close

    async def rescan(self) -> None:
        """Clean up claims of ended transactions that are not known here (W11).

        Raises `MetadataError`, `CorruptTransactionRecord`.
        """
        # W11: a stale owner may have put them late.
        found: dict[TxnId, set[int]] = {}
        for claim in self._may_load(await self._store.claims_on(self.segment)):
            if claim.txn not in self._core.members:
                found.setdefault(claim.txn, set()).add(claim.epoch)
        async for txn, header in self._store.read_headers(found):
            self._core.stray(txn, found[txn], None if header is None else header.state)
            self._flush()
        self._core.prune(self._ledger.previous_position(EARLIEST).ledger_id)
        self._flush()

    async def close(self) -> None:
        """Write nothing more; returns when no write is in progress."""
        self._end()
        await self._work.wait()
        await self.owner.close()

    async def forget(self) -> None:
        """Close, and delete all records of the segment.  Raises `MetadataError`."""
        await self.close()
        await forget_segment(self._store, self.segment)

    def _end(self) -> None:
        self._work.end()
        if self._prune_timer is not None:
            self._prune_timer.cancel()
            self._prune_timer = None
        for txn in self._core.members:
            self._decisions.forget(txn, self._decided)
        waiting, self._waiting = self._waiting, {}
        for then in (then for each in waiting.values() for then in each):
            self._loop.call_soon(then, self._stopped_error())

    def _prune(self) -> None:
        """Prune the aborted set now, and again every TXN_PRUNE_S while there is one."""
        self._core.prune(self._ledger.previous_position(EARLIEST).ledger_id)
        self._flush()
        if self._work.ended:
            return
        self._prune_timer = None
        if self._core.aborted:
            self._prune_timer = self._loop.call_later(TXN_PRUNE_S, self._prune)

    # Effects

    def _decided(self, txn: TxnId, state: TxnState | None) -> None:
        self._core.decided(txn, state)
        self._flush()

    def _flush(self) -> None:
        """Carry out the core's effects, in order, unless a call above does so already."""
        if not self._flushing:
            self._flushing = True
            self._do_slice()

    def _do_slice(self) -> None:
        """Carry out TXN_SLICE_ENDS effects now and the rest in later turns, even if one fails."""
        todo, core = self._todo, self._core
        try:
            for _ in range(TXN_SLICE_ENDS):
                todo.extend(core.take_effects())
                if not todo:
                    break
                self._carry_out(todo.popleft())
        finally:
            self._flushing = bool(todo or core.has_effects)
            if self._flushing:
                self._loop.call_soon(self._do_slice)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case PutClaim(txn):
                self._decisions.follow(txn, self._decided)
                self._work.start(self._put_claim(txn))
            case ReadHeader(txn):
                self._read_header(txn)
            case AdmitWrites(txn):
                self._answer(txn, None)
            case RefuseWrites(txn, error):
                self._answer(txn, error or self._ended_error(txn))
            case ReadAborted(txn):
                self._work.start(self._read_aborted(txn))
            case RecordAborted(txn, up_to):
                self._work.start(self._record_aborted(txn, up_to))
            case DeleteClaims(txn, epochs):
                self._work.start(self._delete_claims(txn, epochs))
            case ForgetAborted(txn):
                self._work.start(self._forget_aborted(txn))
            case StopFollowing(txn):
                self._decisions.forget(txn, self._decided)
            case MaxReadPositionMoved():
                for listener in list(self._listeners.values()):
                    listener()
            case StopOwner(error):
                log.warning("segment_owner_stopped", segment=self.segment, error=str(error))
                self._end()

    def _answer(self, txn: TxnId, error: MagnetarError | None) -> None:
        for then in self._waiting.pop(txn, ()):
            if type(then) is _JoinWaiter:
                then(error)
            else:
                self._loop.call_soon(then, error)

    def _read_header(self, txn: TxnId) -> None:
        if txn == self._claimed:
            self._claimed = None
        else:
            self._work.start(self._check_header(txn))

    async def _put_claim(self, txn: TxnId) -> None:
        """Put the claim (W1), tell the core, and read the header if the core asks for it (W2)."""
        core = self._core
        try:
            epoch = await self.owner.take()
            if self._work.ended:
                return
            await self._store.put_claim(core.claim(txn, epoch))
        except MagnetarError as error:
            core.claim_failed(txn, error)
            self._flush()
            return
        core.claim_durable(txn)
        self._claimed = txn
        try:
            self._flush()
        finally:
            to_be_read, self._claimed = self._claimed is None, None
            if to_be_read:
                # W2: the claim is durable by now.
                await self._check_header(txn)

    async def _check_header(self, txn: TxnId) -> None:
        try:
            stored = await self._store.read_header(txn)
        except MagnetarError as error:
            self._core.header_failed(txn, error)
        else:
            state = None if stored is None else state_for_writes(stored.header, txn)
            self._core.header_checked(txn, state)
        self._flush()

    async def _read_aborted(self, txn: TxnId) -> None:
        # It takes no cleanup slot: until the read the transaction holds readers back.
        up_to = await self._work.until_done(lambda: self._store.read_aborted(self.segment, txn))
        self._core.aborted_read(txn, up_to)
        self._flush()

    async def _record_aborted(self, txn: TxnId, up_to: Position) -> None:
        stands = await self._cleaned(lambda: self._store.record_aborted(self.segment, txn, up_to))
        self._core.aborted_recorded(txn, stands)
        if self._prune_timer is None and not self._work.ended:
            self._prune_timer = self._loop.call_later(TXN_PRUNE_S, self._prune)
        self._flush()

    async def _delete_claims(self, txn: TxnId, epochs: Sequence[int]) -> None:
        for epoch in epochs:
            # W6: by exact key.
            key = records.claim_key(txn, self.segment, epoch)
            await self._cleaned(partial(self._store.delete_operation, txn, key))
        self._core.claims_deleted(txn)
        self._flush()

    async def _forget_aborted(self, txn: TxnId) -> None:
        await self._cleaned(lambda: self._store.forget_aborted(self.segment, txn))

    async def _cleaned(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat the work, within the bound on cleanup, until it succeeds; return its result."""
        return await self._work.until_done(work, self._cleanup_slots)

    def _ended_error(self, txn: TxnId) -> MagnetarError:
        return TransactionEnded(
            f"Transaction {txn} has ended and takes no writes on {self.segment}: begin another."
        )

    def _terminated_error(self) -> MagnetarError:
        return ManagedLedgerTerminated(f"{self.segment} is sealed: write to its successors.")

    def _stopped_error(self) -> MagnetarError:
        return SegmentOwnershipLost(f"{self.segment} is being closed here: connect again.")
