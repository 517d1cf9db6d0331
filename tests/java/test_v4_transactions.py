"""Transactions of the official v4 client on ordinary topics."""

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.java.conftest import RunCase

ENDS = ("commit", "abort")


@pytest.mark.parametrize(
    ("end", "batching"), [("commit", True), ("commit", False), ("abort", True)]
)
def test_v4_transaction_on_two_topics_is_seen_right_after_its_end(
    run_v4_case: RunCase, end: str, batching: bool
) -> None:
    facts = run_v4_case("v4_txn_topics", end=end, batching=batching)
    committed = end == "commit"
    assert facts["seen_while_open"] == [0, 0]
    assert not facts["available_while_open"]
    assert facts["available"] == committed
    assert facts["state"] == ("COMMITTED" if committed else "ABORTED")
    assert facts["seen"] == ([10, 10] if committed else [0, 0])
    assert facts["reader_saw"] == (10 if committed else 0)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mode", ["individual", "cumulative", "batch"])
def test_v4_acknowledgements_take_effect_at_the_commit(
    run_v4_case: RunCase, on_peer: bool, mode: str, end: str
) -> None:
    facts = run_v4_case("v4_txn_acks", mode=mode, end=end)
    assert facts["left"] == (4 if end == "commit" else 10)
    if end == "commit":
        assert facts["redelivered"] == 0
    elif mode == "individual":
        assert facts["redelivered"] == 6
    elif mode == "batch":  # docs/differences.md, redelivery of batches
        assert facts["redelivered"] == (10 if on_peer else 6)
    else:  # docs/differences.md, v4 clients, cumulative acknowledgements
        assert facts["redelivered"] == (0 if on_peer else 10)


def test_v4_conflict_aborts_the_later_transaction_alone(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_txn_conflict")
    assert "TransactionConflictException" in facts["refusal"]
    assert facts["commit_of_other"] != "none"
    assert facts["commit_of_holder"] == "none"
    assert facts["left"] == 9


def test_v4_transaction_that_nobody_ends_times_out(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_txn_timeout")
    assert facts["seen_before"] == 0
    assert facts["seen"] == ["after"]
    assert facts["commit"] != "none"


def test_v4_requests_that_are_repeated_succeed_and_faulty_ones_are_refused(
    run_v4_case: RunCase, on_peer: bool
) -> None:
    facts = run_v4_case("v4_txn_repeated")
    if on_peer:  # docs/differences.md, v4 clients: END_TXN again, ADD_*
        assert "TransactionNotFoundException" in facts["again"]
        return
    assert facts["again"] == "none"
    assert "InvalidTxnStatusException" in facts["otherwise"]
    assert "InvalidTxnStatusException" in facts["late"]
    assert "TransactionNotFoundException" in facts["unknown"]
    assert "takes no part in the transaction" in facts["missing_topic"]


def test_v4_admin_library_shows_and_aborts_a_transaction(
    run_v4_case: RunCase, broker: BrokerUnderTest, on_peer: bool
) -> None:
    facts = run_v4_case("v4_txn_admin", web=broker.admin_url)
    assert facts["coordinators"] >= 1
    assert facts["ongoing"] >= 1
    assert facts["slow"]
    assert facts["status"] == "OPEN"
    assert facts["produced"]
    assert facts["acked"] == ["s"]
    assert facts["in_buffer"]
    assert (facts["buffer"], facts["pending_acks"]) == (1, 1)
    assert facts["position"] == "PendingAck"
    if not on_peer:  # docs/transactions.md: there are no logs
        assert "no logs here" in facts["internal"]
    assert facts["replicas"] != "none"
    assert facts["redelivered"] == 1
    assert facts["commit"] != "none"


@pytest.mark.parametrize("end", ENDS)
def test_v4_and_v5_transactions_meet_on_one_topic(
    run_case: RunCase, on_peer: bool, end: str
) -> None:
    if on_peer:
        return  # docs/differences.md, ordinary topics: the v5 one stays invisible there
    facts = run_case("v4_txn_mixed", end=end)
    assert facts["seen_while_open"] == [0, 0]
    assert facts["seen"] == (20 if end == "commit" else 10)
    assert facts["older_seen_by_v5"] == (10 if end == "commit" else 0)
