"""From reports to a decision: rules C1 to C5."""

import pickle
from dataclasses import replace

import pytest

from magnetar.protocol.txn_id import TxnId
from magnetar.spark.commit import AlreadyDone, Decision, judge
from magnetar.spark.errors import CommitRefused
from magnetar.spark.task_report import RowCount, TaskReport

GROUP = TxnId(3, 7)


def attempt(index: int) -> TxnId:
    return TxnId(3, index << 44 | 7)


def report(partition: int, **changes: object) -> TaskReport:
    counts = {"t-0": RowCount(2, 5), "t-1": RowCount(1, 1)}
    whole = TaskReport("n", partition, "q", 4, GROUP, attempt(partition + 1), False, 3, counts)
    return replace(whole, **changes)  # type: ignore[arg-type]


def empty(partition: int, **changes: object) -> TaskReport:
    return replace(TaskReport("n", partition, "q", 4), **changes)  # type: ignore[arg-type]


def test_commit_names_the_winners_of_the_reports() -> None:
    decision = judge([report(1), empty(2), report(0)], 4)
    assert isinstance(decision, Decision)
    assert (decision.nonce, decision.group, decision.query, decision.batch) == ("n", GROUP, "q", 4)
    assert {winner.attempt for winner in decision.winners} == {attempt(1), attempt(2)}
    assert decision.winners[0].counts == {"t-0": RowCount(2, 5), "t-1": RowCount(1, 1)}


def test_a_batch_without_rows_is_recorded_without_group_and_winners() -> None:
    assert judge([empty(0), empty(1)], 4) == Decision("n", None, (), "q", 4)


def test_batch_done_before_is_done_whatever_other_reports_say() -> None:
    assert judge([report(0), empty(1, done=True)], 4) == AlreadyDone("n", "q", 4)


def test_checkpoint_names_the_query_where_no_task_knows_it() -> None:
    unknown = [empty(0, query=None, batch=None)]
    assert judge(unknown, 4, "of the checkpoint") == Decision("n", None, (), "of the checkpoint", 4)
    with pytest.raises(CommitRefused, match="checkpointLocation"):
        judge(unknown, 4)


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        pytest.param([], "No task has reported", id="none at all"),
        pytest.param([None], "No task has reported", id="only None"),
        pytest.param([report(0), None], "have reported", id="one is missing"),
        pytest.param([report(0), report(0)], "have reported", id="one twice"),
        pytest.param([report(0), report(2)], "have reported", id="a gap"),
        pytest.param([report(0), report(1, nonce="m")], "nonce: m, n", id="nonces"),
        pytest.param([report(0), report(1, group=TxnId(3, 8))], "group: 3_7, 3_8", id="groups"),
        pytest.param([report(0), report(1, attempt=attempt(1))], "same attempt", id="attempts"),
        pytest.param([report(0, query="p"), report(1)], "several queries", id="queries"),
        pytest.param([report(0), report(1, batch=5)], "batch 4, its tasks", id="batches"),
        pytest.param([report(0, rows=4)], "counts 3 as stored", id="fewer stored than written"),
        pytest.param([report(0, attempt=None)], "in attempt None", id="rows without attempt"),
        pytest.param([report(0, group=None)], "group None", id="an attempt without group"),
        pytest.param([empty(0, group=GROUP)], "attempt None", id="a group without attempt"),
    ],
)
def test_inconsistent_reports_are_refused(reports: list[TaskReport | None], words: str) -> None:
    with pytest.raises(CommitRefused, match=words):
        judge(reports, 4)


def test_report_of_another_query_than_the_checkpoints_is_refused() -> None:
    with pytest.raises(CommitRefused, match="several queries"):
        judge([report(0)], 4, "another")


@pytest.mark.parametrize("one", [report(0), empty(1, done=True)])
def test_report_survives_serialization(one: TaskReport) -> None:
    back = pickle.loads(pickle.dumps(one))
    assert back == one
    assert back.attempt is None or isinstance(back.attempt, TxnId)
    assert all(isinstance(count, RowCount) for count in back.counts.values())


def test_sums_of_hashes_are_modulo_two_to_the_64() -> None:
    assert RowCount(1, 2**64 - 1).plus(2, 3) == RowCount(3, 2)
