"""What a transaction key knows of its groups, without a store."""

from dataclasses import replace

import pytest

from config.bounds import TXN_KEY_NONCES, TXN_KEY_QUERIES
from magnetar.protocol.txn_id import TxnId
from txn import key_records
from txn.errors import CorruptTransactionRecord
from txn.group import Batch, Group, GroupCommit, GroupRecord
from txn.key_groups import (
    CommitVerdict,
    decide_commit,
    fold_commit,
    group_of_batch,
    is_done,
    last_batch,
    named_group,
    note_and_fold,
)
from txn.records import Header, KeyEpoch, TxnState
from txn.transaction_key import (
    BeginVerdict,
    KeyName,
    KeyRecord,
    KeyTransaction,
    decide_begin,
    name_transaction,
    new_key_record,
    raise_epoch,
)

OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED
T1, T2 = TxnId(0, 1), TxnId(0, 2)
FIRST = raise_epoch(new_key_record(1), -1, "me", 2)
NAMED = name_transaction(FIRST, T1, "n", 3, is_group=True)
PLAIN = name_transaction(FIRST, T1, "n", 3)


def committed(query: str, number: int, positions: str | None = None) -> Header:
    commit = GroupCommit(Batch(query, number), positions, {})
    return Header(COMMITTED, 1, 1, 2, None, KeyEpoch("k", 0), Group("n", 64, commit))


def test_g5_the_last_transactions_commit_is_folded_in_and_no_other() -> None:
    told = fold_commit(NAMED, T1, committed("q", 3, "p"))
    assert told == replace(NAMED, committed=GroupRecord(Batch("q", 3), "p", T1))
    assert fold_commit(told, T1, committed("q", 3, "p")) == told
    assert fold_commit(NAMED, T2, committed("q", 3)) == NAMED
    assert fold_commit(NAMED, T1, replace(committed("q", 3), state=ABORTED)) == NAMED
    assert fold_commit(NAMED, T1, Header(COMMITTED, 1, 1, 2)) == NAMED
    after = raise_epoch(NAMED, -1, "you", 4)
    assert fold_commit(after, T1, committed("q", 3)).committed is not None
    later = name_transaction(told, T2, "m", 5, is_group=True)
    newer = fold_commit(later, T2, committed("q", 4))
    overtaken = raise_epoch(newer, -1, "you", 6)
    assert fold_commit(overtaken, T1, committed("q", 3)) == overtaken, "that one is older"


def test_g5_an_older_group_that_is_noted_late_does_not_come_back() -> None:
    told = fold_commit(NAMED, T1, committed("q", 3))
    second = raise_epoch(told, -1, "you", 4)
    third = fold_commit(name_transaction(second, T2, "m", 5, is_group=True), T2, committed("q", 4))
    late = note_and_fold(third, T1, committed("q", 3))
    assert late is not None
    assert late.before == KeyTransaction(T1, COMMITTED, is_group=True)
    assert late.committed == GroupRecord(Batch("q", 4), None, T2)
    assert note_and_fold(late, T1, committed("q", 3)) is None
    both = note_and_fold(NAMED, T1, committed("q", 3))
    assert both is not None
    assert both.transaction == KeyTransaction(T1, COMMITTED, is_group=True)
    assert both.committed == GroupRecord(Batch("q", 3), None, T1)


def test_g5_queries_take_turns_and_few_are_remembered() -> None:
    record = FIRST
    for number in range(TXN_KEY_QUERIES + 3):
        txn = TxnId(0, number)
        record = name_transaction(record, txn, f"{number}", 1, is_group=True)
        record = fold_commit(record, txn, committed(f"q{number}", 10 * number))
    last = TXN_KEY_QUERIES + 2
    assert last_batch(record, f"q{last}") == 10 * last
    assert [each.query for each in record.earlier] == [
        f"q{last - 1 - each}" for each in range(TXN_KEY_QUERIES)
    ]
    assert last_batch(record, "q1") is None
    back = name_transaction(record, T1, "x", 1, is_group=True)
    back = fold_commit(back, T1, committed("q5", 51))
    assert last_batch(back, "q5") == 51
    assert "q5" not in {each.query for each in back.earlier}
    assert last_batch(back, f"q{last}") == 10 * last
    assert raise_epoch(back, -1, "you", 9).earlier == back.earlier


