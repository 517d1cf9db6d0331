"""The transaction keys of one coordinator: opened, attached to, begun under, deleted.

Rules (K: `docs/transactions.md`):

- Whatever a request decides, it decides on the stored record, and changes that on the version read:
  nothing of a key is in memory but who holds it, so restarts and moves of the coordinator, and two
  leaders at once, change nothing (K6).  What a last group has committed is remembered, without its
  winners: no write changes it any more, and the key that names that group is read all the same.
- OPEN of a key that is not there puts a record without epoch first, then reads the floor: what was
  deleted before that put is heard of, and what is deleted after it goes by its version (K7).
- Keys are counted in rounds, so their bound is one that is reached late.
- What a key tells of its last group's commit is folded in from that one's header whenever the key
  is looked at, and stored with the next change (G5).
- An OPEN or BEGIN that was begun is finished even if the one who asked goes away.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import structlog

from config.bounds import (
    TXN_COMMITS_REMEMBERED,
    TXN_KEY_DELETIONS,
    TXN_KEYS_OF_COORDINATOR,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import MetadataError, VersionConflict
from txn.errors import (
    InvalidTxnStatus,
    TooManyTransactionKeys,
    TransactionKeyNotFound,
    TransactionNotFound,
)
from txn.group import Group, new_group
from txn.key_groups import fold_commit, group_ended_error
from txn.key_holders import KeyHolder, KeyHolders
from txn.key_store import StoredKey, TransactionKeyStore
from txn.parts import TransactionParts
from txn.records import Header, KeyEpoch, TxnState
from txn.store import StoredHeader
from txn.transaction_key import (
    NO_EPOCH,
    BeginVerdict,
    IdleVerdict,
    KeyName,
    KeyRecord,
    OpenedKey,
    OpenVerdict,
    decide_begin,
    decide_idle,
    decide_open,
    key_busy_error,
    mark_used,
    name_transaction,
    new_key_record,
    note_earlier_end,
    raise_epoch,
    require_epoch,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")


class KeyedTransactions(Protocol):
    """The part of a coordinator that keys use."""

    coordinator_id: CoordinatorId

    async def begin(
        self,
        timeout_ms: int,
        owner: str | None,
        key_epoch: KeyEpoch | None = None,
        group: Group | None = None,
    ) -> TxnId:
        """A new transaction of that owner, or a group."""
        ...

    async def read_header(self, txn: TxnId) -> StoredHeader | None:
        """Read the stored header; None if there is none (any more)."""
        ...

    async def abort(self, txn: TxnId) -> TxnState | None:
        """How it ended, by this or before; None if there is none (any more)."""
        ...


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """A key as a request finds it, with what the header of its last transaction tells.

    `record` is folded (G5).  `header` is None if that is collected, or there is
    none, and may be if it was committed.
    """

    stored: StoredKey
    record: KeyRecord
    state: TxnState | None
    header: StoredHeader | None


@dataclass(slots=True)
class KeyTally:
    """Keys of one coordinator, as the last round found them and as they were made since."""

    count: int = 0
    highest_epoch: int = NO_EPOCH
    oldest_ms: int | None = None
    """When the oldest one was made."""

    def add(self, record: KeyRecord) -> None:
        """Count one."""
        self.count += 1
        self.highest_epoch = max(self.highest_epoch, record.epoch)
        made_ms = record.created_ms
        self.oldest_ms = made_ms if self.oldest_ms is None else min(self.oldest_ms, made_ms)

    def opened(self, record: KeyRecord, *, is_new: bool) -> None:
        """One has a new epoch."""
        if is_new:
            self.add(record)
        self.highest_epoch = max(self.highest_epoch, record.epoch)


class TransactionKeys:
    """The transaction keys of one coordinator."""

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        self.holders = KeyHolders()
        self.tally: KeyTally | None = None
        """None until the first round."""
        self._transactions = transactions
        self._store = TransactionKeyStore(parts.store.metadata, transactions.coordinator_id)
        self._clock = parts.clock
        self._commits: OrderedDict[TxnId, Header] = OrderedDict()
        """The headers of last groups that have committed, without winners."""
        # Callers get the failures, and may be gone.
        self._tasks = BackgroundTasks(expected=(Exception,))

    async def close(self) -> None:
        """Remember nobody, and finish what was begun."""
        self.holders.clear()
        await self._tasks.wait()

    # What clients ask for

    async def open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None = None
    ) -> OpenedKey:
        """A new epoch, when all of older ones has ended (K1, K2); `holder` has it from then on.

        One that a newer OPEN overtook meanwhile is refused: that one did not find its holder (K5).
        Raises `TransactionKeyFenced`, `TooManyTransactionKeys`, `MetadataError`.
        """
        if holder is not None:
            self.holders.require_capacity(name, holder)
        record = await self.run_shielded(self._open(name, presented, opener, holder))
        if holder is not None:
            await self._remember_holder(name, record.epoch, holder)
        last = record.before
        if last is None:
            return OpenedKey(record.epoch, None, None, record.committed)
        return OpenedKey(record.epoch, last.txn, last.ended, record.committed)

    async def attach(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """That connection uses the key under its present epoch (K5).

        Raises `TransactionKeyFenced`, `TooManyTransactionKeys`, `MetadataError`.
        """
        self.holders.require_capacity(name, holder)
        await self._remember_holder(name, epoch, holder)

    async def begin(self, name: KeyName, epoch: int, beginner: str, timeout_ms: int) -> TxnId:
        """Begin the key's one transaction (K3).

        Raises `TransactionKeyFenced`, `InvalidTxnStatus` while another one is open,
        `TooManyTransactions`, `MetadataError`.
        """
        return await self.run_shielded(self._begin(name, epoch, beginner, timeout_ms))

    async def begin_group(self, now: KeySnapshot, nonce: str, timeout_ms: int) -> TxnId | None:
        """The key's open group of that nonce, or a new one (G3); None: read the key again.

        Raises `InvalidTxnStatus` if that nonce has had its group, or while something else is open;
        `TooManyTransactions`, `MetadataError`.
        """
        return await self._begin_one(now, nonce, timeout_ms, new_group(nonce))

    async def read_snapshot(self, name: KeyName, epoch: int) -> KeySnapshot:
        """The key now, and its last transaction (G5, K6).

        Raises `TransactionKeyFenced`, `MetadataError`.
        """
        while True:
            stored = await self._store.read(name)
            record = require_epoch(name, None if stored is None else stored.record, epoch)
            assert stored is not None, "a record that has the epoch is stored"
            last = record.last
            if last is None or last.ended is not None or not last.is_group:
                return KeySnapshot(stored, record, await self.last_state(record), None)
            commit = self._commits.get(last.txn)
            if commit is not None:
                return KeySnapshot(
                    stored, fold_commit(record, last.txn, commit), commit.state, None
                )
            header = await self._transactions.read_header(last.txn)
            if header is not None:
                self._remember(header)
                record = fold_commit(record, last.txn, header.header)
                return KeySnapshot(stored, record, header.header.state, header)
            # It was collected, so the record tells by now, unless nobody may know (K8).
            again = await self._store.read(name)
            if again is not None and again.version == stored.version:
                return KeySnapshot(stored, record, None, None)

    async def find(self, name: KeyName) -> KeyRecord | None:
        """The record, under whatever epoch.  Raises `MetadataError`."""
        stored = await self._store.read(name)
        return None if stored is None else stored.record

    async def require(self, name: KeyName, epoch: int) -> KeyRecord:
        """The record of a key that has that epoch (K4, K5, K6).  Raises `TransactionKeyFenced`."""
        stored = await self._store.read(name)
        return require_epoch(name, None if stored is None else stored.record, epoch)

    async def under(self, name: KeyName, epoch: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do the work under that epoch and return its result (K4).

        If its transaction has ended meanwhile, or is collected already, a newer epoch is why, and
        is told.
        Raises `TransactionKeyFenced`, and what `work` does.
        """
        await self.require(name, epoch)
        try:
            return await work()
        except (InvalidTxnStatus, TransactionNotFound):
            await self.require(name, epoch)
            raise

    # What operators ask for

    async def get(self, name: KeyName) -> StoredKey:
        """One key.  Raises `TransactionKeyNotFound`."""
        stored = await self._store.read(name)
        if stored is None:
            raise TransactionKeyNotFound(
                f"There is no transaction key {name.key!r} of {name.owner or 'anonymous'!r}: see "
                "the list."
            )
        return stored

    async def page(self, after: str, limit: int) -> tuple[Sequence[StoredKey], str]:
        """Keys whose encoded name is above `after`; where the next page begins, "" if nowhere."""
        return await self._store.page(after, limit)

    async def last_state(self, record: KeyRecord) -> TxnState | None:
        """Return the state of the key's last transaction; None if there is none, or unknown."""
        last = record.last
        if last is None or last.ended is not None:
            return None if last is None else last.ended
        header = await self._transactions.read_header(last.txn)
        return None if header is None else header.header.state

    async def delete(self, name: KeyName) -> None:
        """End what is open, and forget the key; its next epoch is above all that it had (K7).

        Raises `TransactionKeyNotFound`, `TooManyTransactionKeys`.
        """
        for _ in range(TXN_KEY_DELETIONS):
            stored = await self.get(name)
            if await self.last_state(stored.record) is TxnState.OPEN and stored.record.last:
                await self._transactions.abort(stored.record.last.txn)
            try:
                await self._delete(stored)
            except VersionConflict:
                continue
            if self.tally is not None:
                self.tally.count = max(0, self.tally.count - 1)
            return
        raise TooManyTransactionKeys(
            f"Transaction key {name.key!r} was used again and again meanwhile: stop its clients."
        )

    # Rounds

    async def collect(self, retention_ms: int) -> None:
        """One round: delete what is idle, end what an OPEN that was cut short left open (K2, K7).

        Raises `MetadataError`; of a single key it is logged.
        """
        due_ms, tally = self._clock.now_ms() - retention_ms, KeyTally()
        async for page in self._store.pages():
            for stored in page:
                try:
                    if await self._collect(stored, due_ms):
                        continue
                except VersionConflict:
                    log.debug("transaction_key_used_meanwhile", key=stored.name.key)
                except MagnetarError as error:
                    log.warning(
                        "transaction_key_not_collected", key=stored.name.key, error=str(error)
                    )
                tally.add(stored.record)
        self.tally = tally

    async def _collect(self, stored: StoredKey, due_ms: int) -> bool:
        """Whether it was deleted."""
        record = stored.record
        if record.before is not None and record.transaction is None and not record.before.ended:
            await self._transactions.abort(record.before.txn)
        if record.last_used_ms > due_ms:
            return False
        last, held = await self.last_state(record), self.holders.is_held(stored.name)
        verdict = decide_idle(record, due_ms, held=held, last=last)
        if verdict is IdleVerdict.TOUCH:
            await self._store.change(stored, mark_used(record, self._clock.now_ms()))
        if verdict is not IdleVerdict.DELETE:
            return False
        if not await self._delete(stored, unless_held=True):
            return False
        log.info("transaction_key_collected", key=stored.name.key, epoch=record.epoch)
        return True

    async def _delete(self, stored: StoredKey, *, unless_held: bool = False) -> bool:
        """The floor first, then the key, on the version read (K7); whether it was deleted.

        One who attached since the version was read has changed nothing of it, but is remembered.
        Raises `VersionConflict`.
        """
        if stored.record.epoch != NO_EPOCH:
            await self._store.raise_floor(stored.record.epoch)
        if unless_held and self.holders.is_held(stored.name):
            return False
        await self._store.delete(stored)
        self.holders.close_older(stored.name, None)
        return True

    # Within

    async def _remember_holder(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """Remember the connection before reading the epoch, so that a later OPEN finds it (K5).

        A connection that is known already keeps its epoch until the read.
        Raises `TransactionKeyFenced`, `MetadataError`.
        """
        is_new = self.holders.epoch_of(name, holder) is None
        if is_new:
            self.holders.remember(name, epoch, holder)
        try:
            await self.require(name, epoch)
        except BaseException:
            if is_new:
                self.holders.forget(name, holder)
            raise
        self.holders.renew(name, epoch, holder)

    async def _open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None
    ) -> KeyRecord:
        """The record under the new epoch, with how the last transaction before it has ended."""
        record = await self._raise_epoch(name, presented, opener)
        record = await self._abort_earlier(name, record)
        self.holders.close_older(name, record.epoch, holder)
        return record

    async def _raise_epoch(self, name: KeyName, presented: int, opener: str) -> KeyRecord:
        """K1: raise the epoch on the version read."""
        while True:
            stored = await self._store.read(name)
            verdict = decide_open(None if stored is None else stored.record, presented, opener)
            if verdict is OpenVerdict.STALE:
                require_epoch(name, None if stored is None else stored.record, presented)
            if verdict is OpenVerdict.AGAIN and stored is not None:
                return stored.record
            try:
                if stored is None:
                    self._require_capacity()
                    stored = await self._store.create(name, new_key_record(self._clock.now_ms()))
                is_new = stored.record.epoch == NO_EPOCH
                floor = await self._store.read_floor() if is_new else NO_EPOCH
                record = raise_epoch(stored.record, floor, opener, self._clock.now_ms())
                await self._store.change(stored, record)
            except VersionConflict:
                continue
            if self.tally is not None:
                self.tally.opened(record, is_new=is_new)
            return record

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        """K2: abort what an earlier epoch left open; what was committed meanwhile stays so."""
        last = record.before
        if last is None or last.ended:
            return record
        ended = await self._transactions.abort(last.txn)
        if last.is_group and ended is TxnState.COMMITTED:
            header = await self._transactions.read_header(last.txn)
            if header is not None:
                return note_earlier_end(fold_commit(record, last.txn, header.header), ended)
            ended = None
        if ended is None:
            # Its header was collected, so the record tells by now (K8, G5).
            stored = await self._store.read(name)
            now = None if stored is None else stored.record.before
            ended = now.ended if now is not None and now.txn == last.txn else None
            if stored is not None:
                record = replace(record, committed=stored.record.committed)
        return note_earlier_end(record, ended)

    async def _begin(self, name: KeyName, epoch: int, beginner: str, timeout_ms: int) -> TxnId:
        """K3: put the header, then have the key name it, on the version on which it may.

        Whatever is asked is asked of what is stored (K6).
        """
        while True:
            now = await self.read_snapshot(name, epoch)
            txn = await self._begin_one(now, beginner, timeout_ms)
            if txn is not None:
                return txn

    async def _begin_one(
        self, now: KeySnapshot, beginner: str, timeout_ms: int, group: Group | None = None
    ) -> TxnId | None:
        """One try of K3, and G3; None: the key was used meanwhile."""
        name, record, is_group = now.stored.name, now.record, group is not None
        verdict = decide_begin(record, beginner, now.state, is_group=is_group)
        if verdict is BeginVerdict.SPENT:
            raise group_ended_error(name, beginner)
        if verdict is not BeginVerdict.BEGIN and record.last is not None:
            if verdict is BeginVerdict.AGAIN:
                return record.last.txn
            raise key_busy_error(name, record.last.txn)
        txn = await self._transactions.begin(
            timeout_ms, name.owner or None, KeyEpoch(name.key, record.epoch), group
        )
        seen = StoredKey(name, record, now.stored.version)
        return txn if await self._name_in_key(seen, txn, beginner, is_group=is_group) else None

    async def _name_in_key(
        self, stored: StoredKey, txn: TxnId, beginner: str, *, is_group: bool = False
    ) -> bool:
        """Whether the key names it, on the version read; if not it is aborted (K3).

        What the last group committed is folded in by the same change (G5).
        """
        record = name_transaction(
            stored.record, txn, beginner, self._clock.now_ms(), is_group=is_group
        )
        try:
            await self._store.change(stored, record)
        except VersionConflict:
            await self._transactions.abort(txn)
            return False
        except MetadataError:
            if await self._is_named(stored.name, txn):
                return True
            await self._transactions.abort(txn)
            raise
        return True

    async def _is_named(self, name: KeyName, txn: TxnId) -> bool:
        """Read whether the key names it, after a write of unknown outcome; False if unreadable."""
        try:
            stored = await self._store.read(name)
        except MetadataError:
            return False
        named = None if stored is None else stored.record.transaction
        return named is not None and named.txn == txn

    def _remember(self, stored: StoredHeader) -> None:
        """Remember what a group has committed, if it has."""
        group = stored.header.group
        if stored.header.state is not TxnState.COMMITTED or group is None or group.commit is None:
            return
        commit = replace(group.commit, winners={}, totals=None)
        self._commits[stored.txn] = replace(stored.header, group=replace(group, commit=commit))
        if len(self._commits) > TXN_COMMITS_REMEMBERED:
            self._commits.popitem(last=False)

    def _require_capacity(self) -> None:
        count = 0 if self.tally is None else self.tally.count
        if count >= TXN_KEYS_OF_COORDINATOR:
            raise TooManyTransactionKeys(
                f"This coordinator has {count} transaction keys, as many as it may "
                "have: delete some, or lower transaction_key_retention_s."
            )

    async def run_shielded(self, work: Coroutine[object, object, T]) -> T:
        """Run the work in a task, which goes on if the caller is cancelled; return its result."""
        return await self._tasks.finish(work)
