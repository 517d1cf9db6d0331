"""The transaction keys of one coordinator.

Rules (K, G: `docs/transactions.md`):

- K1: OPEN raises the epoch on the version read.
- K2: it aborts what an older epoch left open before it is answered; a round does so for an OPEN
  that was interrupted.
- K3: BEGIN puts the header, then has the key name the transaction, on the version read.
- K4: work under an epoch that meets an ended transaction checks the epoch again.
- K5: a connection is remembered before the epoch is read.
- K6: every request is decided on the stored record.  Nothing of a key is in memory but its holders,
  and what a last group has committed, which is final.
- K7: a key is deleted after the floor was raised.  OPEN of a key that does not exist puts a record
  without epoch first, and then reads the floor.
- G5: a last group's commit is folded into the key whenever it is read, and stored with its next
  change.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
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
    TransactionNotFound,
)
from txn.group import Group, new_group
from txn.key_groups import fold_commit, group_ended_error
from txn.key_holders import KeyHolder, KeyHolders
from txn.key_store import StoredKey, TransactionKeyStore
from txn.owner_shares import OwnerShares
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
    key_not_found,
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
        """Begin a transaction, or a group, of an owner."""
        ...

    async def read_header(self, txn: TxnId) -> StoredHeader | None:
        """Read the stored header; None if there is none."""
        ...

    async def abort(self, txn: TxnId) -> TxnState | None:
        """Abort a transaction unless it has ended; return its end, None if it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class KeySnapshot:
    """A key as a request finds it, with the state of its last transaction.

    `record` is folded (G5).  `header` is that of the last transaction, if it is a group; None if
    that was collected or noted, and perhaps if it has committed.
    """

    stored: StoredKey
    record: KeyRecord
    state: TxnState | None
    header: StoredHeader | None


@dataclass(slots=True)
class KeyTally:
    """The count of a coordinator's keys: those that the last round found, and new ones since."""

    count: int = 0
    highest_epoch: int = NO_EPOCH
    oldest_ms: int | None = None
    """The time at which the oldest key was created."""
    shares: OwnerShares = field(default_factory=OwnerShares)

    def add(self, owner: str, record: KeyRecord) -> None:
        """Count a key of an owner."""
        self.count += 1
        self.shares.add(owner)
        self.highest_epoch = max(self.highest_epoch, record.epoch)
        made_ms = record.created_ms
        self.oldest_ms = made_ms if self.oldest_ms is None else min(self.oldest_ms, made_ms)

    def deleted(self, owner: str) -> None:
        """Count a key of an owner no more."""
        self.count = max(0, self.count - 1)
        self.shares.remove(owner)

    def opened(self, owner: str, record: KeyRecord, *, is_new: bool) -> None:
        """Take in that a key of an owner has a new epoch."""
        if is_new:
            self.add(owner, record)
        self.highest_epoch = max(self.highest_epoch, record.epoch)


