"""Pure: a transaction key, and decisions on the requests about it.

A key fences: its OPEN gives a new epoch, and all transactions of older epochs have ended by then.
A group of attempts is a transaction of its key like any other, with its nonce as the beginner; for
groups alone there is `key_groups`.

Rules (K, G: `docs/transactions.md`):

- K1: OPEN presents the last epoch that the client knows, or NO_EPOCH, which takes over any.  The
  epoch rises by one.  The same request again, by its opener, gets the same answer.
- K3: BEGIN needs the epoch, and that the key's last transaction has ended.  The same request again,
  by its beginner, gets its transaction while that is open.
- K4: a transaction of a key is used and ended by its owner, under that key and the epoch that began
  it, while the key has that epoch.  Operators and deadlines are not checked.
- K7: a key that was neither opened nor begun under for the retention is deleted, unless a
  connection holds it or its transaction is open.
- K8: the end of a key's last transaction is noted in the key.
- G3: a nonce has one group.
"""

import enum
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeGuard

from config.bounds import TXN_KEY_BYTES, TXN_KEY_NONCES
from magnetar.protocol.txn_id import TxnId
from txn.errors import (
    EXPIRED,
    InvalidTransactionKey,
    InvalidTxnStatus,
    TransactionKeyFenced,
    TransactionKeyNotFound,
)
from txn.group import Batch, GroupRecord
from txn.header import OPERATOR
from txn.records import Header, KeyEpoch, TxnState

NO_EPOCH: Final = -1
"""No epoch: presented by an OPEN that knows none, and stored for a key that was never opened."""


class KeyName(NamedTuple):
    """A transaction key and its owner; an anonymous owner is empty."""

    owner: str
    key: str


def key_name(owner: str | None, key: str) -> KeyName:
    """The name of a principal's key.  Raises `InvalidTransactionKey`."""
    if not key or "&" in key or len(key.encode(errors="replace")) > TXN_KEY_BYTES:
        raise InvalidTransactionKey(
            f"{key[:TXN_KEY_BYTES]!r} is no transaction key: choose a name of 1 to "
            f"{TXN_KEY_BYTES} bytes without '&'."
        )
    if len((owner or "").encode(errors="replace")) > TXN_KEY_BYTES:
        raise InvalidTransactionKey(
            f"The name of this principal is longer than {TXN_KEY_BYTES} bytes, so it can have no "
            "transaction keys: give it a shorter one."
        )
    return KeyName(owner or "", key)


def require_name_of_request(name: str) -> str:
    """Return an opener or beginner if it is short enough.  Raises `InvalidTransactionKey`."""
    if len(name.encode(errors="replace")) > TXN_KEY_BYTES:
        raise InvalidTransactionKey(
            f"The name of this request is longer than {TXN_KEY_BYTES} bytes: choose a shorter one."
        )
    return name


@dataclass(frozen=True, slots=True)
class KeyTransaction:
    """A transaction of a key.  `ended`: its end, as noted before its header was collected (K8)."""

    txn: TxnId
    ended: TxnState | None = None
    is_group: bool = False


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The stored record of a key.

    `opener` and `beginner` name the requests that opened the epoch, and began `transaction` under
    it.  `before` is the last transaction of an earlier epoch.

    Of groups: `committed` is the last committed one, except that `last` may have committed since
    (G5); `earlier` has the last batches of other queries, newest first (G6); `nonces` are of groups
    before `transaction` (G3).
    """

    epoch: int
    opener: str
    created_ms: int
    last_used_ms: int
    transaction: KeyTransaction | None = None
    beginner: str = ""
    before: KeyTransaction | None = None
    committed: GroupRecord | None = None
    earlier: tuple[Batch, ...] = ()
    nonces: tuple[str, ...] = ()

    @property
    def spent_nonces(self) -> tuple[str, ...]:
        """The nonces of groups that were begun under the key (G3)."""
        # G3: none of them begins another group.
        if self.transaction is None or not self.transaction.is_group:
            return self.nonces
        return (*self.nonces, self.beginner)[-TXN_KEY_NONCES:]

    @property
    def last(self) -> KeyTransaction | None:
        """The key's last transaction, the only one that may be open."""
        return self.transaction or self.before


