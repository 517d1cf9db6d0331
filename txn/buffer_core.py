"""Pure: the transactions on one segment, as one owner sees them.  Events in, effects out.

Rules (W: `docs/transactions.md`):

- W1, W2: a write of an unknown transaction waits for a durable claim, then for one header read.
- W3: claims of earlier owners pin and permit nothing; the first write puts an own claim.
- W4: an abort is recorded when every append of it by this owner is decided.  An append whose
  outcome is unknown stops the owner: from then on no event has an effect.
- W5: the aborted record is durable before claims are deleted.  Visibility moves with the decision
  and waits for neither.
- W6: only claims of epochs that were written here or loaded are deleted.
- W9: a transaction without claim that is not in the aborted set is committed.  A claim without a
  header is void.
- W13: the floor of a claim, and the pin of an append in flight, is the last entry that is confirmed
  at that time.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence

from config.bounds import TXN_ENDED_KEPT
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
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
from txn.errors import TransactionAssertion
from txn.max_read_position import MaxReadPosition
from txn.membership import (
    ENDED,
    FORGETTABLE,
    MOVES,
    PINNING,
    WAITING,
    Member,
    Membership,
)
from txn.records import Claim, TxnState

_M = Membership


class SegmentBufferCore:
    """The state of every transaction on one segment, as one owner knows it.

    Methods with a past participle as their name (`claim_durable`, `appended`) are events;
    `take_effects` then returns the effects that the shell has to carry out.

    The newest `ended_kept` ended transactions are remembered.  A write in an older one takes a
    claim and a header read before it is refused.
    """

    def __init__(self, segment: str, log: Log, *, ended_kept: int = TXN_ENDED_KEPT) -> None:
        self.segment = segment
        self.stopped = False
        self.commits = 0
        """Transactions with claims here that committed, as far as this owner knows."""
        self.aborts = 0
        self._running = False
        self._log = log
        self._ended_kept = ended_kept
        self._members: dict[TxnId, Member] = {}
        self._aborted: dict[TxnId, Position] = {}
        self._ended: dict[TxnId, None] = {}
        self._max_read_position = MaxReadPosition()
        self._effects: list[Effect] = []

    # Queries

    @property
    def max_read_position(self) -> Position:
        """The last entry that may be read, once the segment is loaded."""
        return self._max_read_position.advance(self._log.last_confirmed)

    @property
    def members(self) -> Mapping[TxnId, Member]:
        """All transactions that are known and not finished."""
        return self._members

    @property
    def aborted(self) -> Mapping[TxnId, Position]:
        """The aborted set: for each transaction a position at or after its last entry."""
        return self._aborted

    def is_aborted(self, txn: TxnId) -> bool:
        """Whether its entries at or before the max read position are never to be read (W9)."""
        # W9: any other transaction without a claim is committed, so its entries are read.
        return txn in self._aborted

    def open_transactions(self, limit: int | None = None) -> Sequence[OpenOnSegment]:
        """List the unfinished transactions as they came; with a limit, the lowest pins first."""
        members: Iterable[Member] = self._members.values()
        if limit is not None:
            members = heapq.nsmallest(limit, members, key=self._pins_before)
        return [
            OpenOnSegment(
                each.txn,
                each.state,
                self._max_read_position.pin_of(each.txn),
                each.first,
                each.entries,
                each.in_flight,
                each.floor is not None,
            )
            for each in members
        ]

    def _pins_before(self, member: Member) -> tuple[bool, Position]:
        pin = self._max_read_position.pin_of(member.txn)
        return pin is None, pin or EARLIEST

    @property
    def has_effects(self) -> bool:
        """Whether `take_effects` has any."""
        return bool(self._effects)

    def take_effects(self) -> Sequence[Effect]:
        """Return the effects to carry out, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    # Loading (W7)

    def scanned(self, claims: Iterable[Claim]) -> None:
        """The claims found after the log was fenced."""
        for claim in claims:
            member = self._members.get(claim.txn)
            if member is None:
                member = self._members[claim.txn] = Member(claim.txn, _M.SCANNED)
            member.epochs.add(claim.epoch)
            # W13: entries of earlier owners come after the lowest floor.
            if member.floor is None or claim.floor < member.floor:
                member.floor = claim.floor

    def header_loaded(self, txn: TxnId, state: TxnState | None) -> None:
        """The header of a scanned transaction, read after it was followed."""
        member = self._members.get(txn)
        if member is None or member.state is not _M.SCANNED:
            return
        if state is TxnState.OPEN and member.floor is not None:
            self._move(member, _M.LOADED)
            self._max_read_position.pin(txn, member.floor)
        else:
            self._make_end_visible(member, state)

    def loaded(self, aborted: Mapping[TxnId, Position]) -> None:
        """The aborted set, read after the headers (W8)."""
        for txn, up_to in aborted.items():
            self._aborted[txn] = max(up_to, self._aborted.get(txn, up_to))
        if any(member.state is _M.SCANNED for member in self._members.values()):
            raise TransactionAssertion(
                f"{self.segment} was loaded before all headers were read: report this as a defect."
            )
        self._running = True
        self._max_read_position.advance(self._log.last_confirmed)

    # Joining

    def admit(self, txn: TxnId) -> Admission:
        """Return whether a write may be appended now; ask for a claim if none was put yet."""
        if self.stopped:
            return Admission.STOPPED
        member = self._members.get(txn)
        if member is None:
            if txn in self._ended or txn in self._aborted or not txn.is_ever_given:
                return Admission.ENDED
            member = self._members[txn] = Member(txn, _M.UNPROVEN)
        state = member.state
        # W3: LOADED, with claims of earlier owners only, is not enough.
        if state is _M.JOINED:
            return Admission.JOINED
        if state in ENDED:
            return Admission.ENDED
        if state in WAITING:
            return Admission.WAITS
        return self._first_write(member)

    def is_joined(self, txn: TxnId) -> bool:
        """Whether a write may be appended now; changes nothing."""
        member = self._members.get(txn)
        return member is not None and member.state is _M.JOINED and not self.stopped

    def is_joining(self, txn: TxnId) -> bool:
        """Whether its claim is being put, or its header read after that."""
        member = self._members.get(txn)
        return member is not None and member.state in WAITING and not self.stopped

    def _first_write(self, member: Member) -> Admission:
        """Ask for an own claim (W1, W3)."""
        # W1: the first append is issued only after `claim_durable`.
        self._move(member, _M.CLAIMING)
        self._effects.append(PutClaim(member.txn))
        return Admission.WAITS

    def claim(self, txn: TxnId, epoch: int) -> Claim:
        """The claim to put now, under that epoch; from now on it may be stored."""
        # W6: noted before the put, whose outcome may stay unknown.
        # W13: the floor is the present end.
        self._members[txn].epochs.add(epoch)
        return Claim(txn, self.segment, epoch, self._log.last_confirmed)

    def claim_durable(self, txn: TxnId) -> None:
        """The own claim is stored."""
        member = self._member_in(txn, _M.CLAIMING)
        if member is None or self._refuse_if_ended(member):
            return
        self._after_claim(member)

    def _after_claim(self, member: Member) -> None:
        """Ask for the header (W2, L6)."""
        # W2: the read begins after the claim is durable.
        self._move(member, _M.CHECKING)
        self._effects.append(ReadHeader(member.txn))

    def claim_failed(self, txn: TxnId, error: MagnetarError) -> None:
        """The epoch could not be taken, or the claim may or may not be stored."""
        self._not_joined(self._member_in(txn, _M.CLAIMING), error)

    def header_checked(self, txn: TxnId, state: TxnState | None) -> None:
        """Take the state of the header, read after the claim became durable; None: no header."""
        member = self._member_in(txn, _M.CHECKING)
        if member is None or self._refuse_if_ended(member):
            return
        if state is not TxnState.OPEN:
            self._ended_unjoined(member, state)
            return
        self._join(member)

    def _join(self, member: Member) -> None:
        self._move(member, _M.JOINED)
        self._effects.append(AdmitWrites(member.txn))

    def header_failed(self, txn: TxnId, error: MagnetarError) -> None:
        """The header could not be read."""
        self._not_joined(self._member_in(txn, _M.CHECKING), error)

    def _not_joined(self, member: Member | None, error: MagnetarError) -> None:
        """Refuse the waiting writes; the next write claims again."""
        if member is None or self._refuse_if_ended(member):
            return
        self._move(member, _M.UNPROVEN if member.floor is None else _M.LOADED)
        self._effects.append(RefuseWrites(member.txn, error))
        if not member.epochs:
            self._forget(member)

    def _refuse_if_ended(self, member: Member) -> bool:
        if member.end_known:
            self._ended_unjoined(member, member.end)
        return member.end_known

    def _ended_unjoined(self, member: Member, end: TxnState | None) -> None:
        """Take the end of a transaction in which this owner has appended nothing."""
        if member.floor is not None:
            self._take_end(member, end)
        else:
            self._refuse(member)

    def _refuse(self, member: Member) -> None:
        """Refuse writes of an ended transaction, and delete the own claim (W12)."""
        # W12, W9: nothing was appended under the own claim, so it speaks for nothing.
        self._move(member, _M.REFUSING)
        self._end_writes(member)
        self._delete_claims(member)

    # Appending

    def issued(self, txn: TxnId) -> None:
        """An append is handed to the log now."""
        member = self._members.get(txn)
        # W1: only a transaction with a durable claim is JOINED.
        if member is None or member.state is not _M.JOINED:
            raise TransactionAssertion(
                f"An entry of {txn} was appended to {self.segment}, which it has not joined: "
                "report this as a defect."
            )
        member.issued += 1
        member.in_flight += 1
        # W13: the entry will come after the last confirmed one.
        if self._max_read_position.pin_of(txn) is None:
            self._max_read_position.pin(txn, self._log.last_confirmed)

    def appended(self, txn: TxnId, position: Position) -> None:
        """An append is durable.  Calls come in the order of `issued`."""
        member = self._members.get(txn)
        if member is None or self.stopped:
            return
        member.in_flight -= 1
        member.entries += 1
        if member.first is None:
            member.first = position
            if member.floor is None and member.state in PINNING:
                self._max_read_position.pin(txn, self._log.previous_position(position))
                self._advance_max_read_position()
        if member.state is _M.ABORTED:
            self._clean_aborted(member)

    def not_appended(self, txn: TxnId) -> None:
        """An append was refused, or failed in such a way that its entry will never exist."""
        member = self._members.get(txn)
        if member is None or self.stopped:
            return
        member.in_flight -= 1
        # Unpin only when no other append is in flight: that one may still become the first entry.
        if member.first is None and member.floor is None and not member.in_flight:
            self._max_read_position.unpin(txn)
            self._advance_max_read_position()
        if member.state is _M.ABORTED:
            self._clean_aborted(member)

    def append_unknown(self, error: MagnetarError) -> None:
        """Stop this owner: the outcome of an append is unknown (W4)."""
        # W4: the entry may still appear, so no abort may be recorded, and no write admitted.
        if not self.stopped:
            self.stopped = True
            waiting = [each.txn for each in self._members.values() if each.state in WAITING]
            self._effects = [RefuseWrites(txn, error) for txn in waiting]
            self._effects.append(StopOwner(error))

    # The end of a transaction

    def decided(self, txn: TxnId, state: TxnState | None) -> None:
        """The transaction has ended; None: its header is gone."""
        member = self._members.get(txn)
        if member is None or self.stopped or state is TxnState.OPEN:
            return
        if member.state is _M.SCANNED:
            self._make_end_visible(member, state)
        elif member.state in WAITING:
            member.end_known, member.end = True, state
        elif member.state is _M.UNPROVEN:
            self._refuse(member)
        elif member.state in (_M.LOADED, _M.JOINED):
            self._take_end(member, state)

    def _take_end(self, member: Member, end: TxnState | None) -> None:
        self._effects.append(RefuseWrites(member.txn, None))
        if end is None:
            # W9: the aborted record tells the end.
            self._move(member, _M.JUDGING)
            self._effects.append(ReadAborted(member.txn))
        elif end is TxnState.ABORTED and member.floor is None and not member.issued:
            self.aborts += 1
            self._refuse(member)
        else:
            self._make_end_visible(member, end)

    def aborted_read(self, txn: TxnId, up_to: Position | None) -> None:
        """The aborted record was read, as the header is gone (W9); None: there is none."""
        member = self._member_in(txn, _M.JUDGING)
        if member is not None:
            self._make_end_visible(
                member, TxnState.COMMITTED if up_to is None else TxnState.ABORTED
            )

    def _make_end_visible(self, member: Member, end: TxnState | None) -> None:
        """Move visibility now, and clean up then.  None: the claims are void (W9)."""
        txn = member.txn
        # W5: readers wait neither for the aborted record nor for the deletion of claims.
        if end is TxnState.ABORTED:
            self._aborted.setdefault(txn, self._log.last_confirmed)
            self._move(member, _M.ABORTED)
            self.aborts += 1
            self._end_writes(member)
            self._clean_aborted(member)
        else:
            self._move(member, _M.COMMITTED)
            self.commits += end is TxnState.COMMITTED
            self._end_writes(member)
            self._delete_claims(member)

    def _clean_aborted(self, member: Member) -> None:
        """Ask for the aborted record, once all appends are decided (W4, W5)."""
        # W5: `aborted_recorded` deletes the claims, after this is durable.
        if self._appends_decided(member):
            self._effects.append(RecordAborted(member.txn, self._log.last_confirmed))

    def _appends_decided(self, member: Member) -> bool:
        """Whether every append by this owner is durable, or will never be (W4)."""
        # W4: an entry that is still in flight may lie above the position of the record.
        return member.in_flight == 0

    def aborted_recorded(self, txn: TxnId, up_to: Position) -> None:
        """The aborted record is durable, at that position or above."""
        self._aborted[txn] = max(up_to, self._aborted.get(txn, up_to))
        member = self._member_in(txn, _M.ABORTED)
        if member is not None:
            self._move(member, _M.RECORDED)
            self._delete_claims(member)

    def _delete_claims(self, member: Member) -> None:
        """Delete the claims that this owner wrote or loaded (W6)."""
        # W6: a successor's claim has another epoch, and stays.
        if member.epochs:
            self._effects.append(DeleteClaims(member.txn, tuple(sorted(member.epochs))))
        else:
            self._forget(member)

    def claims_deleted(self, txn: TxnId) -> None:
        """All claims of a transaction that this owner knows are deleted."""
        member = self._members.get(txn)
        if member is not None and member.state in FORGETTABLE and not self.stopped:
            self._forget(member)

    # Late claims, and aborted records of deleted ledgers

    def stray(self, txn: TxnId, epochs: Iterable[int], end: TxnState | None) -> None:
        """Clean up claims of an ended transaction that is not known here (W11)."""
        # W11: claims of an open transaction stay, as their writer may be at work.
        if self.stopped or txn in self._members or end is TxnState.OPEN:
            return
        member = self._members[txn] = Member(txn, _M.SCANNED, set(epochs))
        self._make_end_visible(member, end)

    def prune(self, first_ledger_id: int) -> None:
        """Forget aborted transactions whose entries were all in deleted ledgers."""
        if self.stopped:
            return
        for txn, up_to in list(self._aborted.items()):
            if up_to.ledger_id < first_ledger_id and txn not in self._members:
                del self._aborted[txn]
                self._effects.append(ForgetAborted(txn))

    # Internals

    def _member_in(self, txn: TxnId, state: Membership) -> Member | None:
        member = self._members.get(txn)
        return member if member and member.state is state and not self.stopped else None

    def _move(self, member: Member, to: Membership) -> None:
        member.state = MOVES.move(
            member.state, to, "Transaction {} on {}", member.txn, self.segment
        )

    def _end_writes(self, member: Member) -> None:
        """Take away the pin, and refuse waiting writes: the end is known."""
        self._max_read_position.unpin(member.txn)
        self._ended[member.txn] = None
        if len(self._ended) > self._ended_kept:
            del self._ended[next(iter(self._ended))]
        self._effects.append(RefuseWrites(member.txn, None))
        self._advance_max_read_position()

    def _advance_max_read_position(self) -> None:
        if self._running:
            shown = self._max_read_position.current
            if self._max_read_position.advance(self._log.last_confirmed) > shown:
                self._effects.append(MaxReadPositionMoved())

    def _forget(self, member: Member) -> None:
        del self._members[member.txn]
        self._effects.append(StopFollowing(member.txn))
