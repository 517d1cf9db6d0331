"""The states of a transaction at its client.  Pure.

NEW -> OPEN -> COMMITTING -> COMMITTED
       OPEN, COMMITTING -> ABORTING -> ABORTED
       OPEN, COMMITTING -> TIMED_OUT            any that has not ended -> FAILED
"""

import enum
from typing import Final

from magnetar.protocol.server_error import InternalError
from magnetar.protocol.state_table import StateTable

__all__ = ["TransactionState", "next_state"]


class TransactionState(enum.Enum):
    """The states of a transaction at its client."""

    NEW = "new"
    OPEN = "open"
    COMMITTING = "committing"
    """It waits for all that was sent and acknowledged in it, and then for the broker's answer."""
    COMMITTED = "committed"
    ABORTING = "aborting"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"
    """The deadline passed before the broker was asked to commit; the broker aborts it."""
    FAILED = "failed"
    """The broker refused a request, or did not say in time how it ended."""

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return not _NEXT[self]


_S: Final = TransactionState
_NEXT: Final[StateTable[TransactionState]] = StateTable(
    {
        _S.NEW: frozenset({_S.OPEN, _S.FAILED}),
        _S.OPEN: frozenset({_S.COMMITTING, _S.ABORTING, _S.TIMED_OUT, _S.FAILED}),
        _S.COMMITTING: frozenset({_S.COMMITTED, _S.ABORTING, _S.TIMED_OUT, _S.FAILED}),
        _S.COMMITTED: frozenset(),
        _S.ABORTING: frozenset({_S.ABORTED, _S.FAILED}),
        _S.ABORTED: frozenset(),
        _S.TIMED_OUT: frozenset(),
        _S.FAILED: frozenset(),
    },
    defect=InternalError,
)


def next_state(now: TransactionState, then: TransactionState) -> TransactionState:
    """Return `then`.  Raises `InternalError` if a transaction cannot go there."""
    return _NEXT.move(now, then, "A transaction")
