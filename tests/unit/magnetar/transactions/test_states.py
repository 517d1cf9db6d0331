"""Where a transaction may go."""

import pytest

from magnetar.protocol.server_error import InternalError
from magnetar.transactions.states import TransactionState as S
from magnetar.transactions.states import next_state

ALLOWED = {
    (S.NEW, S.OPEN),
    (S.NEW, S.FAILED),
    (S.OPEN, S.COMMITTING),
    (S.OPEN, S.ABORTING),
    (S.OPEN, S.TIMED_OUT),
    (S.OPEN, S.FAILED),
    (S.COMMITTING, S.COMMITTED),
    (S.COMMITTING, S.ABORTING),
    (S.COMMITTING, S.TIMED_OUT),
    (S.COMMITTING, S.FAILED),
    (S.ABORTING, S.ABORTED),
    (S.ABORTING, S.FAILED),
}


@pytest.mark.parametrize("now", S)
@pytest.mark.parametrize("then", S)
def test_transitions(now: S, then: S) -> None:
    if (now, then) in ALLOWED:
        assert next_state(now, then) is then
    else:
        with pytest.raises(InternalError):
            next_state(now, then)


def test_final_states_are_the_ended_ones() -> None:
    final = {state for state in S if state.is_final}
    assert final == {S.COMMITTED, S.ABORTED, S.TIMED_OUT, S.FAILED}
