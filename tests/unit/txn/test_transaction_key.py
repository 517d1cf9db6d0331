"""What a request about a transaction key may do, and what is stored of keys."""

from collections.abc import Callable

import pytest

from magnetar.protocol.txn_id import CoordinatorId, TxnId
from txn import key_records, records
from txn.epoch_floor import decode_floor
from txn.errors import (
    EXPIRED,
    CorruptTransactionRecord,
    InvalidTransactionKey,
    InvalidTxnStatus,
    TransactionKeyFenced,
)
from txn.header import OPERATOR, end_header
from txn.records import Header, KeyEpoch, TxnState
from txn.transaction_key import (
    NO_EPOCH,
    BeginVerdict,
    IdleVerdict,
    KeyName,
    KeyRecord,
    KeyTransaction,
    OpenVerdict,
    decide_begin,
    decide_idle,
    decide_open,
    key_name,
    name_transaction,
    new_key_record,
    note_end,
    raise_epoch,
    require_epoch,
    require_key_epoch,
    require_name_of_request,
)

T1, T2 = TxnId(3, 1), TxnId(3, 2)
NAME = KeyName("", "k")
AT_5 = KeyRecord(5, "me", 100, 200, KeyTransaction(T1), "first")
OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED


@pytest.mark.parametrize(
    ("record", "presented", "opener", "verdict"),
    [
        (None, -1, "x", OpenVerdict.TAKE),
        (None, 0, "x", OpenVerdict.STALE),
        (new_key_record(1), -1, "x", OpenVerdict.TAKE),
        (new_key_record(1), 0, "x", OpenVerdict.STALE),
        (AT_5, -1, "x", OpenVerdict.TAKE),
        (AT_5, 5, "x", OpenVerdict.TAKE),
        (AT_5, 4, "x", OpenVerdict.STALE),
        (AT_5, 6, "x", OpenVerdict.STALE),
        (AT_5, -2, "x", OpenVerdict.STALE),
        (AT_5, -1, "me", OpenVerdict.AGAIN),
        (AT_5, 4, "me", OpenVerdict.AGAIN),
        (AT_5, 5, "me", OpenVerdict.TAKE),
        (AT_5, 3, "me", OpenVerdict.STALE),
        (KeyRecord(5, "", 1, 1), -1, "", OpenVerdict.TAKE),
        (KeyRecord(5, "", 1, 1), 4, "", OpenVerdict.STALE),
    ],
)
def test_k1_open_decides_by_the_keys_state(
    record: KeyRecord | None, presented: int, opener: str, verdict: OpenVerdict
) -> None:
    assert decide_open(record, presented, opener) is verdict


def test_k1_k7_an_epoch_rises_by_one_and_begins_above_the_floor() -> None:
    assert raise_epoch(AT_5, 77, "you", 300) == KeyRecord(
        6, "you", 100, 300, before=KeyTransaction(T1)
    )
    assert raise_epoch(new_key_record(1), NO_EPOCH, "you", 2) == KeyRecord(0, "you", 1, 2)
    assert raise_epoch(new_key_record(1), 9, "you", 2).epoch == 10
    twice = raise_epoch(raise_epoch(AT_5, -1, "you", 300), -1, "they", 400)
    assert twice.last == KeyTransaction(T1), "an OPEN that was cut short may have left it open"


@pytest.mark.parametrize(
    ("record", "beginner", "last", "verdict"),
    [
        (KeyRecord(5, "", 1, 1), "b", None, BeginVerdict.BEGIN),
        (AT_5, "b", COMMITTED, BeginVerdict.BEGIN),
        (AT_5, "first", ABORTED, BeginVerdict.BEGIN),
        (AT_5, "first", None, BeginVerdict.BEGIN),
        (AT_5, "b", OPEN, BeginVerdict.BUSY),
        (AT_5, "", OPEN, BeginVerdict.BUSY),
        (AT_5, "first", OPEN, BeginVerdict.AGAIN),
        (name_transaction(KeyRecord(5, "", 1, 1), T1, "", 2), "", OPEN, BeginVerdict.BUSY),
        (raise_epoch(AT_5, -1, "", 2), "first", OPEN, BeginVerdict.BUSY),
    ],
)
def test_k3_begin_decides_by_the_keys_state(
    record: KeyRecord, beginner: str, last: TxnState | None, verdict: BeginVerdict
) -> None:
    assert decide_begin(record, beginner, last) is verdict


def test_k4_k5_only_the_present_epoch_is_served() -> None:
    assert require_epoch(NAME, AT_5, 5) is AT_5
    for record, epoch in ((AT_5, 4), (AT_5, 6), (None, 5), (new_key_record(1), -1), (None, -1)):
        with pytest.raises(TransactionKeyFenced):
            require_epoch(NAME, record, epoch)


TIED = Header(OPEN, 1, 1, None, None, KeyEpoch("k", 5))
PLAIN = Header(OPEN, 1, 1)


