"""Pure: how a transaction may end, and what END is answered.

Rules:

- OPEN ends once, as COMMITTED or ABORTED; what ended stays as it is (T2).
- The same action again is fine, the other one is refused.  A missing header is
  `TransactionNotFound` and is never made again (T3).
- A transaction that a principal began is there for that principal and for operators only.  Whoever
  else asks for its end is told that it is not his, and not how it stands: that there is none would
  be taken for an end that was long ago.
- A timeout of 0 means that the client did not say: it gets the client library's own default.  One
  that is above the bound is cut to it, as an open transaction holds back every reader of what it
  wrote.
- What a group's header says is said of its attempts too, by index (G1).  They are ended by nobody
  but their group, and that is committed by COMMIT_GROUP only, which names the winners (G4).
- A deadline only rises, by a move that leaves an open transaction open (G8).
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
        TxnState.COMMITTED: frozenset(),
        TxnState.ABORTED: frozenset(),
    },
    defect=TransactionAssertion,
)

OPERATOR = "\x00operator"
"""As an owner: whoever runs the broker, its timers included.  No principal has such a name."""


class EndVerdict(enum.Enum):
    """The outcome of deciding an END."""

    WRITE = "write the end"
    DONE = "it ended so already"
    OTHERWISE = "it ended otherwise"
    NOT_FOUND = "there is none"
    NOT_OWNER = "somebody else began it"
    OF_GROUP = "its group decides, or it is one and is to be told its winners"


def header_of(header: Header, txn: TxnId) -> Header | None:
    """Read a transaction, or an attempt of a group, out of the header stored for it (G1).

    Of an attempt it tells the state; None if there is no such attempt.
    """
    index = txn.attempt_index
    if not index:
        return header
    group = header.group
    if group is None or not group.is_reserved(index):
        return None
    if header.state is not TxnState.COMMITTED or group.is_winner(index):
        return header
    return replace(header, state=TxnState.ABORTED)


def state_for_writes(header: Header, txn: TxnId) -> TxnState | None:
    """Return the state that decides over writes and acknowledgements; a group takes none (G1)."""
    return None if header.group is not None and not txn.attempt_index else header.state


def decide_end(
    header: Header | None, action: TxnState, owner: str | None, *, is_attempt: bool = False
) -> EndVerdict:
    """Decide an END with that action by that owner (T2, T3, G4)."""
    if header is None:
        return EndVerdict.NOT_FOUND
    if not is_owner(header, owner):
        return EndVerdict.NOT_OWNER
    if is_attempt or (header.group is not None and action is TxnState.COMMITTED):
        return EndVerdict.OF_GROUP
    if action in STATE_MOVES[header.state]:
        return EndVerdict.WRITE
    return EndVerdict.DONE if header.state is action else EndVerdict.OTHERWISE


def is_owner(header: Header, owner: str | None) -> bool:
    """Whether the transaction is there for that principal."""
    return header.owner is None or owner in (header.owner, OPERATOR)


def end_header(header: Header, action: TxnState, now_ms: int) -> Header:
    """The header after its end.  Raises `TransactionAssertion` for a move that is not allowed."""
    state = STATE_MOVES.move(header.state, action, "A transaction")
    return replace(header, state=state, finalized_ms=now_ms)


def raise_deadline(header: Header, deadline_ms: int, now_ms: int) -> Header:
    """The open header with that deadline, or a later one that it has (G8).

    No deadline is longer than the longest timeout from now; one that has been given stays.
    """
    assert header.state is TxnState.OPEN, "only what is open has a deadline"
    bounded_ms = min(deadline_ms, now_ms + TXN_TIMEOUT_MAX_MS)
    if bounded_ms <= header.deadline_ms:
        return header
    return replace(header, timeout_ms=bounded_ms - header.created_ms)


def refusal_error(txn: TxnId, header: Header | None, verdict: EndVerdict) -> MagnetarError:
    """Why an END, or a use, is refused."""
    if verdict is EndVerdict.OF_GROUP:
        return InvalidTxnStatus(
            f"Transaction {txn} is of a group: commit that with its winners (COMMIT_GROUP), or "
            f"abort the group, {txn.group}."
        )
    if verdict is EndVerdict.OTHERWISE and header is not None:
        return not_open_error(txn, header)
    if verdict is EndVerdict.NOT_OWNER:  # clients of Apache Pulsar are told so with these words
        return TransactionNotFound(
            f"This client is neither the owner of transaction {txn} nor an operator of the broker: "
            "end it as the role that began it, or wait for its deadline."
        )
    return TransactionNotFound(
        f"There is no transaction {txn} for this client: it ended long ago, or somebody else "
        "began it. Begin another one."
    )


def not_open_error(txn: TxnId, header: Header) -> InvalidTxnStatus:
    """Why an ended transaction can be neither used nor ended otherwise."""
    return InvalidTxnStatus(
        f"Transaction {txn} is {header.state.value} already: begin another one for what is left."
    )


def bounded_timeout_ms(asked_ms: int) -> int:
    """The timeout that a transaction gets when a client asks for that one."""
    if asked_ms <= 0:
        return TXN_TIMEOUT_DEFAULT_MS
    return min(asked_ms, TXN_TIMEOUT_MAX_MS)