def test_g6_a_batch_up_to_the_last_one_is_done() -> None:
    record = fold_commit(NAMED, T1, committed("q", 3))
    assert [is_done(record, Batch("q", number)) for number in (2, 3, 4)] == [True, True, False]
    assert not is_done(record, Batch("other", 0))
    assert group_of_batch(record, Batch("q", 3)) == T1
    assert group_of_batch(record, Batch("q", 2)) is None


@pytest.mark.parametrize(
    ("record", "nonce", "last", "verdict"),
    [
        (FIRST, "n", None, BeginVerdict.BEGIN),
        (NAMED, "n", OPEN, BeginVerdict.AGAIN),
        (NAMED, "m", OPEN, BeginVerdict.BUSY),
        (NAMED, "n", ABORTED, BeginVerdict.SPENT),
        (NAMED, "n", COMMITTED, BeginVerdict.SPENT),
        (NAMED, "n", None, BeginVerdict.SPENT),
        (NAMED, "m", ABORTED, BeginVerdict.BEGIN),
        (PLAIN, "n", OPEN, BeginVerdict.BUSY),
        (PLAIN, "n", ABORTED, BeginVerdict.BEGIN),
        (raise_epoch(NAMED, -1, "", 9), "n", ABORTED, BeginVerdict.SPENT),
        (raise_epoch(NAMED, -1, "", 9), "m", OPEN, BeginVerdict.BUSY),
        (raise_epoch(NAMED, -1, "", 9), "n", OPEN, BeginVerdict.SPENT),
        (name_transaction(NAMED, T2, "", 9), "n", OPEN, BeginVerdict.SPENT),
    ],
)
def test_g3_begin_of_an_attempt_decides_by_the_keys_state(
    record: KeyRecord, nonce: str, last: TxnState | None, verdict: BeginVerdict
) -> None:
    assert decide_begin(record, nonce, last, is_group=True) is verdict


def test_g3_a_begin_of_a_plain_transaction_gets_no_group() -> None:
    assert decide_begin(NAMED, "n", OPEN) is BeginVerdict.BUSY
    assert decide_begin(NAMED, "n", ABORTED) is BeginVerdict.BEGIN
    assert decide_begin(PLAIN, "n", OPEN) is BeginVerdict.AGAIN


DONE = fold_commit(NAMED, T1, committed("q", 3))
BESIDES = name_transaction(DONE, T2, "m", 5, is_group=True)
B3, B4 = Batch("q", 3), Batch("q", 4)


