"""Pure: the groups in the record of a transaction key, and decisions on requests about them.

Rules (G: `docs/transactions.md`):

- G4: COMMIT_GROUP commits only the group of its nonce that the key names.  Without any it begins
  one, to record an empty batch.
- G5: a key has the last batch that was committed under it, with its positions, and the last batch
  of TXN_KEY_QUERIES other queries.  A commit is folded in by the change that names the next
  transaction, and before the header is collected; until then the header has it.
- G6: a batch at or below the last one of its query was committed before: it is done.
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
    """The record with a transaction's commit, if that is a group and the key's last one (G5)."""
    commit = None if header.group is None else header.group.commit
    last, before = record.last, record.committed
    if commit is None or header.state is not TxnState.COMMITTED:
        return record
    # G5: an older group that is noted late does not replace a newer one.
    if last is None or last.txn != txn or (before is not None and before.group == txn):
        return record
    committed = GroupRecord(commit.batch, commit.positions, txn)
    ended = () if before is None else (before.batch,)
    others = (each for each in (*ended, *record.earlier) if each.query != commit.batch.query)
    return replace(record, committed=committed, earlier=tuple(others)[:TXN_KEY_QUERIES])


def note_and_fold(record: KeyRecord, txn: TxnId, header: Header) -> KeyRecord | None:
    """The key's record to store before a header is deleted; None if nothing changes (K8, G5)."""
    noted = fold_commit(record, txn, header)
    noted = note_end(noted, txn, header.state) or noted
    return None if noted == record else noted


def last_batch(record: KeyRecord, query: str) -> int | None:
    """The last committed batch of a query, by a folded record; None if none is known."""
    known = (
        record.earlier if record.committed is None else (record.committed.batch, *record.earlier)
    )
    return next((batch.number for batch in known if batch.query == query), None)


def is_done(record: KeyRecord, batch: Batch) -> bool:
    """Whether the batch was committed before, by a folded record (G6)."""
    # G6: batches of a query are numbered upwards.
    last = last_batch(record, batch.query)
    return last is not None and batch.number <= last


def group_of_batch(record: KeyRecord, batch: Batch) -> TxnId | None:
    """The group that committed a batch, if it is the last committed one."""
    committed = record.committed
    return committed.group if committed is not None and committed.batch == batch else None


def has_other_positions(record: KeyRecord, batch: Batch, positions: str | None) -> bool:
    """Whether the last batch was committed with other positions than these (G6)."""
    last = record.committed
    if last is None or last.batch != batch or positions is None or last.positions is None:
        return False
    return last.positions != positions


def other_positions_error(name: KeyName, batch: Batch) -> InvalidTxnStatus:
    """The error for a batch that was committed with other positions (G6)."""
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

    `last`: the state of the key's last transaction; `group`: the group in the request, if any.
    """
    # G4: no other group is committed, whatever the request names.
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
    """The group of a nonce, if the key names it as the last transaction of its epoch (G4)."""
    named = record.transaction
    if named is None or not named.is_group or record.beginner != nonce:
        return None
    return named.txn


def group_ended_error(name: KeyName, nonce: str) -> InvalidTxnStatus:
    """The error for a request about a group that has ended, or under its nonce (G3, G4)."""
    return InvalidTxnStatus(
        f"The group of nonce {nonce!r} of key {name.key!r} has ended, by its deadline or an abort "
        "or with another batch: begin the batch again under a new nonce."
    )
