"""The groups of one coordinator: attempts begun in them, committed, aborted, extended.

Rules (G: `docs/transactions.md`):

- Whatever a request decides, it decides on what is stored of the key and of its last transaction,
  and a group is changed on the version read: two leaders at once change nothing (K6).
- In memory are only indexes that this process reserved and has not given out: each of them is its
  own, whoever else leads (G2).  They go with the group, and with the lead.
- Requests for one group change its header one after the other, so they do not conflict here.  Of
  those that come together before it is there, as of tasks that start at once, one begins it.
- A deadline that is raised is raised by TXN_EXTENSION_SLACK more than was asked for, so that the
  attempts which begin right after need no write of their own.
- A COMMIT or BEGIN that was begun is finished even if the one who asked goes away.
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
from txn.header import EndVerdict, bounded_timeout_ms, not_open_error, raise_deadline, refusal_error
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
    """The answer to BEGIN_ATTEMPT: an attempt, and until when its group is open at least."""

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
        """Read the stored header; None if there is none (any more)."""
        ...

    async def change_header(self, stored: StoredHeader, header: Header) -> StoredHeader:
        """Write an open group on the version read."""
        ...

    async def commit_group(self, stored: StoredHeader, group: Group) -> None:
        """End it on the version read."""
        ...

    async def abort(self, txn: TxnId) -> TxnState | None:
        """How it ended, by this or before; None if there is none (any more)."""
        ...

    async def abort_open(self, txn: TxnId) -> bool:
        """Whether it was aborted by this; what ended otherwise, or is gone, is fine."""
        ...


class _GroupEnded(Exception):
    """The group has ended since the key was read."""


@dataclass(slots=True)
class _ReservedIndexes:
    """Reserved here and not given out: from `next` up to `end`."""

    next: int = 1
    end: int = 1
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def left(self) -> int:
        """How many there are."""
        return self.end - self.next


class TransactionGroups:
    """The groups of one coordinator's keys: their attempts, commits, aborts and deadlines."""

    def __init__(
        self, transactions: GroupedTransactions, keys: TransactionKeys, parts: TransactionParts
    ) -> None:
        self._transactions = transactions
        self._keys = keys
        self._clock = parts.clock
        self._indexes: dict[TxnId, _ReservedIndexes] = {}
        self._beginning: dict[tuple[KeyName, int, str], asyncio.Future[None]] = {}
        """For whose first request others wait, by key, epoch and nonce."""

    def close(self) -> None:
        """Forget what was reserved."""
        self._indexes.clear()

    def created(self, txn: TxnId, group: Group) -> None:
        """This process made it, with its first indexes (G2)."""
        self._indexes[txn] = _ReservedIndexes(1, group.reserved + 1)

    def forget(self, txn: TxnId) -> None:
        """It has ended."""
        self._indexes.pop(txn, None)

    # What clients ask for

    async def begin_attempt(
        self, name: KeyName, epoch: int, nonce: str, timeout_ms: int, batch: Batch | None = None
    ) -> BegunAttempt | None:
        """An attempt in the group of that nonce, which is begun if there is none (G2, G3).

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
        """Commit the key's open group of that nonce with these winners, or begin one to (G4).

        `group` None: no attempt was begun.  Raises as `begin_attempt`.
        """
        require_nonce(nonce)
        return await self._keys.run_shielded(
            self._commit(name, epoch, nonce, group, commit, winners)
        )

    async def abort(self, name: KeyName, epoch: int) -> bool:
        """Whether what was open under that epoch is aborted by this (G7).

        Raises `MetadataError`.
        """
        record = await self._keys.find(name)
        if record is None or record.epoch != epoch or record.transaction is None:
            return False
        if record.transaction.ended is not None:
            return False
        return await self._transactions.abort_open(record.transaction.txn)

    async def extend(self, name: KeyName, epoch: int, group: TxnId, timeout_ms: int) -> int:
        """Have it open for so long from now, at least; its deadline then (G8).

        Raises `TransactionKeyFenced`, `InvalidTxnStatus`, `TransactionNotFound`,
        `InvalidTransactionKey`, `MetadataError`.
        """
        return await self._keys.under(
            name, epoch, lambda: self._extend(name, epoch, group, timeout_ms)
        )

    # Within

    async def _begin_in_turn(
        self, name: KeyName, epoch: int, nonce: str, timeout_ms: int, batch: Batch | None
    ) -> BegunAttempt | None:
        """The first finds the last header of the key, with its winners, and begins the group.

        Who came meanwhile finds that group.
        """
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
            now = await self._keys.read_snapshot(name, epoch)
            if batch is not None and is_done(now.record, batch):
                self._transactions.counters.groups_done += 1
                return None
            txn = await self._keys.begin_group(now, nonce, self._with_slack_ms(timeout_ms))
            if txn is None:
                continue
            try:
                begun = await self._give_attempt(txn, timeout_ms)
            except _GroupEnded:
                continue  # the key tells what came of it
            self._transactions.counters.attempts += 1
            return begun

    async def _give_attempt(self, txn: TxnId, timeout_ms: int) -> BegunAttempt:
        """An index that nobody else gets (G2), in a group that is open for so long (G8).

        Raises `_Ended`, `InvalidGroup`, `MetadataError`.
        """
        indexes = self._indexes.setdefault(txn, _ReservedIndexes())
        until_ms = self._clock.now_ms() + bounded_timeout_ms(timeout_ms)
        async with indexes.changing:
            stored = self._transactions.find(txn)
            try:
                while stored is None or not indexes.left or self._must_extend(stored, until_ms):
                    stored = await self._reserve_or_extend(txn, indexes, until_ms)
            except BaseException:
                if self._transactions.find(txn) is None:
                    self.forget(txn)  # nobody would tell of its end
                raise
            index = indexes.next
            indexes.next += 1
            return BegunAttempt(txn.attempt_of(index), stored.header.deadline_ms)

    async def _reserve_or_extend(
        self, txn: TxnId, indexes: _ReservedIndexes, until_ms: int
    ) -> StoredHeader | None:
        """Reserve a block if there is no index left, and raise the deadline, by one write.

        None: somebody else has changed it.  By what is stored (K6).  Raises as `_give_attempt`.
        """
        stored = await self._transactions.read_header(txn)
        if stored is None or stored.header.state is not TxnState.OPEN:
            raise _GroupEnded
        header, group = stored.header, stored.header.group
        assert group is not None, "the key named it as a group"
        grown = group if indexes.left else with_next_block(group)
        if self._must_extend(stored, until_ms):
            header = raise_deadline(header, self._with_slack_of(until_ms), self._clock.now_ms())
        if grown is group and header is stored.header:
            return stored  # what is in memory was older
        try:
            changed = await self._transactions.change_header(stored, replace(header, group=grown))
        except VersionConflict:
            return None
        if grown is not group:
            indexes.next, indexes.end = group.reserved + 1, grown.reserved + 1
        return changed

    async def _extend(self, name: KeyName, epoch: int, group: TxnId, timeout_ms: int) -> int:
        """G8: on the version read, and only while it is open."""
        owner = name.owner or None
        while True:
            stored = await self._transactions.read_header(group)
            if stored is None:
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
        """G4, G6."""
        while True:
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
        """G6: what was begun for a batch that had been committed is aborted."""
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
        """Write the commit; False after a conflict: read the key again and decide anew (G4)."""
        assert stored.header.group is not None, "the key named it as a group"
        require_winners(stored.txn, stored.header.group, winners)
        group = replace(stored.header.group, commit=_fit_into_header(stored.header, commit))
        try:
            await self._transactions.commit_group(stored, group)
        except VersionConflict:
            return False
        return True

    def _must_extend(self, stored: StoredHeader, until_ms: int) -> bool:
        """Whether its deadline is before that, and may be moved on: clocks can be set back."""
        longest_ms = self._clock.now_ms() + TXN_TIMEOUT_MAX_MS
        return stored.header.deadline_ms < min(until_ms, longest_ms)

    def _with_slack_of(self, until_ms: int) -> int:
        now_ms = self._clock.now_ms()
        return now_ms + self._with_slack_ms(until_ms - now_ms)

    def _with_slack_ms(self, timeout_ms: int) -> int:
        asked_ms = bounded_timeout_ms(timeout_ms)
        return min(asked_ms + asked_ms // TXN_EXTENSION_SLACK, TXN_TIMEOUT_MAX_MS)


def _fit_into_header(header: Header, commit: GroupCommit) -> GroupCommit:
    """Return the commit as it fits into the header: with totals instead of counts if it must be.

    Raises `InvalidGroup` before anything is written.
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
