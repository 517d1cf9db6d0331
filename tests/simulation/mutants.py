"""Brokers that break one rule each: what the simulation is worth is that it finds every one.

Each mutant overrides the one method that keeps its rule.  A story ends otherwise with it, which
shows what the rule is for; and runs by luck find it, which shows that they would find what nobody
thought of.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from broker.topics import TopicRegistry
from broker.transactional_acks import TransactionalAcks
from config.bounds import TXN_ID_BLOCK
from storage import managed_ledger_cursors
from storage.cursor_store import CursorStore
from storage.metadata.store import Record
from tests.simulation.injection import Parts
from tests.unit.txn import group_mutants, key_mutants
from txn import decisions, store
from txn.buffer import SegmentBuffer
from txn.buffer_core import SegmentBufferCore
from txn.buffer_effects import Admission, DeleteClaims, RecordAborted
from txn.coordinator import Coordinator
from txn.membership import Member, Membership
from txn.numbers import NumberBlocks
from txn.pending_ack import PendingAck
from txn.pending_acks import PendingAcks
from txn.records import Claim, decode_next, sequence_key
from txn.segment_owner import SegmentOwner
from txn.transaction_keys import TransactionKeys
from txn.txn_id import TxnId


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    """The rule that it breaks; where there are two ways to break it, also which."""
    parts: Parts
    story: str
    """That ends otherwise with it."""
    profile: str
    """The kind of trouble in which it shows."""
    seed: int = 1
    """Of a run that finds it."""

    @property
    def rule(self) -> str:
        return self.name.partition("-")[0]


def _with_buffer(buffer: type[SegmentBuffer]) -> Parts:
    return {(TopicRegistry, "buffer_class"): buffer}


def _with_core(core: type[SegmentBufferCore]) -> Parts:
    class Buffer(SegmentBuffer):
        core_class: ClassVar[type[SegmentBufferCore]] = core

    return _with_buffer(Buffer)


def _with_acks(acks: type[PendingAcks]) -> Parts:
    return {(TransactionalAcks, "pending_acks_class"): acks}


class AppendBesideClaim(SegmentBufferCore):
    """W1 broken: the first append does not wait for the claim."""

    def _first_write(self, member: Member) -> Admission:
        super()._first_write(member)
        self._move(member, Membership.CHECKING)
        self._move(member, Membership.JOINED)
        return Admission.JOINED

    def claim(self, txn: TxnId, epoch: int) -> Claim:
        if txn in self.members:
            return super().claim(txn, epoch)
        return Claim(txn, self.segment, epoch, self._log.last_confirmed)


class NoHeaderRead(SegmentBufferCore):
    """W2 broken: after the claim nobody asks whether the transaction is still open."""

    def _after_claim(self, member: Member) -> None:
        self._move(member, Membership.CHECKING)
        self._join(member)


class AbortsAtOnce(SegmentBufferCore):
    """W4 broken: an abort is recorded below appends that are still on their way."""

    def _appends_decided(self, member: Member) -> bool:
        return True


class ClaimsFirst(SegmentBufferCore):
    """W5 broken: claims are deleted before the aborted record is durable."""

    def _clean_aborted(self, member: Member) -> None:
        if self._appends_decided(member):
            self._effects.append(DeleteClaims(member.txn, tuple(sorted(member.epochs))))
            self._effects.append(RecordAborted(member.txn, self._log.last_confirmed))


class FollowsLate(SegmentBuffer):
    """W7 broken: headers are read before their transactions are followed."""

    async def _load(self) -> None:
        self._core.scanned(self._may_load(await self._store.claims_on(self.segment)))
        txns = list(self._core.members)
        await asyncio.gather(*(self._load_header(txn) for txn in txns))
        for txn in txns:
            self._decisions.follow(txn, self._follower)
        self._core.loaded(await self._store.aborted_on(self.segment))


class AbortedSetFirst(SegmentBuffer):
    """W7, W8 broken: the aborted set is read before the claims."""

    async def _load(self) -> None:
        aborted = await self._store.aborted_on(self.segment)
        self._core.scanned(self._may_load(await self._store.claims_on(self.segment)))
        for txn in list(self._core.members):
            self._decisions.follow(txn, self._follower)
            await self._load_header(txn)
        self._core.loaded(aborted)


class AnswersUnproven(PendingAcks):
    """A1 broken: the answer does not wait for the proof of ownership."""

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        owner, self._owner = self._owner, _Unproven(self._owner)  # type: ignore[assignment]
        try:
            await super()._make_durable(txn, taken)
        finally:
            self._owner = owner


class _Unproven:
    def __init__(self, owner: SegmentOwner) -> None:
        self.take = owner.take
        self.next_number = owner.next_number

    async def confirm(self) -> None:
        """Proves nothing."""


class AnswersEarly(PendingAcks):
    """A1 broken: the answer does not wait for the record."""

    async def _make_durable(self, txn: TxnId, taken: Sequence[PendingAck]) -> None:
        self._start(super()._make_durable(txn, taken))


class DeletesBeforeDurable(PendingAcks):
    """A2 broken: records of a commit go before the cursor is durable."""

    async def _finish_applying(self) -> None:
        self.core.durable(self.core.applying)


class Unfenced(CursorStore):
    """A3 broken: the cursor is only read, and an owner before this one may go on writing it."""

    async def _claim(self, record: Record) -> None:
        return


class LoadsNothing(PendingAcks):
    """A4 broken: what earlier owners left is not held again."""

    async def _rebuild(self) -> None:
        return


class _ReusedNumbers(NumberBlocks):
    async def reserve(self) -> range:
        """T1 broken: the counter is read, and not moved before its numbers are used."""
        record = await self._store.metadata.get(sequence_key(self._coordinator))
        first = 0 if record is None else decode_next(record.key, record.value)
        later = self._store.reserve_numbers(self._coordinator, TXN_ID_BLOCK)
        self._later = asyncio.get_running_loop().create_task(_after(3600.0, later))
        return range(first, first + TXN_ID_BLOCK)


async def _after(seconds: float, work):  # type: ignore[no-untyped-def]
    await asyncio.sleep(seconds)
    return await work


def _with_keys(keys: type[TransactionKeys]) -> Parts:
    return {(Coordinator, "keys_class"): keys}


ZOMBIE = "zombie_with_a_key"
AT_ONCE = "a_key_is_opened_at_once_and_begun_under_late"
GROUP = "a_group_and_what_comes_late"
_EVERYBODY_WINS: Parts = {
    (part, "header_of"): group_mutants.everybody_wins for part in (store, decisions)
}

MUTANTS = (
    Mutant("W1", _with_core(AppendBesideClaim), "crash_between_claim_and_append", "joins"),
    Mutant("W2", _with_core(NoHeaderRead), "write_after_collection", "joins", 7),
    Mutant("W4", _with_core(AbortsAtOnce), "abort_with_appends_in_flight", "aborts", 2),
    Mutant("W5", _with_core(ClaimsFirst), "crash_while_cleaning_an_abort", "cleaning", 2),
    Mutant("W7-follow", _with_buffer(FollowsLate), "end_during_a_load", "takeovers", 109),
    Mutant(
        "W7-W8", _with_buffer(AbortedSetFirst), "stale_owner_cleans_up", "aborts-handed-over", 9
    ),
    Mutant(
        "A1-proof", _with_acks(AnswersUnproven), "stale_owner_takes_an_ack", "acks-handed-over", 13
    ),
    Mutant("A1-record", _with_acks(AnswersEarly), "crash_before_the_ack_record", "cleaning", 4),
    Mutant(
        "A2", _with_acks(DeletesBeforeDurable), "crash_while_a_commit_is_applied", "cleaning", 18
    ),
    Mutant(
        "A3",
        {(managed_ledger_cursors, "CursorStore"): Unfenced},
        "stale_owner_applies_a_commit",
        "commits-handed-over",
        3,
    ),
    Mutant("A4", _with_acks(LoadsNothing), "pending_acks_after_reload", "restarts", 4),
    Mutant(
        "T1",
        {(Coordinator, "numbers_class"): _ReusedNumbers},
        "numbers_are_never_used_again",
        "restarts",
    ),
    Mutant("K1-version", _with_keys(key_mutants.Overwrites), AT_ONCE, "keys", 2),
    Mutant("K2-abort", _with_keys(key_mutants.LeavesOpen), ZOMBIE, "keys"),
    Mutant("K3-name", _with_keys(key_mutants.NamesNothing), ZOMBIE, "keys"),
    Mutant("K3-version", _with_keys(key_mutants.NamesBlindly), AT_ONCE, "keys", 5),
    Mutant("G1", _EVERYBODY_WINS, GROUP, "groups", 4),
    Mutant("G3", _with_keys(group_mutants.BeginsAgain), GROUP, "groups", 11),
    Mutant("G4", _with_keys(group_mutants.AsksNoEpoch), GROUP, "groups", 6),
    Mutant("G6", _with_keys(group_mutants.KnowsNoBatch), GROUP, "groups", 2),
)
