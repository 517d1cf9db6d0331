"""The header's state machine: END as a table."""

import itertools

import pytest

from magnetar.protocol.txn_id import TxnId
from txn.errors import InvalidTxnStatus, TransactionAssertion, TransactionNotFound
from txn.header import (
    OPERATOR,
    STATE_MOVES,
    EndVerdict,
    bounded_timeout_ms,
    decide_end,
    end_header,
    refusal_error,
)
from txn.records import Header, TxnState

OPEN = Header(TxnState.OPEN, 1000, 5, None, "alice")
COMMITTED = end_header(OPEN, TxnState.COMMITTED, 9)
ABORTED = end_header(OPEN, TxnState.ABORTED, 9)
TXN = TxnId(1, 2)


@pytest.mark.parametrize(
    ("header", "action", "owner", "verdict"),
    [
        (OPEN, TxnState.COMMITTED, "alice", EndVerdict.WRITE),
        (OPEN, TxnState.ABORTED, "alice", EndVerdict.WRITE),
        (COMMITTED, TxnState.COMMITTED, "alice", EndVerdict.DONE),
        (ABORTED, TxnState.ABORTED, "alice", EndVerdict.DONE),
        (COMMITTED, TxnState.ABORTED, "alice", EndVerdict.OTHERWISE),
        (ABORTED, TxnState.COMMITTED, "alice", EndVerdict.OTHERWISE),
        (None, TxnState.COMMITTED, "alice", EndVerdict.NOT_FOUND),
        (OPEN, TxnState.COMMITTED, "bob", EndVerdict.NOT_OWNER),
        (OPEN, TxnState.COMMITTED, None, EndVerdict.NOT_OWNER),
        (COMMITTED, TxnState.COMMITTED, "bob", EndVerdict.NOT_OWNER),
        (OPEN, TxnState.ABORTED, OPERATOR, EndVerdict.WRITE),
        (Header(TxnState.OPEN, 1, 1), TxnState.ABORTED, "bob", EndVerdict.NOT_OWNER),
        (Header(TxnState.OPEN, 1, 1), TxnState.ABORTED, OPERATOR, EndVerdict.WRITE),
        (Header(TxnState.OPEN, 1, 1), TxnState.ABORTED, None, EndVerdict.WRITE),
    ],
)
def test_end_of_a_header_answers_by_its_state(
    header: Header | None, action: TxnState, owner: str | None, verdict: EndVerdict
) -> None:
    assert decide_end(header, action, owner) is verdict


def test_only_open_moves() -> None:
    for header, action in itertools.product((OPEN, COMMITTED, ABORTED), TxnState):
        if action in STATE_MOVES[header.state]:
            assert end_header(header, action, 9).state is action
        else:
            with pytest.raises(TransactionAssertion):
                end_header(header, action, 9)
    assert [state for state in TxnState if STATE_MOVES[state]] == [TxnState.OPEN]


def test_an_end_keeps_everything_else() -> None:
    assert end_header(OPEN, TxnState.COMMITTED, 77) == Header(
        TxnState.COMMITTED, 1000, 5, 77, "alice"
    )


def test_refusals() -> None:
    assert isinstance(refusal_error(TXN, COMMITTED, EndVerdict.OTHERWISE), InvalidTxnStatus)
    assert isinstance(refusal_error(TXN, None, EndVerdict.NOT_FOUND), TransactionNotFound)
    none, foreign = (
        refusal_error(TXN, header, verdict)
        for header, verdict in ((None, EndVerdict.NOT_FOUND), (OPEN, EndVerdict.NOT_OWNER))
    )
    assert (type(foreign), str(foreign)) == (type(none), str(none))


def test_timeouts() -> None:
    assert bounded_timeout_ms(0) == 60_000
    assert bounded_timeout_ms(1) == 1
    assert bounded_timeout_ms(2**64 - 1) == 24 * 3600 * 1000
