"""Pure: the ends that a transaction may have, and the answers to END.

Rules (T, G: `docs/transactions.md`):

- T2: an open transaction ends once, as COMMITTED or ABORTED.  The same end again is no error, the
  other one is refused.
- T3: a transaction without header is `TransactionNotFound`, and is never made again.
- G1: the header of a group tells the state of its attempts too, by their index.
- G4: only its group ends an attempt, and only COMMIT_GROUP, which names the winners, commits a
  group.
- G8: the deadline of an open transaction only rises.
"""

import enum
from dataclasses import replace

from config.bounds import TXN_TIMEOUT_DEFAULT_MS, TXN_TIMEOUT_MAX_MS
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from txn.errors import InvalidTxnStatus, TransactionAssertion, TransactionNotFound
from txn.records import Header, TxnState

STATE_MOVES: StateTable[TxnState] = StateTable(
    {
        TxnState.OPEN: frozenset({TxnState.COMMITTED, TxnState.ABORTED}),
        # T2: an end is final.
        TxnState.COMMITTED: frozenset(),
        TxnState.ABORTED: frozenset(),
    },
    defect=TransactionAssertion,
)

OPERATOR = "\x00operator"
"""The owner that stands for operators and for the broker's timers.  No principal has this name."""


class EndVerdict(enum.Enum):
    """The outcome of deciding an END."""

    WRITE = "write the end"
    DONE = "it ended so already"
    OTHERWISE = "it ended otherwise"
    NOT_FOUND = "there is none"
    NOT_OWNER = "another principal began it"
    OF_GROUP = "it is an attempt, or a group, which is committed with its winners"


def header_of(header: Header, txn: TxnId) -> Header | None:
    """The header of a transaction, or of an attempt, by the header that is stored for it (G1).

    An attempt has the header of its group, with a state of its own.  None: there is no such
    attempt.
    """
    index = txn.attempt_index
    if not index:
        return header
    group = header.group
    # G1: an index that was not reserved is no attempt; of a committed group the losers aborted.
    if group is None or not group.is_reserved(index):
        return None
    if header.state is not TxnState.COMMITTED or group.is_winner(index):
        return header
    return replace(header, state=TxnState.ABORTED)


def state_for_writes(header: Header, txn: TxnId) -> TxnState | None:
    """The state by which writes and acknowledgements are decided; a group takes none (G1)."""
    return None if header.group is not None and not txn.attempt_index else header.state


def decide_end(
    header: Header | None, action: TxnState, owner: str | None, *, is_attempt: bool = False
) -> EndVerdict:
    """Decide an END with that action by that owner (T2, T3, G4, L4)."""
    if header is None:
        return EndVerdict.NOT_FOUND  # T3
    if not is_owner(header, owner):
        return EndVerdict.NOT_OWNER
    # G4: an attempt ends with its group, and END names no winners.
    if is_attempt or (header.group is not None and action is TxnState.COMMITTED):
        return EndVerdict.OF_GROUP
    if action in STATE_MOVES[header.state]:
        return EndVerdict.WRITE
    return EndVerdict.DONE if header.state is action else EndVerdict.OTHERWISE


def is_owner(header: Header, owner: str | None) -> bool:
    """Whether a principal may use the transaction: it began it, or is an operator.

    One that was begun without authentication has no owner: with authentication it is for operators.
    """
    return owner in (header.owner, OPERATOR)


def end_header(header: Header, action: TxnState, now_ms: int) -> Header:
    """The header after its end.  Raises `TransactionAssertion` for a move that is not allowed."""
    state = STATE_MOVES.move(header.state, action, "A transaction")
    return replace(header, state=state, finalized_ms=now_ms)


def raise_deadline(header: Header, deadline_ms: int, now_ms: int) -> Header:
    """The header of an open transaction with a later deadline (G8).

    A deadline is at most TXN_TIMEOUT_MAX_MS from now.  One that is later already stays.
    """
    assert header.state is TxnState.OPEN, "only what is open has a deadline"
    bounded_ms = min(deadline_ms, now_ms + TXN_TIMEOUT_MAX_MS)
    # G8: never lowered.
    if bounded_ms <= header.deadline_ms:
        return header
    return replace(header, timeout_ms=bounded_ms - header.created_ms)


def refusal_error(txn: TxnId, header: Header | None, verdict: EndVerdict) -> MagnetarError:
    """The error for an END, or another request, that is refused."""
    if verdict is EndVerdict.OF_GROUP:
        return InvalidTxnStatus(
            f"Transaction {txn} is of a group: commit that with its winners (COMMIT_GROUP), or "
            f"abort the group, {txn.group}."
        )
    if verdict is EndVerdict.OTHERWISE and header is not None:
        return not_open_error(txn, header)
    return TransactionNotFound(not_found_text(txn))


def not_found_text(txn: TxnId) -> str:
    """The text of the refusal for a transaction that does not exist, or that another role began.

    It is the same for both: ids are easily guessed, and no role may find out what others have open.
    """
    return (
        f"There is no transaction {txn} for this client: it ended long ago, or another client "
        "began it. Begin another one."
    )


def not_open_error(txn: TxnId, header: Header) -> InvalidTxnStatus:
    """The error for a request about a transaction that has ended."""
    return InvalidTxnStatus(
        f"Transaction {txn} is {header.state.value} already: begin another one for what is left."
    )


def bounded_timeout_ms(asked_ms: int) -> int:
    """The timeout of a transaction for which a client asks for `asked_ms`; 0: the default.

    It is bounded, as an open transaction holds back every reader of its segments.
    """
    if asked_ms <= 0:
        return TXN_TIMEOUT_DEFAULT_MS
    return min(asked_ms, TXN_TIMEOUT_MAX_MS)