@dataclass(frozen=True, slots=True)
class OpenedKey:
    """The answer to OPEN: the epoch, and the last transaction before it with its end.

    The end is None if it is not known any more.  `committed` is the last committed group (G5).
    """

    epoch: int
    last: TxnId | None
    ended: TxnState | None
    committed: GroupRecord | None = None


def new_key_record(now_ms: int) -> KeyRecord:
    """The record that an OPEN of a new key puts first (K7); it has no epoch yet."""
    return KeyRecord(NO_EPOCH, "", now_ms, now_ms)


class OpenVerdict(enum.Enum):
    """The outcome of deciding an OPEN."""

    TAKE = "raise the epoch"
    AGAIN = "this request has made the epoch already"
    STALE = "another epoch than the one presented"


def decide_open(record: KeyRecord | None, presented: int, opener: str) -> OpenVerdict:
    """Decide an OPEN that presents that epoch (K1)."""
    if record is None:
        return OpenVerdict.TAKE if presented == NO_EPOCH else OpenVerdict.STALE
    # K1: this request has raised the epoch already, and its answer was lost.
    if opener and record.opener == opener and presented in (NO_EPOCH, record.epoch - 1):
        return OpenVerdict.AGAIN
    return OpenVerdict.TAKE if presented in (NO_EPOCH, record.epoch) else OpenVerdict.STALE


def raise_epoch(record: KeyRecord, floor: int, opener: str, now_ms: int) -> KeyRecord:
    """The record under its next epoch (K1), which for a new key is above the floor (K7)."""
    # K7: the epochs of a deleted key are not given again.
    last_epoch = floor if record.epoch == NO_EPOCH else record.epoch
    return KeyRecord(
        last_epoch + 1,
        opener,
        record.created_ms,
        now_ms,
        before=record.last,
        committed=record.committed,
        earlier=record.earlier,
        nonces=record.spent_nonces,
    )


def name_transaction(
    record: KeyRecord, txn: TxnId, beginner: str, now_ms: int, *, is_group: bool = False
) -> KeyRecord:
    """The record with a new transaction of its epoch (K3), or a group and its nonce (G3)."""
    return replace(
        record,
        transaction=KeyTransaction(txn, is_group=is_group),
        beginner=beginner,
        last_used_ms=now_ms,
        nonces=record.spent_nonces,
    )


def note_earlier_end(record: KeyRecord, ended: TxnState | None) -> KeyRecord:
    """The record with the end of the last transaction before its epoch (K2)."""
    if record.before is None:
        return record
    return replace(record, before=replace(record.before, ended=ended))


def mark_used(record: KeyRecord, now_ms: int) -> KeyRecord:
    """The record of a key that is used, as a connection holds it (K7)."""
    return replace(record, last_used_ms=now_ms)


def note_end(record: KeyRecord, txn: TxnId, state: TxnState) -> KeyRecord | None:
    """The record with the end of a transaction; None if it has it already, or needs none (K8)."""
    # K8: only the last transactions are named, and only their ends are needed.
    if _lacks_end(record.transaction, txn):
        return replace(record, transaction=replace(record.transaction, ended=state))
    if _lacks_end(record.before, txn):
        return replace(record, before=replace(record.before, ended=state))
    return None


def _lacks_end(named: KeyTransaction | None, txn: TxnId) -> TypeGuard[KeyTransaction]:
    return named is not None and named.txn == txn and named.ended is None


class BeginVerdict(enum.Enum):
    """The outcome of deciding a BEGIN under the present epoch."""

    BEGIN = "begin"
    AGAIN = "this request has begun the open one already"
    BUSY = "the last one is open"
    SPENT = "the group of that nonce has ended"


