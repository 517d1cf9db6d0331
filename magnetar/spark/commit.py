"""From the reports of the tasks to the decision that the driver sends to the coordinator.

Pure.  Rules:

- C1 Each task of the batch has exactly one report.  None, a task without report, or two of one
  partition: refused.  So no row that Spark believes written is left out.
- C2 All reports are of one nonce, and of one group at most: the attempts of one try of the batch.
- C3 The winners are the attempts of the reports; a report with rows has an attempt, and counts of
  all its rows.  Other attempts of the group, of tasks that were tried again, are no winners.
- C4 Query and batch are those that the tasks report and those that the checkpoint and Spark name,
  as far as these are known.  Two that differ are refused.
- C5 A report that is `done` says that an earlier group has committed this batch, which is final:
  nothing is committed for it again, whatever the other reports say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from magnetar.protocol.txn_id import TxnId
from magnetar.spark.errors import CommitRefused
from magnetar.spark.task_report import RowCount, TaskReport

__all__ = ["AlreadyDone", "Decision", "WinningAttempt", "judge"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WinningAttempt:
    """An attempt that is to be committed, and its rows by segment topic."""

    attempt: TxnId
    counts: Mapping[str, RowCount]


@dataclass(frozen=True, slots=True)
class Decision:
    """The batch to commit.  Without a `group` no task had a row: only the batch is recorded."""

    nonce: str
    group: TxnId | None
    winners: tuple[WinningAttempt, ...]
    query: str
    batch: int


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """An earlier try has committed the batch; the open group of this one is to be aborted."""

    nonce: str
    query: str | None
    batch: int


def judge(
    reports: Sequence[TaskReport | None], batch: int, query: str | None = None
) -> Decision | AlreadyDone:
    """Decide about batch `batch` from the reports of its tasks (C1 to C5).

    `query` is the one that the checkpoint names, if that is known.  Raises `CommitRefused`, before
    any request to the coordinator, so that the batch stays open or is aborted.
    """
    given = _each_task_once(reports)
    nonce = _only("nonce", {report.nonce for report in given})  # C2
    # C4
    batches = {batch, *(report.batch for report in given if report.batch is not None)}
    if len(batches) > 1:
        raise CommitRefused(
            f"Spark commits batch {batch}, its tasks were given to write batches "
            f"{sorted(batches - {batch})}: nothing is committed. Restart the query."
        )
    queries = {name for name in (query, *(report.query for report in given)) if name is not None}
    if len(queries) > 1:
        raise CommitRefused(
            f"The reports of batch {batch} are of several queries ({sorted(queries)}): nothing is "
            "committed. If the checkpoint belongs to another query, give this one its own; else "
            "restart the query."
        )
    known = next(iter(queries), None)
    # C5
    if any(report.done for report in given):
        return AlreadyDone(nonce, known, batch)
    if known is None:
        raise CommitRefused(
            f"It is not known which query batch {batch} is of: nothing is committed. Give the "
            "query the option checkpointLocation."
        )
    group, winners = _winners(given)
    return Decision(nonce, group, winners, known, batch)


def _each_task_once(reports: Sequence[TaskReport | None]) -> list[TaskReport]:
    """The reports, if each task has exactly one (C1)."""
    given = [report for report in reports if report is not None]
    if not given:
        raise CommitRefused(
            "No task has reported, so there is nothing to be committed. Restart the query."
        )
    partitions = sorted(report.partition for report in given)
    if partitions != list(range(len(reports))):
        raise CommitRefused(
            f"Of {len(reports)} tasks, those of the partitions {partitions} have reported; each "
            "has to, once. Nothing is committed: restart the query."
        )
    return given


def _winners(given: Sequence[TaskReport]) -> tuple[TxnId | None, tuple[WinningAttempt, ...]]:
    """The group of the reports, if any has one, and the winners (C2, C3)."""
    winners = []
    for report in given:
        stored = sum(count.messages for count in report.counts.values())
        if stored != report.rows or (report.rows and report.attempt is None):
            raise CommitRefused(
                f"The task of partition {report.partition} has written {report.rows} rows and "
                f"counts {stored} as stored, in attempt {report.attempt}: nothing is committed. "
                "Restart the query, and report this."
            )
        if (report.attempt is None) != (report.group is None):
            raise CommitRefused(
                f"The task of partition {report.partition} names attempt {report.attempt} and "
                f"group {report.group}: nothing is committed. Restart the query, and report this."
            )
        if report.attempt is not None:
            winners.append(WinningAttempt(report.attempt, dict(report.counts)))
    groups = {report.group for report in given if report.group is not None}
    if len({winner.attempt for winner in winners}) < len(winners):
        raise CommitRefused(
            "Two tasks report the same attempt: nothing is committed. Restart the query, and "
            "report this."
        )
    return (_only("group", groups) if groups else None), tuple(winners)


def _only(what: str, found: set[T]) -> T:
    if len(found) > 1:
        raise CommitRefused(
            f"The reports are of several tries of the batch ({what}: "
            f"{', '.join(sorted(map(str, found)))}): nothing is committed. Restart the query."
        )
    return next(iter(found))
