"""Groups that break one rule each: the exploration must find every one.

Each overrides what keeps its rule (`docs/transactions.md`), and names the plan in which it shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import VersionConflict
from tests.unit.txn.group_clients import GroupPlan
from txn.collector import Collector
from txn.coordinator import Coordinator
from txn.errors import InvalidTxnStatus
from txn.group import Group, GroupCommit
from txn.header import header_of
from txn.key_groups import named_group
from txn.key_store import StoredKey, TransactionKeyStore
from txn.parts import TransactionParts
from txn.records import Header, TxnState
from txn.store import StoredHeader
from txn.transaction_groups import BegunAttempt, CommittedGroup, TransactionGroups
from txn.transaction_key import KeyName, KeyRecord
from txn.transaction_keys import KeyedTransactions, KeySnapshot, TransactionKeys


@dataclass(frozen=True)
class GroupMutant:
    name: str
    """The rule that it breaks; where there are several ways, also which."""
    plan: GroupPlan


def everybody_wins(header: Header, txn: TxnId) -> Header | None:
    """G1 broken: what a group commits is committed for all of its attempts."""
    won = header_of(header, txn)
    is_lost = won is not None and header.state is TxnState.COMMITTED
    return replace(won, state=TxnState.COMMITTED) if won is not None and is_lost else won


class CountsInMemory(TransactionGroups):
    """G2 broken: an index is given that is not reserved."""

    async def _give_attempt(self, txn: TxnId, timeout_ms: int) -> BegunAttempt:
        indexes = self._indexes.get(txn)
        if indexes is None or not indexes.left:
            self.created(txn, Group("", 64))
        return await super()._give_attempt(txn, timeout_ms)


class ReservesBlindly(Coordinator):
    """G2, G8 broken: an open group is written over whatever has become of it."""

    async def change_header(self, stored: StoredHeader, header: Header) -> StoredHeader:
        now = await self._store.read_header(stored.txn)
        return await super().change_header(stored if now is None else now, header)


class BeginsAgain(TransactionKeys):
    """G3 broken: a nonce whose group has ended gets another one."""

    async def begin_group(self, now: KeySnapshot, nonce: str, timeout_ms: int) -> TxnId | None:
        if now.state is not TxnState.OPEN:
            now = replace(now, record=replace(now.record, nonces=(), beginner=""))
        return await super().begin_group(now, nonce, timeout_ms)


class CommitsBlindly(Coordinator):
    """G4 broken: the commit is written over whatever has become of the group."""

    async def commit_group(self, stored: StoredHeader, group: Group) -> None:
        now = await self._store.read_header(stored.txn)
        header = replace(stored.header, group=group)
        seen = StoredHeader(stored.txn, header, (now or stored).version)
        await self._write_end(seen, TxnState.COMMITTED)


class AsksNoEpoch(TransactionKeys):
    """G4, K4 broken: requests under an old epoch go as far as they come."""

    async def read_snapshot(self, name: KeyName, epoch: int) -> KeySnapshot:
        stored = await self._store.read(name)
        return await super().read_snapshot(name, epoch if stored is None else stored.record.epoch)


class RefusesAgain(TransactionGroups):
    """G4 broken: a commit that was not answered is refused when it is asked again."""

    async def _commit(
        self,
        name: KeyName,
        epoch: int,
        nonce: str,
        group: TxnId | None,
        commit: GroupCommit,
        winners: Sequence[TxnId],
    ) -> CommittedGroup:
        now = await self._keys.read_snapshot(name, epoch)
        if named_group(now.record, nonce) and now.state is not TxnState.OPEN:
            raise InvalidTxnStatus("it has ended")
        return await super()._commit(name, epoch, nonce, group, commit, winners)


class FoldsNothingIn(TransactionKeys):
    """G5 broken: what names the next group does not fold in the one before."""

    async def begin_group(self, now: KeySnapshot, nonce: str, timeout_ms: int) -> TxnId | None:
        kept = replace(now.stored.record, nonces=now.record.nonces)
        return await super().begin_group(replace(now, record=kept), nonce, timeout_ms)


class _DropsAtOpen(TransactionKeyStore):
    async def change(self, stored: StoredKey, record: KeyRecord) -> StoredKey:
        if record.epoch != stored.record.epoch:
            record = replace(record, committed=None, earlier=())
        return await super().change(stored, record)


class ForgetsAtOpen(TransactionKeys):
    """G5 broken: a new epoch does not take over what was folded in."""

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        self._store = _DropsAtOpen(parts.store.metadata, transactions.coordinator_id)


class TellsTheFoldOnly(TransactionKeys):
    """G5 broken: OPEN tells what is folded in, and does not ask the last header."""

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        now = await super()._abort_earlier(name, record)
        return replace(now, committed=record.committed)


class CollectsUnfolded(Collector):
    """G5 broken: a header goes, and the key does not tell what it committed."""

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        try:
            return await self._store.delete_header(stored)
        except VersionConflict:
            return False


class KnowsNoBatch(TransactionKeys):
    """G6 broken: nobody asks whether the batch was committed before."""

    async def read_snapshot(self, name: KeyName, epoch: int) -> KeySnapshot:
        now = await super().read_snapshot(name, epoch)
        own = now.record.transaction
        if own is not None and now.state is TxnState.COMMITTED:
            return now
        return replace(now, record=replace(now.record, committed=None, earlier=()))


class LeavesOpen(TransactionGroups):
    """G6 broken: what was begun for a batch that is done stays open."""

    async def _answer_done(
        self, name: KeyName, now: KeySnapshot, nonce: str, commit: GroupCommit
    ) -> CommittedGroup:
        return CommittedGroup(True, None)


class AbortsAnyEpoch(TransactionGroups):
    """G7 broken: an abort of an old epoch ends what is open under the new one."""

    async def abort(self, name: KeyName, epoch: int) -> bool:
        record = await self._keys.find(name)
        return await super().abort(name, epoch if record is None else record.epoch)


class ListsTheGroupOnly(Collector):
    """G9 broken: records of attempts keep no header."""

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        return await super()._collect_one(stored, listed=False)


_NO_ABORTS = (False, False)
ONE_EACH = GroupPlan(attempts=((0,), (0,)), aborts=_NO_ABORTS)
ABORTS = GroupPlan(attempts=((0,), (0,)))
LATE = GroupPlan(attempts=((0, 0), ()), aborts=_NO_ABORTS)
BATCHES = GroupPlan(attempts=((), ()), aborts=_NO_ABORTS, batches=(2, 2))
EXTENDS = GroupPlan(attempts=((0,), ()), aborts=_NO_ABORTS, extends=True)
HINTS = replace(ONE_EACH, hints=True)
CRASH = GroupPlan(attempts=((), ()), aborts=_NO_ABORTS, crashes=1)
CRASH_WITH_ATTEMPT = replace(CRASH, attempts=((0,), ()))
COLLECTED = GroupPlan(attempts=((0,), ()), aborts=_NO_ABORTS, batches=(1, 0), collections=1)
TWO_LEADERS = GroupPlan(servers=(0, 1), attempts=((0, 1), ()), aborts=_NO_ABORTS)

GROUP_MUTANTS = (
    GroupMutant("G1-winners", replace(LATE, projects=everybody_wins)),
    GroupMutant("G2-reserve", replace(TWO_LEADERS, groups=CountsInMemory)),
    GroupMutant("G2-version", replace(TWO_LEADERS, coordinator=ReservesBlindly)),
    GroupMutant("G3-again", replace(LATE, keys=BeginsAgain)),
    GroupMutant("G4-version", replace(ONE_EACH, coordinator=CommitsBlindly)),
    GroupMutant("G4-epoch", replace(ONE_EACH, keys=AsksNoEpoch)),
    GroupMutant("G4-again", replace(CRASH, groups=RefusesAgain)),
    GroupMutant("G5-name", replace(BATCHES, keys=FoldsNothingIn)),
    GroupMutant("G5-open", replace(BATCHES, keys=ForgetsAtOpen)),
    GroupMutant("G5-answer", replace(ONE_EACH, keys=TellsTheFoldOnly)),
    GroupMutant("G5-collect", replace(COLLECTED, collector=CollectsUnfolded)),
    GroupMutant("G6-replay", replace(ONE_EACH, keys=KnowsNoBatch)),
    GroupMutant("G6-abort", replace(ONE_EACH, groups=LeavesOpen)),
    GroupMutant("G7-epoch", replace(ABORTS, groups=AbortsAnyEpoch)),
    GroupMutant("G8-version", replace(EXTENDS, coordinator=ReservesBlindly)),
    GroupMutant("G9-listing", replace(COLLECTED, claims=True, collector=ListsTheGroupOnly)),
)
