"""Pure: what a transaction key knows of its groups, and what requests about them may do.

Rules:

- The key tells the last batch that was committed under it, and how far its inputs had been read.
  It is folded in from the group's header by the change that names the next transaction, and before
  that header is collected; until then the header tells it (G5).
- Of other queries the last TXN_KEY_QUERIES are remembered with their last batch (G5).  A batch at
  or below the last one of its query was committed before: it is done (G6).
- COMMIT_GROUP is about the one group that the key names, of that nonce.  Without any it begins one,
  to record an empty batch (G4).
"""

import enum
from dataclasses import replace

from config.bounds import TXN_KEY_QUERIES
from magnetar.protocol.txn_id import TxnId
from txn.errors import InvalidTxnStatus
from txn.group import Batch, GroupRecord
from txn.records import Header, TxnState
from txn.transaction_key import KeyName, KeyRecord, note_end


def fold_commit(record: KeyRecord, txn: TxnId, header: Header) -> KeyRecord:
    """The record with what that transaction committed, if it is its last one and a group (G5)."""
    commit = None if header.group is None else header.group.commit
    last, before = record.last, record.committed
    if commit is None or header.state is not TxnState.COMMITTED:
        return record
    if last is None or last.txn != txn or (before is not None and before.group == txn):
        return record
    told = GroupRecord(commit.batch, commit.positions, txn)
    ended = () if before is None else (before.batch,)
    others = tuple(each for each in (*ended, *record.earlier) if each.query != told.batch.query)
    return replace(record, committed=told, earlier=others[:TXN_KEY_QUERIES])


def note_and_fold(record: KeyRecord, txn: TxnId, header: Header) -> KeyRecord | None:
    """Return the key's record to store before that header goes; None: as stored (K8, G5)."""
    told = fold_commit(record, txn, header)
    told = note_end(told, txn, header.state) or told
    return None if told == record else told


def last_batch(record: KeyRecord, query: str) -> int | None:
    """The last batch of a query that was committed, by a folded record; None if none is known."""
    known = (
        record.earlier if record.committed is None else (record.committed.batch, *record.earlier)
    )
    return next((batch.number for batch in known if batch.query == query), None)


def is_done(record: KeyRecord, batch: Batch) -> bool:
    """Whether the batch was committed before, by a folded record (G6)."""
    last = last_batch(record, batch.query)
    return last is not None and batch.number <= last


def group_of_batch(record: KeyRecord, batch: Batch) -> TxnId | None:
    """The group that committed it, if it is the last one."""
    committed = record.committed
    return committed.group if committed is not None and committed.batch == batch else None


def has_other_positions(record: KeyRecord, batch: Batch, positions: str | None) -> bool:
    """Whether the last batch was committed with other positions than these (G6)."""
    last = record.committed
    if last is None or last.batch != batch or positions is None or last.positions is None:
        return False
    return last.positions != positions


def other_positions_error(name: KeyName, batch: Batch) -> InvalidTxnStatus:
    """Why a batch is neither committed nor done (G6)."""
    return InvalidTxnStatus(
        f"Batch {batch.number} of query {batch.query!r} was committed under key {name.key!r} with "
        "other positions: this one is of a checkpoint that lost its last batch, or was put back. "
        "Begin with a new checkpoint, at the positions that the key tells."
    )


class CommitVerdict(enum.Enum):
    """The outcome of deciding a COMMIT_GROUP under the present epoch."""

    BEGIN = "begin a group for it first"
    WRITE = "commit the group"
    AGAIN = "the group has committed this already"
    DONE = "the batch was committed before, by another group"
    BUSY = "something else is open"
    ENDED = "the group has ended otherwise, or is not the key's last one"


def decide_commit(
    record: KeyRecord, last: TxnState | None, nonce: str, group: TxnId | None, batch: Batch
) -> CommitVerdict:
    """Decide a COMMIT_GROUP (G4, G6), by a folded record.

    `last`: the state of the key's last transaction; `group`: the one that is named, if any.
    """
    own = named_group(record, nonce)
    if own is not None and last is TxnState.COMMITTED and group_of_batch(record, batch) == own:
        return CommitVerdict.AGAIN
    if is_done(record, batch):
        return CommitVerdict.DONE
    if own is not None:
        is_it = last is TxnState.OPEN and group in (None, own)
        return CommitVerdict.WRITE if is_it else CommitVerdict.ENDED
    if group is not None or nonce in record.spent_nonces:
        return CommitVerdict.ENDED
    return CommitVerdict.BUSY if last is TxnState.OPEN else CommitVerdict.BEGIN


def named_group(record: KeyRecord, nonce: str) -> TxnId | None:
    """The group of that nonce, if the key names it as the last one of its epoch (G4)."""
    named = record.transaction
    if named is None or not named.is_group or record.beginner != nonce:
        return None
    return named.txn


def group_ended_error(name: KeyName, nonce: str) -> InvalidTxnStatus:
    """Why nothing more can be done in a group, nor under its nonce (G3, G4)."""
    return InvalidTxnStatus(
        f"The group of nonce {nonce!r} of key {name.key!r} has ended, by its deadline or an abort "
        "or with another batch: begin the batch again under a new nonce."
    )