class TransactionKeys:
    """The transaction keys of one coordinator.

    An OPEN or BEGIN that was begun is finished even if its caller is cancelled.
    """

    def __init__(self, transactions: KeyedTransactions, parts: TransactionParts) -> None:
        self.holders = KeyHolders()
        self.tally: KeyTally | None = None
        """None until the first round."""
        self._transactions = transactions
        self._store = TransactionKeyStore(parts.store.metadata, transactions.coordinator_id)
        self._clock = parts.clock
        self._commits: OrderedDict[TxnId, Header] = OrderedDict()
        """Headers of last groups that have committed, without winners; no write changes them."""
        # Callers get the failures, and may be gone.
        self._tasks = BackgroundTasks(expected=(Exception,))

    async def close(self) -> None:
        """Forget all holders, and finish the requests in progress."""
        self.holders.clear()
        await self._tasks.wait()

    # Requests of clients

    async def open(
        self, name: KeyName, presented: int, opener: str, holder: KeyHolder | None = None
    ) -> OpenedKey:
        """Open a key: return a new epoch, after all of older ones has ended (K1, K2).

        `holder` then holds it.  An OPEN that a newer one overtook is refused, as that one did not
        find its holder (K5).  Raises `TransactionKeyFenced`, `TooManyTransactionKeys`,
        `MetadataError`.
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
        """Have a connection hold the key under its present epoch (K5).

        Raises `TransactionKeyFenced`, `TooManyTransactionKeys`, `MetadataError`.
        """
        self.holders.require_capacity(name, holder)
        await self._remember_holder(name, epoch, holder)

    async def begin(self, name: KeyName, epoch: int, beginner: str, timeout_ms: int) -> TxnId:
        """Begin the one transaction that a key may have open (K3).

        Raises `TransactionKeyFenced`, `InvalidTxnStatus` while another one is open,
        `TooManyTransactions`, `MetadataError`.
        """
        return await self.run_shielded(self._begin(name, epoch, beginner, timeout_ms))

    async def begin_group(self, now: KeySnapshot, nonce: str, timeout_ms: int) -> TxnId | None:
        """The key's open group of a nonce, or a new one (G3); None: read the key again.

        Raises `InvalidTxnStatus` if the group of this nonce has ended, or another transaction is
        open; `TooManyTransactions`, `MetadataError`.
        """
        return await self._begin_one(now, nonce, timeout_ms, new_group(nonce))

    async def read_snapshot(self, name: KeyName, epoch: int) -> KeySnapshot:
        """Read a key under an epoch, and the state of its last transaction (G5, K6).

        Raises `TransactionKeyFenced`, `MetadataError`.
        """
        while True:
            # K6: read even if the commit of its last group is remembered.
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
                # G5: stored with the next change of the key.
                record = fold_commit(record, last.txn, header.header)
                return KeySnapshot(stored, record, header.header.state, header)
            # The header was collected, so its end is noted in the record by now (K8).  If the
            # record has not changed, the end is lost.
            again = await self._store.read(name)
            if again is not None and again.version == stored.version:
                return KeySnapshot(stored, record, None, None)

    async def find(self, name: KeyName) -> KeyRecord | None:
        """Read the record of a key, whatever its epoch.  Raises `MetadataError`."""
        stored = await self._store.read(name)
        return None if stored is None else stored.record

    async def require(self, name: KeyName, epoch: int) -> KeyRecord:
        """Read the record of a key that has this epoch (K4, K5, K6).

        Raises `TransactionKeyFenced`, `MetadataError`.
        """
        # K6: from the store, as another leader may have raised the epoch.
        stored = await self._store.read(name)
        return require_epoch(name, None if stored is None else stored.record, epoch)

    async def under(self, name: KeyName, epoch: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` under an epoch and return its result (K4).

        Raises `TransactionKeyFenced`, and the errors of `work`.
        """
        await self.require(name, epoch)
        try:
            return await work()
        except (InvalidTxnStatus, TransactionNotFound):
            # K4: if a newer epoch has ended the transaction, the caller has to know that it is
            # fenced.
            await self.require(name, epoch)
            raise

    # Requests of operators

    async def get(self, name: KeyName) -> StoredKey:
        """Read a key.  Raises `TransactionKeyNotFound`."""
        stored = await self._store.read(name)
        if stored is None:
            raise key_not_found(name)
        return stored

    async def page(self, after: str, limit: int) -> tuple[Sequence[StoredKey], str]:
        """Keys whose encoded name is above `after`; and `after` for the next page, "" if none."""
        return await self._store.page(after, limit)

    async def last_state(self, record: KeyRecord) -> TxnState | None:
        """The state of the key's last transaction; None if there is none, or it is unknown."""
        last = record.last
        if last is None or last.ended is not None:
            return None if last is None else last.ended
        header = await self._transactions.read_header(last.txn)
        return None if header is None else header.header.state

    async def delete(self, name: KeyName) -> None:
        """Abort the key's open transaction, and delete the key (K7).

        A key of this name that is opened later has higher epochs.  Raises
        `TransactionKeyNotFound`, `TooManyTransactionKeys`.
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
                self.tally.deleted(name.owner)
            return
        raise TooManyTransactionKeys(
            f"Transaction key {name.key!r} was used again and again meanwhile: stop its clients."
        )

    # Rounds

    async def collect(self, retention_ms: int) -> None:
        """Run one round: delete idle keys (K7), finish OPENs that were interrupted (K2).

        Raises `MetadataError` when keys cannot be listed; errors of single keys are logged.
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
                tally.add(stored.name.owner, stored.record)
        self.tally = tally

    async def _collect(self, stored: StoredKey, due_ms: int) -> bool:
        """Delete a key if it is idle; whether it was deleted."""
        record = stored.record
        # K2: an OPEN that was interrupted may have left the earlier transaction open.
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
        """Raise the floor, then delete the key on the version read (K7); whether it was deleted.

        Raises `VersionConflict`.
        """
        # K7: the floor first.  A crash in between leaves a floor that is too high, which is safe.
        if stored.record.epoch != NO_EPOCH:
            await self._store.raise_floor(stored.record.epoch)
        # K7: an ATTACH since the read has not changed the record, but its holder is known by now.
        if unless_held and self.holders.is_held(stored.name):
            return False
        await self._store.delete(stored)
        self.holders.close_older(stored.name, None)
        return True

    # Internals

    async def _remember_holder(self, name: KeyName, epoch: int, holder: KeyHolder) -> None:
        """Remember a connection, and check the epoch after that (K5).

        A connection that is known already keeps its epoch until the read.
        Raises `TransactionKeyFenced`, `MetadataError`.
        """
        # K5: in this order, so that an OPEN which raises the epoch meanwhile finds the connection.
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
        """Raise the epoch and end the older ones; the record, with the end of the last before."""
        record = await self._raise_epoch(name, presented, opener)
        record = await self._abort_earlier(name, record)
        self.holders.close_older(name, record.epoch, holder)
        return record

    async def _raise_epoch(self, name: KeyName, presented: int, opener: str) -> KeyRecord:
        """Raise the epoch on the version read (K1, K7)."""
        while True:
            stored = await self._store.read(name)
            verdict = decide_open(None if stored is None else stored.record, presented, opener)
            if verdict is OpenVerdict.STALE:
                require_epoch(name, None if stored is None else stored.record, presented)
            if verdict is OpenVerdict.AGAIN and stored is not None:
                return stored.record
            try:
                if stored is None:
                    self._require_capacity(name.owner)
                    stored = await self._store.create(name, new_key_record(self._clock.now_ms()))
                is_new = stored.record.epoch == NO_EPOCH
                # K7: after the put.  A deletion before it has raised the floor; a later one fails
                # this change.
                floor = await self._store.read_floor() if is_new else NO_EPOCH
                record = raise_epoch(stored.record, floor, opener, self._clock.now_ms())
                # K1: of two OPENs at once one fails, and decides anew.
                await self._store.change(stored, record)
            except VersionConflict:
                continue
            if self.tally is not None:
                self.tally.opened(name.owner, record, is_new=is_new)
            return record

    async def _abort_earlier(self, name: KeyName, record: KeyRecord) -> KeyRecord:
        """Abort the transaction that an earlier epoch left open, unless it has committed (K2)."""
        # K2: before the answer, so that nothing of an older epoch commits after it.
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
            # The header was collected, so the record has its end by now (K8, G5).
            stored = await self._store.read(name)
            now = None if stored is None else stored.record.before
            ended = now.ended if now is not None and now.txn == last.txn else None
            if stored is not None:
                record = replace(record, committed=stored.record.committed)
        return note_earlier_end(record, ended)

    async def _begin(self, name: KeyName, epoch: int, beginner: str, timeout_ms: int) -> TxnId:
        """Begin a transaction, with retries while the key changes (K3, K6)."""
        while True:
            # K6: each try decides on the stored record.
            now = await self.read_snapshot(name, epoch)
            txn = await self._begin_one(now, beginner, timeout_ms)
            if txn is not None:
                return txn

    async def _begin_one(
        self, now: KeySnapshot, beginner: str, timeout_ms: int, group: Group | None = None
    ) -> TxnId | None:
        """Try once to begin a transaction or group (K3, G3); None: the key has changed."""
        name, record, is_group = now.stored.name, now.record, group is not None
        verdict = decide_begin(record, beginner, now.state, is_group=is_group)
        if verdict is BeginVerdict.SPENT:
            raise group_ended_error(name, beginner)
        if verdict is not BeginVerdict.BEGIN and record.last is not None:
            if verdict is BeginVerdict.AGAIN:
                return record.last.txn
            raise key_busy_error(name, record.last.txn)
        # K3: the header first, so that a key never names a transaction without one.
        txn = await self._transactions.begin(
            timeout_ms, name.owner or None, KeyEpoch(name.key, record.epoch), group
        )
        seen = StoredKey(name, record, now.stored.version)
        return txn if await self._name_in_key(seen, txn, beginner, is_group=is_group) else None

    async def _name_in_key(
        self, stored: StoredKey, txn: TxnId, beginner: str, *, is_group: bool = False
    ) -> bool:
        """Have the key name a transaction, on the version read (K3); else abort it.

        Whether the key names it.  The commit of the last group is stored by the same change (G5).
        """
        record = name_transaction(
            stored.record, txn, beginner, self._clock.now_ms(), is_group=is_group
        )
        try:
            await self._store.change(stored, record)
        except VersionConflict:
            # K3: a transaction that the key does not name must not stay open.
            await self._transactions.abort(txn)
            return False
        except MetadataError:
            if await self._is_named(stored.name, txn):
                return True
            await self._transactions.abort(txn)
            raise
        return True

    async def _is_named(self, name: KeyName, txn: TxnId) -> bool:
        """Whether the key names a transaction, after a write of unknown outcome.

        False also if the key cannot be read.
        """
        try:
            stored = await self._store.read(name)
        except MetadataError:
            return False
        named = None if stored is None else stored.record.transaction
        return named is not None and named.txn == txn

    def _remember(self, stored: StoredHeader) -> None:
        """Remember the commit of a group, if it has committed."""
        group = stored.header.group
        if stored.header.state is not TxnState.COMMITTED or group is None or group.commit is None:
            return
        commit = replace(group.commit, winners={}, totals=None)
        self._commits[stored.txn] = replace(stored.header, group=replace(group, commit=commit))
        if len(self._commits) > TXN_COMMITS_REMEMBERED:
            self._commits.popitem(last=False)

    def _require_capacity(self, owner: str) -> None:
        if self.tally is None:
            return
        # Keys are counted in rounds, so there may be some more than the bound.
        count, shares = self.tally.count, self.tally.shares
        if count >= TXN_KEYS_OF_COORDINATOR:
            raise TooManyTransactionKeys(
                f"This coordinator has {count} transaction keys, as many as it may "
                "have: delete some, or lower transaction_key_retention_s."
            )
        if shares.is_used_up(owner, TXN_KEYS_OF_COORDINATOR - count):
            own = shares.count(owner)
            raise TooManyTransactionKeys(
                f"The role of this client has {own} transaction keys of this coordinator, and must "
                "leave as many to others: delete some, or lower transaction_key_retention_s."
            )

    async def run_shielded(self, work: Coroutine[object, object, T]) -> T:
        """Run the work in a task, which goes on if the caller is cancelled; return its result."""
        return await self._tasks.finish(work)