def test_k4_a_keyed_transaction_is_for_its_key_and_a_plain_one_for_none() -> None:
    require_key_epoch(T1, PLAIN, None, None)
    require_key_epoch(T1, TIED, None, KeyEpoch("k", 5))
    require_key_epoch(T1, TIED, OPERATOR, None)
    refused: list[Callable[[], None]] = [
        lambda: require_key_epoch(T1, TIED, None, None),
        lambda: require_key_epoch(T1, PLAIN, None, KeyEpoch("k", 5)),
        lambda: require_key_epoch(T1, TIED, None, KeyEpoch("j", 5)),
        lambda: require_key_epoch(T1, TIED, "bob", KeyEpoch("k", 5)),
    ]
    for each in refused:
        with pytest.raises(InvalidTransactionKey):
            each()


def test_k4_a_transaction_of_an_older_epoch_says_so_by_a_word() -> None:
    with pytest.raises(InvalidTxnStatus, match=EXPIRED) as refused:
        require_key_epoch(T1, TIED, None, KeyEpoch("k", 6))
    assert EXPIRED == "ExpiredTransaction"
    assert refused.value.code.name == "INVALID_TXN_STATUS"


@pytest.mark.parametrize(
    ("last_used_ms", "held", "last", "verdict"),
    [
        (11, False, None, IdleVerdict.KEEP),
        (10, False, OPEN, IdleVerdict.KEEP),
        (10, True, COMMITTED, IdleVerdict.TOUCH),
        (10, False, COMMITTED, IdleVerdict.DELETE),
        (10, False, None, IdleVerdict.DELETE),
    ],
)
def test_k7_key_is_idle_after_its_retention(
    last_used_ms: int, *, held: bool, last: TxnState | None, verdict: IdleVerdict
) -> None:
    record = KeyRecord(5, "", 1, last_used_ms)
    assert decide_idle(record, 10, held=held, last=last) is verdict


def test_k8_an_end_is_noted_once_where_it_is_named() -> None:
    told = note_end(AT_5, T1, COMMITTED)
    assert told is not None
    assert told.transaction == KeyTransaction(T1, COMMITTED)
    assert note_end(told, T1, COMMITTED) is None
    assert note_end(AT_5, T2, COMMITTED) is None
    before = note_end(raise_epoch(AT_5, -1, "", 1), T1, ABORTED)
    assert before is not None
    assert before.before == KeyTransaction(T1, ABORTED)


@pytest.mark.parametrize("key", ["", "a&b", "x" * 257, "\u20ac" * 86])
def test_invalid_key_name_is_refused(key: str) -> None:
    with pytest.raises(InvalidTransactionKey):
        key_name(None, key)


def test_names_are_bounded() -> None:
    assert key_name("alice", "a/b c") == KeyName("alice", "a/b c")
    with pytest.raises(InvalidTransactionKey):
        key_name("a" * 257, "k")
    with pytest.raises(InvalidTransactionKey):
        require_name_of_request("x" * 257)


@pytest.mark.parametrize(
    "record",
    [
        new_key_record(7),
        AT_5,
        KeyRecord(2**40, '\u20ac"', 1, 2, KeyTransaction(T2, ABORTED), "b", KeyTransaction(T1)),
        KeyRecord(1, "o", 1, 2, before=KeyTransaction(T1, COMMITTED)),
    ],
)
def test_a_record_comes_back_as_it_was(record: KeyRecord) -> None:
    assert key_records.decode_key("/txn/key/&k", key_records.encode_key(record)) == record


def test_the_records_of_keys() -> None:
    assert key_records.encode_key(AT_5) == (
        b'{"epoch":5,"opener":"me","createdMs":100,"lastUsedMs":200,'
        b'"transaction":{"id":"3_1"},"beginner":"first"}'
    )
    name = KeyName("a&b", "c/d e")
    path = key_records.key_path(name)
    assert path == "/txn/key/a%26b&c%2Fd+e"
    assert key_records.name_at(path) == name
    assert key_records.key_path(NAME) == "/txn/key/&k"
    (entry,) = key_records.key_indexes(CoordinatorId(3), name)
    assert entry.key == f"{3:020d}:a%26b&c%2Fd+e"
    for damaged in (b"", b"[]", b"{}", b'{"epoch":"5"}', b'{"epoch":true}'):
        with pytest.raises(CorruptTransactionRecord):
            key_records.decode_key(path, damaged)
        with pytest.raises(CorruptTransactionRecord):
            decode_floor("/txn/key-floor/3", damaged)


def test_a_header_tells_its_key_and_a_plain_one_is_as_before() -> None:
    key = records.header_key(T1)
    assert records.encode_header(PLAIN) == (
        b'{"state":"OPEN","timeout":0.001000000,"createdAt":0.001000000}'
    )
    written = records.encode_header(TIED)
    assert written == (
        b'{"state":"OPEN","timeout":0.001000000,"createdAt":0.001000000,'
        b'"transactionKey":"k","transactionKeyEpoch":5}'
    )
    assert records.decode_header(key, written) == TIED
    over = end_header(TIED, COMMITTED, 9)
    assert over.key_epoch == TIED.key_epoch
    assert records.decode_header(key, records.encode_header(over)) == over