def decide_begin(
    record: KeyRecord, beginner: str, last: TxnState | None, *, is_group: bool = False
) -> BeginVerdict:
    """Decide a BEGIN (K3, G3).

    `last`: the state of the key's last transaction, None if it is gone; `is_group`: a group is to
    be begun, and the beginner is its nonce.
    """
    # K3: the same request again.  A transaction that has ended is not given again: its client got
    # the answer, or it was aborted.
    named = record.transaction
    if (
        last is TxnState.OPEN
        and named is not None
        and named.is_group == is_group
        and beginner
        and record.beginner == beginner
    ):
        return BeginVerdict.AGAIN
    if is_group and beginner in record.spent_nonces:
        return BeginVerdict.SPENT
    return BeginVerdict.BUSY if last is TxnState.OPEN else BeginVerdict.BEGIN


def key_not_found(name: KeyName) -> TransactionKeyNotFound:
    """The error for a key that does not exist, or that is not shown to a role."""
    return TransactionKeyNotFound(
        f"There is no transaction key {name.key!r} of {name.owner or 'anonymous'!r}: see which "
        "there are with GET /admin/v2/transactions/transaction-keys."
    )


def key_busy_error(name: KeyName, txn: TxnId) -> InvalidTxnStatus:
    """The error for a BEGIN while the key's last transaction is open."""
    return InvalidTxnStatus(
        f"Transaction {txn} of key {name.key!r} is open, and a key has one at a time: end it, or "
        "open the key again, which aborts it."
    )


def require_epoch(name: KeyName, record: KeyRecord | None, epoch: int) -> KeyRecord:
    """Return the record if the key has that epoch (K3, K4, K5).  Raises `TransactionKeyFenced`."""
    if record is None or record.epoch == NO_EPOCH:
        raise TransactionKeyFenced(
            f"Transaction key {name.key!r} was not opened, or was deleted, so it has no epoch "
            f"{epoch}: open it."
        )
    if record.epoch != epoch:
        raise TransactionKeyFenced(
            f"Transaction key {name.key!r} is at epoch {record.epoch}, this request at {epoch}: "
            "the newest one to open the key has it, and its older holders must stop."
        )
    return record


def require_key_epoch(txn: TxnId, header: Header, owner: str | None, key: KeyEpoch | None) -> None:
    """Check that a request under a key and epoch, or none, may be about a transaction (K4).

    Raises `InvalidTransactionKey`; `InvalidTxnStatus` for a transaction of an older epoch.
    """
    # K4: operators and deadlines end transactions of any key.
    key_epoch = header.key_epoch
    if owner == OPERATOR or (key_epoch is None and key is None):
        return
    if key_epoch is None or key is None or key_epoch.key != key.key or header.owner != owner:
        raise InvalidTransactionKey(
            f"Transaction {txn} was not begun under the key that this request carries, or under "
            "one and this request carries none: send what it was begun with."
        )
    if key_epoch.epoch != key.epoch:
        raise InvalidTxnStatus(
            f"{EXPIRED}: transaction {txn} is of epoch {key_epoch.epoch} of key {key.key!r}, "
            f"which is at {key.epoch}: begin another one."
        )


class IdleVerdict(enum.Enum):
    """The outcome of deciding whether the collector deletes a key."""

    KEEP = "it was used, or its transaction is open"
    TOUCH = "it was not used, but is held"
    DELETE = "nobody uses it"


def decide_idle(
    record: KeyRecord, due_ms: int, *, held: bool, last: TxnState | None
) -> IdleVerdict:
    """Decide whether a key is deleted that was last used at `due_ms` or before (K7)."""
    # K7: a key that a connection holds counts as used.
    if record.last_used_ms > due_ms or last is TxnState.OPEN:
        return IdleVerdict.KEEP
    return IdleVerdict.TOUCH if held else IdleVerdict.DELETE
