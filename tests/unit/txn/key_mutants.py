"""Transaction keys that break one rule each: the exploration must find every one.

Each overrides what keeps its rule (`docs/transactions.md`), and names the plan in which it shows.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import ABSENT, VersionConflict
from tests.unit.txn.key_clients import Plan
from txn.collector import Collector
from txn.errors import InvalidTxnStatus, TransactionNotFound
from txn.key_holders import KeyHolder
from txn.key_store import StoredKey, TransactionKeyStore
from txn.parts import TransactionParts
from txn.store import StoredHeader
from txn.transaction_key import (
    KeyName,
    KeyRecord,
    OpenedKey,
    name_transaction,
    new_key_record,
    note_earlier_end,
    raise_epoch,
)
from txn.transaction_keys import KeyedTransactions, TransactionKeys

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    name: str
    """The rule that it breaks; where there are several ways, also which."""
    keys: type[TransactionKeys]
    plan: Plan


class _OverwritingStore(TransactionKeyStore):
    async def change(self, stored: StoredKey, record: KeyRecord) -> StoredKey:
        now = await self.read(stored.name)
        return await self._put(stored.name, record, ABSENT if now is None else now.version)


class Overwrites(TransactionKeys):
    """K1 broken: the epoch is not raised on the version read."""

    async def _raise_epoch(self, name: KeyName, presented: int, opener: str) -> KeyRecord:
        right, self._store = self._store, self._blind
        try:
            return await super()._raise_epoch(name, presented, opener)
        finally:
            self._store = right

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        metadata = parts.store.metadata
        self._blind = _OverwritingStore(metadata, transactions.coordinator_id)


class LeavesOpen(TransactionKeys):
    """K2 broken: what was open under the epoch before stays so."""

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        return record


class AnswersEarly(TransactionKeys):
    """K2 broken: OPEN is answered while the abort is on its way."""

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        self._later = asyncio.ensure_future(super()._abort_earlier(name, record))
        self._later.add_done_callback(lambda done: done.cancelled() or done.exception())
        return record


class SaysAborted(TransactionKeys):
    """K2 broken: what was committed meanwhile is told as aborted."""

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        await super()._abort_earlier(name, record)
        return note_earlier_end(record, None)


class NamesNothing(TransactionKeys):
    """K3 broken: the key does not name what is begun under it."""

    async def _name_in_key(
        self, stored: StoredKey, txn: TxnId, beginner: str, *, is_group: bool = False
    ) -> bool:
        return True


class NamesBlindly(TransactionKeys):
    """K3 broken: the key names it whatever has become of the key since it was read."""

    async def _name_in_key(
        self, stored: StoredKey, txn: TxnId, beginner: str, *, is_group: bool = False
    ) -> bool:
        while True:
            now = await self._store.read(stored.name)
            assert now is not None
            record = name_transaction(
                now.record, txn, beginner, self._clock.now_ms(), is_group=is_group
            )
            try:
                await self._store.change(now, record)
            except VersionConflict:
                continue
            return True


class BeginsBesides(TransactionKeys):
    """K3 broken: nobody asks whether the last transaction of the key has ended."""

    async def last_state(self, record: KeyRecord) -> None:
        return None


class AsksNoEpoch(TransactionKeys):
    """K4 broken: requests under an old epoch go as far as they come."""

    async def require(self, name: KeyName, epoch: int) -> KeyRecord:
        return new_key_record(0)


class AsksOnce(TransactionKeys):
    """K4 broken: who finds its transaction ended is not told that a newer epoch is why."""

    async def require(self, name: KeyName, epoch: int) -> KeyRecord:
        if epoch in self._asked:
            return new_key_record(0)
        self._asked.append(epoch)
        return await super().require(name, epoch)

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        self._asked: list[int] = []


class _AsksAgainAfter(TransactionKeys):
    """K4 broken: the epoch is checked again after one kind of error only."""

    error: type[Exception]

    async def under(self, name: KeyName, epoch: int, work: Callable[[], Awaitable[T]]) -> T:
        await self.require(name, epoch)
        try:
            return await work()
        except self.error:
            await self.require(name, epoch)
            raise


class AsksOfWhatIsGone(_AsksAgainAfter):
    """K4 broken: the epoch is checked again only when the header was collected."""

    error = TransactionNotFound


class AsksOfWhatEnded(_AsksAgainAfter):
    """K4 broken: the epoch is checked again only when the header had ended."""

    error = InvalidTxnStatus


class _RememberingStore(TransactionKeyStore):
    async def read(self, name: KeyName) -> StoredKey | None:
        if name not in self._known:
            self._known[name] = await super().read(name)
        return self._known[name]

    async def _put(self, name: KeyName, record: KeyRecord, expect: object) -> StoredKey:
        self._known.pop(name, None)
        self._known[name] = stored = await super()._put(name, record, expect)  # type: ignore[arg-type]
        return stored

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._known: dict[KeyName, StoredKey | None] = {}


class TrustsMemory(TransactionKeys):
    """K6 broken: what this leader knows of a key is not read again, so another one is not seen."""

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        metadata = parts.store.metadata
        self._store = _RememberingStore(metadata, transactions.coordinator_id)


class _BeginnersInMemory(TransactionKeyStore):
    async def _put(self, name: KeyName, record: KeyRecord, expect: object) -> StoredKey:
        told = replace(record, beginner="")
        return await super()._put(name, told, expect)  # type: ignore[arg-type]


class RemembersBeginners(TransactionKeys):
    """K3, K6 broken: who began the open transaction is gone with the leader."""

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        metadata = parts.store.metadata
        self._store = _BeginnersInMemory(metadata, transactions.coordinator_id)


class NoFloor(TransactionKeys):
    """K7 broken: nothing is left of the epochs that a deleted key had."""

    async def _delete(self, stored: StoredKey, *, unless_held: bool = False) -> bool:
        await self._store.delete(stored)
        return True


class FloorAfterwards(TransactionKeys):
    """K7 broken: the key goes before the floor is raised."""

    async def _delete(self, stored: StoredKey, *, unless_held: bool = False) -> bool:
        await self._store.delete(stored)
        await self._store.raise_floor(stored.record.epoch)
        return True


class FloorReadFirst(TransactionKeys):
    """K7 broken: the floor is read before there is a record that a deletion would change."""

    async def _raise_epoch(self, name: KeyName, presented: int, opener: str) -> KeyRecord:
        while True:
            stored = await self._store.read(name)
            if stored is not None:
                return await super()._raise_epoch(name, presented, opener)
            record = raise_epoch(new_key_record(0), await self._store.read_floor(), opener, 0)
            try:
                await self._store.create(name, record)
            except VersionConflict:
                continue
            return record


class _DeletesBlindly(TransactionKeyStore):
    async def delete(self, stored: StoredKey) -> None:
        now = await self.read(stored.name)
        if now is not None:
            await super().delete(now)


class DeletesWhatItDidNotRead(TransactionKeys):
    """K7 broken: a key goes whatever has become of it since it was read."""

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        super().__init__(transactions, parts)
        metadata = parts.store.metadata
        self._store = _DeletesBlindly(metadata, transactions.coordinator_id)


class RemembersAfterwards(TransactionKeys):
    """K5 broken: an ATTACH is remembered when the epoch was looked at."""

    async def _remember_holder(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        await self.require(name, epoch)
        await self._store.read_floor()  # the answer is on its way for a while
        self.holders.forget(name, holder)
        self.holders.remember(name, epoch, holder)


class ClosesFirst(TransactionKeys):
    """K5 broken: OPEN closes older connections before its write."""

    async def _raise_epoch(self, name: KeyName, presented: int, opener: str) -> KeyRecord:
        self.holders.close_older(name, None)
        return await super()._raise_epoch(name, presented, opener)

    async def _open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None
    ) -> KeyRecord:
        return await self._abort_earlier(name, await self._raise_epoch(name, presented, opener))


class OvertakenHolds(TransactionKeys):
    """K5 broken: an OPEN that a newer one overtook is remembered, and nobody closes it."""

    async def open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None = None
    ) -> OpenedKey:
        made = await super().open(name, presented, opener)
        if holder is not None:
            self.holders.remember(name, made.epoch, holder)
        return made


class OvertakenCloses(TransactionKeys):
    """K5 broken: an OPEN that a newer one overtook closes the connection of that one."""

    async def _open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None
    ) -> KeyRecord:
        record = await self._abort_earlier(name, await self._raise_epoch(name, presented, opener))
        self.holders.close_older(name, None, holder)
        return record


class NotesNothing(Collector):
    """K8 broken: a header goes, and the key does not tell how its last transaction ended."""

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        try:
            return await self._store.delete_header(stored)
        except VersionConflict:
            return False


class NotesAfterwards(Collector):
    """K8 broken: the header goes first."""

    async def _collect_one(self, stored: StoredHeader, *, listed: bool) -> bool:
        try:
            gone = await self._store.delete_header(stored)
            keys = TransactionKeyStore(self._store.metadata, stored.txn.coordinator)
            await keys.note_end(stored.txn, stored.header)
        except VersionConflict:
            return False
        return gone


class AsksTheHeaderOnly(TransactionKeys):
    """K8 broken: who finds the header collected does not read what the key tells by then."""

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        last = record.before
        if last is None or last.ended:
            return record
        return note_earlier_end(record, await self._transactions.abort(last.txn))


_DELETED = Plan(steps=(1, 1), deletions=1)
_CRASH = Plan(writes=False, crashes=1)
HELD = Plan(steps=(4, 1), holds=True)
COLLECTED = Plan(writes=False, collections=1)

MUTANTS = (
    Mutant("K1-version", Overwrites, Plan()),
    Mutant("K2-abort", LeavesOpen, Plan()),
    Mutant("K2-answer", AnswersEarly, Plan()),
    Mutant("K2-outcome", SaysAborted, Plan()),
    Mutant("K3-name", NamesNothing, Plan()),
    Mutant("K3-version", NamesBlindly, Plan()),
    Mutant("K3-one", BeginsBesides, _CRASH),
    Mutant("K4-epoch", AsksNoEpoch, Plan()),
    Mutant("K4-error", AsksOnce, Plan()),
    Mutant("K4-ended", AsksOfWhatIsGone, Plan()),
    Mutant("K4-gone", AsksOfWhatEnded, COLLECTED),
    Mutant("K5-attach", RemembersAfterwards, HELD),
    Mutant("K5-order", ClosesFirst, HELD),
    Mutant("K5-overtaken", OvertakenHolds, HELD),
    Mutant("K5-newer", OvertakenCloses, HELD),
    Mutant("K6-record", TrustsMemory, Plan((0, 1))),
    Mutant("K6-beginner", RemembersBeginners, _CRASH),
    Mutant("K7-floor", NoFloor, _DELETED),
    Mutant("K7-order", FloorAfterwards, _DELETED),
    Mutant("K7-read", FloorReadFirst, _DELETED),
    Mutant("K7-version", DeletesWhatItDidNotRead, _DELETED),
    Mutant("K8-note", TransactionKeys, replace(COLLECTED, collector=NotesNothing)),
    Mutant("K8-order", TransactionKeys, replace(COLLECTED, collector=NotesAfterwards)),
    Mutant("K8-read", AsksTheHeaderOnly, COLLECTED),
)