@pytest.mark.parametrize(
    ("record", "last", "nonce", "group", "batch", "verdict"),
    [
        (FIRST, None, "n", None, B3, CommitVerdict.BEGIN),
        (FIRST, None, "n", T1, B3, CommitVerdict.ENDED),
        (NAMED, OPEN, "n", T1, B3, CommitVerdict.WRITE),
        (NAMED, OPEN, "n", None, B3, CommitVerdict.WRITE),
        (NAMED, OPEN, "n", T2, B3, CommitVerdict.ENDED),
        (NAMED, OPEN, "m", None, B3, CommitVerdict.BUSY),
        (NAMED, OPEN, "m", T1, B3, CommitVerdict.ENDED),
        (NAMED, ABORTED, "n", T1, B3, CommitVerdict.ENDED),
        (NAMED, ABORTED, "n", None, B3, CommitVerdict.ENDED),
        (NAMED, None, "n", T1, B3, CommitVerdict.ENDED),
        (NAMED, ABORTED, "m", None, B3, CommitVerdict.BEGIN),
        (DONE, COMMITTED, "n", T1, B3, CommitVerdict.AGAIN),
        (DONE, COMMITTED, "n", None, B3, CommitVerdict.AGAIN),
        (DONE, COMMITTED, "n", T1, B4, CommitVerdict.ENDED),
        (DONE, COMMITTED, "n", T1, Batch("q", 2), CommitVerdict.DONE),
        (DONE, COMMITTED, "m", None, B3, CommitVerdict.DONE),
        (DONE, COMMITTED, "m", None, B4, CommitVerdict.BEGIN),
        (BESIDES, OPEN, "m", T2, B3, CommitVerdict.DONE),
        (BESIDES, OPEN, "m", T2, B4, CommitVerdict.WRITE),
        (BESIDES, OPEN, "n", T1, B3, CommitVerdict.DONE),
        (BESIDES, OPEN, "n", T1, B4, CommitVerdict.ENDED),
        (BESIDES, ABORTED, "n", None, B4, CommitVerdict.ENDED),
        (raise_epoch(NAMED, -1, "", 9), ABORTED, "n", None, B3, CommitVerdict.ENDED),
        (PLAIN, OPEN, "n", T1, B3, CommitVerdict.ENDED),
        (PLAIN, OPEN, "n", None, B3, CommitVerdict.BUSY),
    ],
)
def test_g4_commit_decides_by_the_keys_state(
    record: KeyRecord,
    last: TxnState | None,
    nonce: str,
    group: TxnId | None,
    batch: Batch,
    verdict: CommitVerdict,
) -> None:
    assert decide_commit(record, last, nonce, group, batch) is verdict


def test_the_group_that_a_key_names() -> None:
    assert named_group(NAMED, "n") == T1
    assert named_group(NAMED, "m") is None
    assert named_group(PLAIN, "n") is None
    assert named_group(raise_epoch(NAMED, -1, "", 9), "n") is None


def test_g3_nonces_are_kept_over_epochs_and_few() -> None:
    record = FIRST
    for number in range(TXN_KEY_NONCES + 3):
        record = name_transaction(record, TxnId(0, number), f"{number}", 1, is_group=True)
    record = raise_epoch(record, -1, "you", 2)
    assert record.nonces == tuple(f"{each + 3}" for each in range(TXN_KEY_NONCES))
    assert name_transaction(record, T1, "plain", 3).nonces == record.nonces
    assert raise_epoch(name_transaction(record, T1, "plain", 3), -1, "", 4).nonces == record.nonces


@pytest.mark.parametrize("record", [NAMED, DONE, BESIDES, raise_epoch(BESIDES, -1, "x", 4)])
def test_a_key_with_groups_is_what_was_encoded(record: KeyRecord) -> None:
    path = key_records.key_path(KeyName("", "k"))
    whole = replace(record, earlier=(Batch("ö", 4), Batch("p", 2**40)), nonces=("a", "ü"))
    for each in (record, whole):
        assert key_records.decode_key(path, key_records.encode_key(each)) == each


@pytest.mark.parametrize(
    "part",
    [
        b'"committed":{}',
        b'"committed":{"query":"q","batch":1,"group":"x"}',
        b'"committed":{"query":1,"batch":1,"group":"1_1"}',
        b'"earlier":[["q"]]',
        b'"earlier":[["q","1"]]',
        b'"earlier":["q"]',
        b'"earlier":{}',
        b'"nonces":[1]',
        b'"nonces":1',
    ],
)
def test_a_key_with_damaged_groups_is_corrupt(part: bytes) -> None:
    path = key_records.key_path(KeyName("", "k"))
    value = key_records.encode_key(FIRST)[:-1] + b"," + part + b"}"
    with pytest.raises(CorruptTransactionRecord):
        key_records.decode_key(path, value)
