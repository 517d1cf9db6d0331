"""The groups of one coordinator: their attempts, commits, aborts and deadlines.

Rules (K, G: `docs/transactions.md`):

- K6: every request is decided on the stored key and the stored header of its last transaction, and
  a group is changed on the version read, so that two leaders at once do no harm.
- G2: an index is given once, after it was reserved.  In memory are only indexes that this process
  has reserved and not given yet; no other leader gives these.
- G4: a commit is one write, on the version read, with winners that are attempts of the group.
- G6: a batch that was committed before is not committed again, and its open group is aborted.
- G7: an abort is about the open transaction of its epoch, and it is no error if there is none.
- G8: the deadline of an open group is raised on the version read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from config.bounds import TXN_EXTENSION_SLACK, TXN_GROUP_HEADER_BYTES, TXN_TIMEOUT_MAX_MS
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import VersionConflict
from txn import records
from txn.errors import InvalidGroup
from txn.group import (
    Batch,
    Group,
    GroupCommit,
    require_nonce,
    require_winners,
    with_next_block,
    with_totals,
)
from txn.header import (
    EndVerdict,
    bounded_timeout_ms,
    is_owner,
    not_open_error,
    raise_deadline,
    refusal_error,
)
from txn.key_groups import (
    CommitVerdict,
    decide_commit,
    group_ended_error,
    group_of_batch,
    has_other_positions,
    is_done,
    named_group,
    other_positions_error,
)
from txn.parts import TransactionParts
from txn.records import Header, KeyEpoch, TxnState
from txn.store import StoredHeader
from txn.transaction_key import KeyName, key_busy_error, require_key_epoch
from txn.transaction_keys import KeySnapshot, TransactionKeys


class BegunAttempt(NamedTuple):
    """The answer to BEGIN_ATTEMPT: an attempt, and the present deadline of its group."""

    attempt: TxnId
    deadline_ms: int


class CommittedGroup(NamedTuple):
    """The answer to COMMIT_GROUP.

    `done`: the batch was committed before, and this group is aborted.  `group` has the batch, if
    that one is known.
    """

    done: bool
    group: TxnId | None


class GroupCounters(Protocol):
    """The counters that groups raise."""

    attempts: int
    groups_done: int


class GroupedTransactions(Protocol):
    """The part of a coordinator that groups use."""

    @property
    def counters(self) -> GroupCounters:
        """The counters of this coordinator."""
        ...

    def find(self, txn: TxnId) -> StoredHeader | None:
        """An open transaction that is known here."""
        ...

    async def read_header(self, txn: TxnId) -> StoredHeader | None:
        """Read the stored header; None if there is none."""
        ...

    async def change_header(self, stored: StoredHeader, header: Header) -> StoredHeader:
        """Replace the header of an open group on the version read."""
        ...

    async def commit_group(self, stored: StoredHeader, group: Group) -> None:
        """Commit a group on the version read."""
        ...

    async def abort(self, txn: TxnId) -> TxnState | None:
        """Abort a transaction unless it has ended; return its end, None if it is gone."""
        ...

    async def abort_open(self, txn: TxnId) -> bool:
        """Abort a transaction if it is open; whether this call aborted it."""
        ...


class _GroupEnded(Exception):
    """The group has ended since the key was read."""


@dataclass(slots=True)
class _ReservedIndexes:
    """The indexes that were reserved here and not given yet: from `next` to below `end`."""

    next: int = 1
    end: int = 1
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def left(self) -> int:
        """The number of these indexes."""
        return self.end - self.next


class TransactionGroups:
    """The groups of one coordinator's keys: their attempts, commits, aborts and deadlines.

    A COMMIT or BEGIN that was begun is finished even if its caller is cancelled.

    A raised deadline has some slack (TXN_EXTENSION_SLACK), so that attempts which begin shortly
    after need no write to raise it again.
    """

    def __init__(
        self, transactions: GroupedTransactions, keys: TransactionKeys, parts: TransactionParts
    ) -> None:
        self._transactions = transactions
        self._keys = keys
        self._clock = parts.clock
        self._indexes: dict[TxnId, _ReservedIndexes] = {}
        self._beginning: dict[tuple[KeyName, int, str], asyncio.Future[None]] = {}
        """The first BEGINs of groups, by key, epoch and nonce; later requests wait for them."""

    def close(self) -> None:
        """Forget all reserved indexes."""
        self._indexes.clear()

    def created(self, txn: TxnId, group: Group) -> None:
        """Take in a group that was created here, with its first reserved indexes (G2)."""
        self._indexes[txn] = _ReservedIndexes(1, group.reserved + 1)

    def forget(self, txn: TxnId) -> None:
        """Forget the reserved indexes of a group that has ended."""
        self._indexes.pop(txn, None)

    # Requests of clients

    async def begin_attempt(
        self, name: KeyName, epoch: int, nonce: str, timeout_ms: int, batch: Batch | None = None
    ) -> BegunAttempt | None:
        """Begin an attempt in the group of a nonce; begin the group if there is none (G2, G3).

        None: the batch was committed before, so nothing is begun (G6).
        Raises `TransactionKeyFenced`, `InvalidTxnStatus`, `InvalidGroup`, `TooManyTransactions`,
        `MetadataError`.
        """
        require_nonce(nonce)
        return await self._keys.run_shielded(
            self._begin_in_turn(name, epoch, nonce, timeout_ms, batch)
        )

    async def commit(
        self,
        name: KeyName,
        epoch: int,
        nonce: str,
        group: TxnId | None,
        commit: GroupCommit,
        winners: Sequence[TxnId],
    ) -> CommittedGroup:
        """Commit the key's open group of a nonce with these winners (G4).

        `group` None: no attempt was begun, so a group is begun to commit it.  Raises as
        `begin_attempt`.
        """
        require_nonce(nonce)
        return await self._keys.run_shielded(
            self._commit(name, epoch, nonce, group, commit, winners)
        )

    async def abort(self, name: KeyName, epoch: int) -> bool:
        """Abort the open transaction of an epoch, if any; whether this call did (G7).

        Raises `MetadataError`.
        """
        record = await self._keys.find(name)
        # G7: a transaction of a newer epoch is left alone.
        if record is None or record.epoch != epoch or record.transaction is None:
            return False
        if record.transaction.ended is not None:
            return False
        return await self._transactions.abort_open(record.transaction.txn)

    async def extend(self, name: KeyName, epoch: int, group: TxnId, timeout_ms: int) -> int:
        """Raise the deadline of a group to `timeout_ms` from now; return its deadline (G8).

        Raises `TransactionKeyFenced`, `InvalidTxnStatus`, `TransactionNotFound`,
        `InvalidTransactionKey`, `MetadataError`.
        """
        return await self._keys.under(
            name, epoch, lambda: self._extend(name, epoch, group, timeout_ms)
        )

    # Internals

    async def _begin_in_turn(
        self, name: KeyName, epoch: int, nonce: str, timeout_ms: int, batch: Batch | None
    ) -> BegunAttempt | None:
        """Begin an attempt, after the first request for the same group, if that is in progress."""
        # Tasks of a batch start at the same time.  The first request reads the last header of the
        # key, which may be large, and begins the group; the others find that group.
        which = (name, epoch, nonce)
        first = self._beginning.get(which)
        if first is not None:
            await asyncio.wait((first,))
            return await self._begin_attempt(name, epoch, nonce, timeout_ms, batch)
        first = self._beginning[which] = asyncio.get_running_loop().create_future()
        try:
            return await self._begin_attempt(name, epoch, nonce, timeout_ms, batch)
        finally:
            del self._beginning[which]
            first.set_result(None)

    async def _begin_attempt(
        self, name: KeyName, epoch: int, nonce: str, timeout_ms: int, batch: Batch | None
    ) -> BegunAttempt | None:
        while True:
            # K6: each try decides on the stored key.
            now = await self._keys.read_snapshot(name, epoch)
            if batch is not None and is_done(now.record, batch):
                # G6: nothing is written again.
                self._transactions.counters.groups_done += 1
                return None
            txn = await self._keys.begin_group(now, nonce, self._with_slack_ms(timeout_ms))
            if txn is None:
                continue
            try:
                begun = await self._give_attempt(txn, timeout_ms)
            except _GroupEnded:
                continue  # read the key again, which has its outcome
            self._transactions.counters.attempts += 1
            return begun

    async def _give_attempt(self, txn: TxnId, timeout_ms: int) -> BegunAttempt:
        """Give an index to an attempt (G2), in a group that stays open long enough (G8).

        Raises `_GroupEnded`, `InvalidGroup`, `MetadataError`.
        """
        indexes = self._indexes.setdefault(txn, _ReservedIndexes())
        until_ms = self._clock.now_ms() + bounded_timeout_ms(timeout_ms)
        # Requests for one group change its header one after the other, and do not conflict here.
        async with indexes.changing:
            stored = self._transactions.find(txn)
            try:
                while stored is None or not indexes.left or self._must_extend(stored, until_ms):
                    stored = await self._reserve_or_extend(txn, indexes, until_ms)
            except BaseException:
                if self._transactions.find(txn) is None:
                    self.forget(txn)  # its end would not be noticed here
                raise
            # G2: each index is given once.
            index = indexes.next
            indexes.next += 1
            return BegunAttempt(txn.attempt_of(index), stored.header.deadline_ms)

    async def _reserve_or_extend(
        self, txn: TxnId, indexes: _ReservedIndexes, until_ms: int
    ) -> StoredHeader | None:
        """Reserve a block if no index is left, and raise the deadline, by one write (G2, G8, K6).

        None: the header has changed meanwhile.  Raises as `_give_attempt`.
        """
        # K6: the header in memory may be older.
        stored = await self._transactions.read_header(txn)
        if stored is None or stored.header.state is not TxnState.OPEN:
            raise _GroupEnded
        header, group = stored.header, stored.header.group
        assert group is not None, "the key named it as a group"
        grown = group if indexes.left else with_next_block(group)
        if self._must_extend(stored, until_ms):
            header = raise_deadline(header, self._with_slack_of(until_ms), self._clock.now_ms())
        if grown is group and header is stored.header:
            return stored  # the header in memory was older
        try:
            changed = await self._transactions.change_header(stored, replace(header, group=grown))
        except VersionConflict:
            return None
        # G2: used only now that they are reserved.
        if grown is not group:
            indexes.next, indexes.end = group.reserved + 1, grown.reserved + 1
        return changed

    async def _extend(self, name: KeyName, epoch: int, group: TxnId, timeout_ms: int) -> int:
        """Raise the deadline on the version read, while the group is open (G8)."""
        owner = name.owner or None
        while True:
            stored = await self._transactions.read_header(group)
            if stored is None or not is_owner(stored.header, owner):
                raise refusal_error(group, None, EndVerdict.NOT_FOUND)
            require_key_epoch(group, stored.header, owner, KeyEpoch(name.key, epoch))
            if stored.header.state is not TxnState.OPEN:
                raise not_open_error(group, stored.header)
            if stored.header.group is None or group.attempt_index:
                raise InvalidGroup(f"{group} is no group, so its deadline stays: name a group.")
            now_ms = self._clock.now_ms()
            until_ms = now_ms + bounded_timeout_ms(timeout_ms)
            if not self._must_extend(stored, until_ms):
                return stored.header.deadline_ms
            header = raise_deadline(stored.header, self._with_slack_of(until_ms), now_ms)
            # G8: after a conflict the header is read again, as it may have ended.
            try:
                changed = await self._transactions.change_header(stored, header)
            except VersionConflict:
                continue
            return changed.header.deadline_ms

    async def _commit(
        self,
        name: KeyName,
        epoch: int,
        nonce: str,
        group: TxnId | None,
        commit: GroupCommit,
        winners: Sequence[TxnId],
    ) -> CommittedGroup:
        """Decide a commit on the stored key, and write it (G4, G6)."""
        while True:
            # K6, G4: after a conflict all is read and decided anew.
            now = await self._keys.read_snapshot(name, epoch)
            verdict = decide_commit(now.record, now.state, nonce, group, commit.batch)
            match verdict:
                case CommitVerdict.AGAIN:
                    return CommittedGroup(False, group_of_batch(now.record, commit.batch))
                case CommitVerdict.DONE:
                    return await self._answer_done(name, now, nonce, commit)
                case CommitVerdict.BUSY if now.record.last is not None:
                    raise key_busy_error(name, now.record.last.txn)
                case CommitVerdict.BEGIN:
                    if winners:
                        raise InvalidGroup(
                            f"{winners[0]} is among the winners and no group is named: name it, or "
                            "commit without winners."
                        )
                    await self._keys.begin_group(now, nonce, 0)
                    continue
                case CommitVerdict.WRITE if now.header is not None:
                    if await self._write_commit(now.header, commit, winners):
                        return CommittedGroup(False, now.header.txn)
                case _:
                    await self._keys.require(name, epoch)
                    raise group_ended_error(name, nonce)

    async def _answer_done(
        self, name: KeyName, now: KeySnapshot, nonce: str, commit: GroupCommit
    ) -> CommittedGroup:
        """Answer a commit of a batch that was committed before (G6)."""
        # G6: attempts that were begun for it all the same must not be committed.
        own = named_group(now.record, nonce)
        if own is not None and now.state is TxnState.OPEN:
            await self._transactions.abort_open(own)
        if has_other_positions(now.record, commit.batch, commit.positions):
            raise other_positions_error(name, commit.batch)
        self._transactions.counters.groups_done += 1
        return CommittedGroup(True, group_of_batch(now.record, commit.batch))

    async def _write_commit(
        self, stored: StoredHeader, commit: GroupCommit, winners: Sequence[TxnId]
    ) -> bool:
        """Write a commit on the version read; False after a conflict (G4)."""
        assert stored.header.group is not None, "the key named it as a group"
        # G4: only reserved indexes of this group.
        require_winners(stored.txn, stored.header.group, winners)
        group = replace(stored.header.group, commit=_fit_into_header(stored.header, commit))
        try:
            await self._transactions.commit_group(stored, group)
        except VersionConflict:
            return False
        return True

    def _must_extend(self, stored: StoredHeader, until_ms: int) -> bool:
        """Whether the deadline of a group is before `until_ms` and can be raised."""
        # After the clock was set back a deadline may be the latest already.
        longest_ms = self._clock.now_ms() + TXN_TIMEOUT_MAX_MS
        return stored.header.deadline_ms < min(until_ms, longest_ms)

    def _with_slack_of(self, until_ms: int) -> int:
        now_ms = self._clock.now_ms()
        return now_ms + self._with_slack_ms(until_ms - now_ms)

    def _with_slack_ms(self, timeout_ms: int) -> int:
        asked_ms = bounded_timeout_ms(timeout_ms)
        return min(asked_ms + asked_ms // TXN_EXTENSION_SLACK, TXN_TIMEOUT_MAX_MS)


def _fit_into_header(header: Header, commit: GroupCommit) -> GroupCommit:
    """Return the commit as it fits into the header, with totals in place of counts if necessary.

    Raises `InvalidGroup` if it does not fit either way.
    """
    assert header.group is not None, "it is a group"
    for each in (commit, with_totals(commit)):
        size = len(records.encode_header(replace(header, group=replace(header.group, commit=each))))
        if size <= TXN_GROUP_HEADER_BYTES:
            return each
    raise InvalidGroup(
        f"The header of this group would have {size} bytes, and {TXN_GROUP_HEADER_BYTES} is the "
        "most: commit fewer winners, segments or positions at once."
    )
