"""Brokers that break one rule of writes (W) each."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from broker.topics.registry import TopicRegistry
from broker.topics.subscription import Subscription
from magnetar.protocol.ids import Position
from magnetar.protocol.names import encode_name
from magnetar.protocol.txn_id import TxnId
from tests.simulation.injection import Parts
from txn import records
from txn.buffer import SegmentBuffer
from txn.buffer_core import SegmentBufferCore
from txn.buffer_effects import Admission, DeleteClaims, RecordAborted
from txn.collector import Collector
from txn.membership import Member, Membership
from txn.records import Claim, TxnState
from txn.store import StoredHeader, TransactionStore


def with_buffer(buffer: type[SegmentBuffer]) -> Parts:
    """Topics have that one."""
    return {(TopicRegistry, "buffer_class"): buffer}


def with_core(core: type[SegmentBufferCore]) -> Parts:
    """The buffers of topics have that one."""

    class Buffer(SegmentBuffer):
        core_class: ClassVar[type[SegmentBufferCore]] = core

    return with_buffer(Buffer)


class AppendBesideClaim(SegmentBufferCore):
    """W1 broken: the first append does not wait for the claim."""

    def _first_write(self, member: Member) -> Admission:
        super()._first_write(member)
        return _joined(self, member)

    def claim(self, txn: TxnId, epoch: int) -> Claim:
        if txn in self.members:
            return super().claim(txn, epoch)
        return Claim(txn, self.segment, epoch, self._log.last_confirmed)


def _joined(core: SegmentBufferCore, member: Member) -> Admission:
    core._move(member, Membership.CHECKING)
    core._move(member, Membership.JOINED)
    return Admission.JOINED


class NoHeaderRead(SegmentBufferCore):
    """W2 broken: after the claim nobody asks whether the transaction is still open."""

    def _after_claim(self, member: Member) -> None:
        self._move(member, Membership.CHECKING)
        self._join(member)


class JoinsByLoadedClaim(SegmentBufferCore):
    """W3 broken: the claim of an earlier owner permits appends."""

    def _first_write(self, member: Member) -> Admission:
        if member.state is not Membership.LOADED:
            return super()._first_write(member)
        self._move(member, Membership.CLAIMING)
        return _joined(self, member)


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


async def lowers_aborted(
    self: TransactionStore, segment: str, txn: TxnId, up_to: Position
) -> Position:
    """W5 broken: the aborted record is written over whatever stands there."""
    await self.metadata.put(
        records.aborted_key(segment, txn),
        records.encode_aborted(up_to),
        partition=encode_name(segment),
        indexes=records.aborted_indexes(segment, up_to),
    )
    return up_to


class DeletesAllClaims(SegmentBuffer):
    """W6 broken: an owner deletes every claim of a transaction on the segment."""

    async def _delete_claims(self, txn: TxnId, epochs: Sequence[int]) -> None:
        found = await self._cleaned(lambda: self._store.claims_on(self.segment))
        everyones = {claim.epoch for claim in found if claim.txn == txn}
        await super()._delete_claims(txn, sorted(everyones | {*epochs}))


class LoadsAllClaims(SegmentBuffer):
    """W6 broken: a load takes up claims of later owners, and so deletes them."""

    def _may_load(self, claims: Iterable[Claim]) -> list[Claim]:
        return list(claims)


class FollowsLate(SegmentBuffer):
    """W7 broken: headers are read before their transactions are followed."""

    async def _load(self) -> None:
        self._core.scanned(self._may_load(await self._store.claims_on(self.segment)))
        txns = list(self._core.members)
        await self._load_headers(txns)
        for txn in txns:
            self._decisions.follow(txn, self._decided)
        self._core.loaded(await self._store.aborted_on(self.segment))


class AbortedSetFirst(SegmentBuffer):
    """W7, W8 broken: the aborted set is read before the claims."""

    async def _load(self) -> None:
        aborted = await self._store.aborted_on(self.segment)
        self._core.scanned(self._may_load(await self._store.claims_on(self.segment)))
        for txn in list(self._core.members):
            self._decisions.follow(txn, self._decided)
            await self._load_headers([txn])
        self._core.loaded(aborted)


class HidesWithoutHeader(SegmentBufferCore):
    """W9 broken: a claim without header is taken for an abort."""

    def header_loaded(self, txn: TxnId, state: TxnState | None) -> None:
        super().header_loaded(txn, state or TxnState.ABORTED)


class HidesUnread(SegmentBufferCore):
    """W9 broken: what is in memory and has no header is aborted, whatever its record says."""

    def aborted_read(self, txn: TxnId, up_to: Position | None) -> None:
        super().aborted_read(txn, up_to or self._log.last_confirmed)


class CollectsUnlisted(Collector):
    """W10 broken: a header goes, and nobody looks for records of it."""

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        return await super()._collect_one(stored, listed=False)


class LooksOnce(SegmentBuffer):
    """W11 broken: an owner that is asked to look for claims does not."""

    async def rescan(self) -> None:
        return


class LeavesRefused(SegmentBufferCore):
    """W12 broken: the claim of a write that is refused stays."""

    def _refuse(self, member: Member) -> None:
        self._move(member, Membership.REFUSING)
        self._end_writes(member)
        self._forget(member)


class OneFloor(SegmentBufferCore):
    """W13 broken: of several claims of a transaction the newest one's floor counts."""

    def scanned(self, claims: Iterable[Claim]) -> None:
        found = sorted(claims, key=lambda claim: claim.epoch)
        super().scanned(found)
        for claim in found:
            self._members[claim.txn].floor = claim.floor


def _drained_at_max_read_position(self: Subscription) -> bool:
    """W14 broken: a sealed parent is drained when all that may be read is acknowledged."""
    return self.cursor.mark_delete >= self.topic.max_read_position()


DRAINED_AT_MAX_READ_POSITION = property(_drained_at_max_read_position)
