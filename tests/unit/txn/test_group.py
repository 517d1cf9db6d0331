"""Groups and attempts without a store: ids, records, and what a header says of an attempt."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.bounds import (
    METADATA_VALUE_BYTES,
    TXN_ATTEMPT_BLOCK,
    TXN_GROUP_COUNTS,
    TXN_GROUP_HEADER_BYTES,
    TXN_GROUP_NAME_BYTES,
    TXN_GROUP_POSITIONS_BYTES,
    TXN_GROUP_SEGMENTS,
    TXN_GROUP_WINNERS,
    TXN_TIMEOUT_MAX_MS,
)
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import LAST_ATTEMPT, NUMBER_BITS, TxnId
from txn import records
from txn.errors import CorruptTransactionRecord, InvalidGroup, InvalidTxnStatus
from txn.group import (
    HASH_SUM_MODULUS,
    Batch,
    Group,
    GroupCommit,
    SegmentCount,
    bounded_commit,
    new_group,
    require_nonce,
    require_winners,
    with_next_block,
    with_totals,
)
from txn.header import (
    OPERATOR,
    EndVerdict,
    decide_end,
    end_header,
    header_of,
    raise_deadline,
    refusal_error,
)
from txn.records import AckedPosition, AckRecord, Claim, Header, KeyEpoch, TxnState

OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED
GROUP = TxnId(3, 42)
BATCH = Batch("q", 7)
COUNTS = {"segment://t/n/x/0-1": SegmentCount(10, 5), "s": SegmentCount(1, HASH_SUM_MODULUS - 1)}
COMMIT = GroupCommit(BATCH, '{"v":1}', {2: COUNTS, 5: {"s": SegmentCount(4, 2)}, 6: {}})
HEADER = Header(OPEN, 60_000, 1000, None, "me", KeyEpoch("k", 4), Group("n", 64))
DONE = replace(HEADER, state=COMMITTED, finalized_ms=2000, group=Group("n", 64, COMMIT))


@given(
    st.integers(0, 2**16),
    st.integers(0, (1 << NUMBER_BITS) - 1),
    st.integers(1, LAST_ATTEMPT),
)
def test_g1_an_attempts_id_names_its_group(most: int, number: int, index: int) -> None:
    group = TxnId(most, number)
    attempt = group.attempt_of(index)
    assert (attempt.most, attempt.group, attempt.attempt_index) == (most, group, index)
    assert attempt.least < 1 << 63, "a positive signed number"
    assert TxnId.parse(str(attempt)) == attempt
    assert (group.group, group.attempt_index) == (group, 0)


@pytest.mark.parametrize("index", [0, -1, LAST_ATTEMPT + 1])
def test_g1_there_is_no_attempt_beyond_the_bits(index: int) -> None:
    with pytest.raises(AssertionError):
        GROUP.attempt_of(index)
    with pytest.raises(AssertionError):
        GROUP.attempt_of(1).attempt_of(2)


@pytest.mark.parametrize(
    ("header", "index", "state"),
    [
        (HEADER, 0, OPEN),
        (HEADER, 1, OPEN),
        (HEADER, 64, OPEN),
        (HEADER, 65, None),
        (DONE, 0, COMMITTED),
        (DONE, 2, COMMITTED),
        (DONE, 5, COMMITTED),
        (DONE, 1, ABORTED),
        (DONE, 64, ABORTED),
        (DONE, 65, None),
        (replace(HEADER, state=ABORTED), 2, ABORTED),
        (replace(HEADER, state=ABORTED), 0, ABORTED),
        (replace(HEADER, state=ABORTED), 65, None),
        (replace(HEADER, group=None), 1, None),
        (replace(DONE, group=None), 1, None),
        (Header(OPEN, 1, 1), 0, OPEN),
    ],
)
def test_g1_the_groups_header_says_what_an_attempt_is(
    header: Header, index: int, state: TxnState | None
) -> None:
    found = header_of(header, GROUP.attempt_of(index) if index else GROUP)
    assert (None if found is None else found.state) == state


def test_g2_indexes_are_reserved_in_blocks_up_to_the_last_one() -> None:
    group = new_group("n")
    assert group.reserved == TXN_ATTEMPT_BLOCK
    assert with_next_block(group).reserved == 2 * TXN_ATTEMPT_BLOCK
    last = with_next_block(replace(group, reserved=LAST_ATTEMPT - 1))
    assert last.reserved == LAST_ATTEMPT
    with pytest.raises(InvalidGroup):
        with_next_block(last)


@pytest.mark.parametrize("action", [COMMITTED, ABORTED])
@pytest.mark.parametrize("header", [HEADER, DONE])
@pytest.mark.parametrize("owner", ["me", OPERATOR])
def test_g4_an_attempt_is_not_ended_by_itself(header: Header, action: TxnState, owner: str) -> None:
    verdict = decide_end(header, action, owner, is_attempt=True)
    assert verdict is EndVerdict.OF_GROUP
    assert isinstance(refusal_error(GROUP.attempt_of(1), header, verdict), InvalidTxnStatus)
    assert decide_end(header, action, "you", is_attempt=True) is EndVerdict.NOT_OWNER
    assert decide_end(None, action, owner, is_attempt=True) is EndVerdict.NOT_FOUND


def test_g4_a_group_is_aborted_like_a_transaction_and_not_so_committed() -> None:
    assert decide_end(HEADER, COMMITTED, OPERATOR) is EndVerdict.OF_GROUP
    assert decide_end(DONE, COMMITTED, OPERATOR) is EndVerdict.OF_GROUP
    assert decide_end(HEADER, ABORTED, "me") is EndVerdict.WRITE
    assert decide_end(DONE, ABORTED, "me") is EndVerdict.OTHERWISE
    assert end_header(HEADER, ABORTED, 5).group == HEADER.group


@pytest.mark.parametrize(
    ("asked_ms", "deadline_ms"),
    [
        (0, 61_000),
        (60_999, 61_000),
        (61_000, 61_000),
        (61_001, 61_001),
        (10**15, 500 + TXN_TIMEOUT_MAX_MS),
    ],
)
def test_g8_a_deadline_only_rises(asked_ms: int, deadline_ms: int) -> None:
    header = raise_deadline(HEADER, asked_ms, 500)
    assert header.deadline_ms == deadline_ms
    assert replace(header, timeout_ms=HEADER.timeout_ms) == HEADER
    with pytest.raises(AssertionError):
        raise_deadline(DONE, asked_ms, 500)


def test_g4_winners_are_attempts_of_the_group() -> None:
    group = Group("n", 64)
    require_winners(GROUP, group, [GROUP.attempt_of(1), GROUP.attempt_of(64)])
    for wrong in (GROUP, GROUP.attempt_of(65), TxnId(3, 43).attempt_of(1), TxnId(2, 42)):
        with pytest.raises(InvalidGroup):
            require_winners(GROUP, group, [GROUP.attempt_of(1), wrong])


def test_a_commit_is_bounded() -> None:
    def commit(number: int = 7, query: str = "q", positions: str | None = None) -> GroupCommit:
        return bounded_commit(Batch(query, number), positions, [])

    one = GROUP.attempt_of(1)
    assert commit().winners == {}
    assert commit(positions="x" * TXN_GROUP_POSITIONS_BYTES).positions
    for wrong in (
        lambda: commit(number=-1),
        lambda: commit(query=""),
        lambda: commit(query="ü" * (TXN_GROUP_NAME_BYTES // 2 + 1)),
        lambda: commit(positions="ü" * (TXN_GROUP_POSITIONS_BYTES // 2 + 1)),
        lambda: bounded_commit(BATCH, None, [(one, {}), (one, {})]),
        lambda: bounded_commit(
            BATCH, None, [(GROUP.attempt_of(n + 1), {}) for n in range(TXN_GROUP_WINNERS + 1)]
        ),
        lambda: bounded_commit(
            BATCH,
            None,
            [(one, {str(n): SegmentCount(1, 1) for n in range(TXN_GROUP_SEGMENTS + 1)})],
        ),
        lambda: require_nonce(""),
        lambda: require_nonce("x" * (TXN_GROUP_NAME_BYTES + 1)),
    ):
        with pytest.raises(InvalidGroup):
            wrong()


def test_of_many_counts_the_totals_are_kept() -> None:
    counts = {"a": SegmentCount(2, HASH_SUM_MODULUS - 1), "b": SegmentCount(1, 0)}
    few, many = TXN_GROUP_COUNTS // 2, TXN_GROUP_COUNTS // 2 + 1
    kept = bounded_commit(BATCH, None, [(GROUP.attempt_of(n + 1), counts) for n in range(few)])
    assert kept.totals is None
    assert kept.winners[few] == counts
    summed = bounded_commit(BATCH, None, [(GROUP.attempt_of(n + 1), counts) for n in range(many)])
    assert summed.totals == {
        "a": SegmentCount(2 * many, -many % HASH_SUM_MODULUS),
        "b": SegmentCount(many, 0),
    }
    assert list(summed.winners) == list(range(1, many + 1))
    assert not any(summed.winners.values())
    assert with_totals(summed) == summed
    told = bounded_commit(BATCH, None, [(GROUP.attempt_of(1), {})], counts)
    assert (told.winners, told.totals) == ({1: {}}, counts)
    with pytest.raises(InvalidGroup):
        bounded_commit(BATCH, None, [], {f"s{n}": counts["a"] for n in range(10_000)})


@pytest.mark.parametrize(
    "header",
    [
        HEADER,
        DONE,
        replace(DONE, group=Group("n", 64, with_totals(COMMIT))),
        replace(DONE, group=Group("n", 64, GroupCommit(BATCH, None, {}))),
        replace(DONE, group=Group("n", 64, GroupCommit(BATCH, "", {1: {}}))),
        replace(HEADER, state=ABORTED, owner=None, key_epoch=None),
    ],
)
def test_a_groups_header_is_what_was_encoded(header: Header) -> None:
    key = records.header_key(GROUP)
    value = records.encode_header(header)
    assert records.decode_header(key, value) == header
    assert value.count(b"segment://t/n/x/0-1") <= 1, "a name is there once"
    assert records.header_indexes(header) == records.header_indexes(replace(header, group=None))


def test_a_plain_header_is_as_it_was() -> None:
    plain = Header(COMMITTED, 60_000, 1000, 2000, "me", KeyEpoch("k", 4))
    assert records.encode_header(plain) == (
        b'{"state":"COMMITTED","timeout":60.000000000,"createdAt":1.000000000,'
        b'"finalizedAt":2.000000000,"owner":"me","transactionKey":"k","transactionKeyEpoch":4}'
    )


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"nonce": 1, "reserved": 1},
        {"nonce": "n", "reserved": "1"},
        [],
        {"winners": [[1, 0, 1, 1]], "segments": []},
        {"winners": [[1, 0, 1]], "segments": ["a"]},
        {"winners": [[1, -1, 1, 1]], "segments": ["a"]},
        {"winners": [[]], "segments": []},
        {"winners": [1], "segments": []},
        {"winners": [], "segments": [1]},
        {"winners": [], "segments": {}},
        {"winners": [], "segments": ["a"], "totals": [[1, 1, 1]]},
        {"winners": [], "segments": ["a"], "query": 1},
        {"winners": [], "segments": ["a"], "batch": "1"},
        {"winners": [], "segments": ["a"], "positions": 1},
    ],
)
def test_a_group_that_is_not_whole_is_corrupt(part: object) -> None:
    if isinstance(part, dict) and "winners" in part:
        part = {"nonce": "n", "reserved": 1, "query": "q", "batch": 1, **part}
    value = {"state": "OPEN", "timeout": 1.0, "createdAt": 1.0, "group": part}
    with pytest.raises(CorruptTransactionRecord, match=records.header_key(GROUP)):
        records.decode_header(records.header_key(GROUP), json.dumps(value).encode())


def test_the_largest_header_is_bounded_and_fits_the_store() -> None:
    names = [f"segment://tenant/namespace/topic/{n:0100}" for n in range(200)]
    counts = {name: SegmentCount(2**40, HASH_SUM_MODULUS - 1) for name in names}
    few = [(GROUP.attempt_of(LAST_ATTEMPT - n), counts) for n in range(TXN_GROUP_COUNTS // 200)]
    largest = bounded_commit(BATCH, "x" * TXN_GROUP_POSITIONS_BYTES, few)
    assert largest.totals is None
    value = records.encode_header(replace(DONE, group=Group("n", LAST_ATTEMPT, largest)))
    assert TXN_GROUP_HEADER_BYTES // 2 < len(value) < TXN_GROUP_HEADER_BYTES < METADATA_VALUE_BYTES


ATTEMPT = GROUP.attempt_of(9)
ACK = AckRecord(
    ATTEMPT, "s:1", "sub", 2, 3, cumulative=False, acks=(AckedPosition(Position(1, 2)),)
)


def test_g9_records_of_an_attempt_lie_in_its_groups_range_and_partition() -> None:
    assert records.partition_of(ATTEMPT) == records.partition_of(GROUP) == "3_42"
    assert records.header_key(ATTEMPT) == records.header_key(GROUP)
    lo, hi = records.operations_range(ATTEMPT)
    assert (lo, hi) == records.operations_range(GROUP) == ("/txn/op/3_42/", "/txn/op/3_42//")
    claim = Claim(ATTEMPT, "s:1", 2, Position(1, 2))
    plain = Claim(GROUP, "s:1", 2, Position(1, 2))
    keys = {
        records.claim_key(claim.txn, claim.segment, claim.epoch): records.encode_claim(claim),
        records.claim_key(plain.txn, plain.segment, plain.epoch): records.encode_claim(plain),
        records.ack_key(ACK): records.encode_ack(ACK),
        records.ack_key(replace(ACK, txn=GROUP)): records.encode_ack(ACK),
    }
    assert len(keys) == 4
    assert records.claim_key(ATTEMPT, "s", 2) == f"/txn/op/3_42/w:s:{2:020}:{9:020}"
    assert records.claim_key(GROUP, "s", 2) == f"/txn/op/3_42/w:s:{2:020}"
    assert all(key.startswith(lo) for key in keys)
    found = [records.decode_operation(key, value) for key, value in keys.items()]
    assert found == [claim, plain, ACK, replace(ACK, txn=GROUP)]
    assert [records.txn_of_operation(key) for key in keys] == [ATTEMPT, GROUP] * 2


@pytest.mark.parametrize(
    "name",
    [
        f"w:s:{2:020}:{0:020}",
        f"w:s:{2:020}:{LAST_ATTEMPT + 1:020}",
        f"w:s:{2:020}:x",
        f"w:s:{2:020}:9",
        f"w:s:{2:020}:{9:020}:{9:020}",
        "w:s",
    ],
)
def test_a_record_of_no_attempt_is_corrupt(name: str) -> None:
    value = records.encode_claim(Claim(GROUP, "s", 2, Position(1, 2)))
    with pytest.raises(CorruptTransactionRecord):
        records.decode_operation(f"/txn/op/3_42/{name}", value)
