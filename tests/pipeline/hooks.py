"""Points in the life of a query at which its processes report, wait, fail or die.

Rules: a process reports every point that it passes, as a line of JSON appended to one file; what it
does there besides is told by the *rules* of a plan that the test has written before.  A rule acts a
number of times, counted over all processes; what a rule leaves out, it does not ask for.  Where
the plan is, is in the environment, which the processes of Spark inherit; without it there is none.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pyspark import TaskContext

VARIABLE: Final = "MAGNETAR_TEST_HOOKS"
PLAN: Final = "plan.json"
REACHED: Final = "reached.jsonl"
POLL_S: Final = 0.01


class Point(StrEnum):
    """Where the processes of a query pass."""

    OFFSET_CHOSEN = "offset chosen"
    """The source has told the end of a batch; nothing of the batch is in the checkpoint."""
    PARTITIONS = "partitions"
    """The batch is in the checkpoint's log of offsets; its tasks are being planned."""
    READ_BEGINS = "read begins"
    WRITE_BEGINS = "write begins"
    WRITE_UNDER_WAY = "write under way"
    """The writer has taken some rows of a task, and asks for more."""
    WRITE_RETURNED = "write returned"
    COMMIT_BEGINS = "commit begins"
    COMMIT_RETURNED = "commit returned"
    """The sink has committed, and Spark does not know yet."""
    ABORT_BEGINS = "abort begins"
    ABORT_RETURNED = "abort returned"


class Action(StrEnum):
    """What a rule makes a process do."""

    PASS = "pass"
    WAIT = "wait"
    """... until the rule is released."""
    FAIL = "fail"
    DIE = "die"
    """SIGKILL to itself."""
    LINGER = "linger"
    """Where a write begins: a child goes on with the write when the rule is released, and here it
    fails.  So does a task that Spark has given up, on a machine that it has lost sight of."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the plan."""

    name: str
    point: Point
    action: Action = Action.PASS
    batch: int | None = None
    partition: int | None = None
    attempt: int | None = None
    times: int = 1
    skip: int = 0
    """It lets so many pass before it acts."""

    def goes_with(self, where: "Reached") -> bool:
        """Whether it is about this."""
        return self.point == where.point and all(
            asked is None or asked == found
            for asked, found in (
                (self.batch, where.batch),
                (self.partition, where.partition),
                (self.attempt, where.attempt),
            )
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Rule":
        return cls(**{**given, "point": Point(given["point"]), "action": Action(given["action"])})


@dataclass(frozen=True, slots=True)
class Reached:
    """A point that a process has come to, and the rule that acts there."""

    point: Point
    pid: int
    batch: int | None = None
    partition: int | None = None
    attempt: int | None = None
    rule: str | None = None

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Reached":
        return cls(**{**given, "point": Point(given["point"])})


class HookFailure(RuntimeError):
    """What a rule makes a process fail with."""


def outcome_file(directory: Path, rule: str) -> Path:
    """What became of the one that lingered, once it is there."""
    return directory / f"{rule}.outcome"


def release_file(directory: Path, rule: str) -> Path:
    """What releases the processes that wait by this rule, once it is there."""
    return directory / f"{rule}.released"


def here(point: Point, batch: int | None = None) -> Rule | None:
    """This process is at that point; returns when it may go on, with the rule that acted."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return None
    directory = Path(named)
    where = _where(point, batch)
    rule = _acting(directory, where)
    line = asdict(where) | {"rule": rule.name if rule else None}
    with (directory / REACHED).open("a", encoding="utf-8") as reached:
        reached.write(json.dumps(line) + "\n")
    if rule is not None:
        _act(rule)
    return rule


def wait_for(rule: Rule) -> None:
    """Return when the rule is released."""
    while not release_file(Path(os.environ[VARIABLE]), rule.name).exists():
        time.sleep(POLL_S)


def told(rule: Rule, outcome: str) -> None:
    """What became of the one that lingers."""
    file = outcome_file(Path(os.environ[VARIABLE]), rule.name)
    draft = file.with_suffix(".draft")
    draft.write_text(outcome, "utf-8")
    draft.rename(file)


def _where(point: Point, batch: int | None) -> Reached:
    task = TaskContext.get()
    if task is None:
        return Reached(point, os.getpid(), batch)
    told = task.getLocalProperty("streaming.sql.batchId")
    return Reached(
        point,
        os.getpid(),
        batch if told is None else int(told),
        task.partitionId(),
        task.attemptNumber(),
    )


def _acting(directory: Path, where: Reached) -> Rule | None:
    """The first rule of the plan that is about this and has not acted often enough."""
    plan = directory / PLAN
    if not plan.exists():
        return None
    for each in json.loads(plan.read_text("utf-8")):
        rule = Rule.from_json(each)
        if rule.goes_with(where) and _taken(directory, rule):
            return rule
    return None


def _taken(directory: Path, rule: Rule) -> bool:
    """Whether this process has one of the times that the rule acts."""
    for number in range(rule.skip + rule.times):
        try:
            (directory / f"{rule.name}.{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number >= rule.skip
    return False


def _act(rule: Rule) -> None:
    match rule.action:
        case Action.WAIT:
            wait_for(rule)
        case Action.FAIL:
            raise HookFailure(f"{rule.point}: made to fail by the rule {rule.name}")
        case Action.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.PASS | Action.LINGER:
            pass
