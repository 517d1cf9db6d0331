"""A driver as a process of its own, with all that it starts: hooked, killed, paused, run again.

Rules: the driver, its JVM and its Python workers make one session of processes (`setsid`; Spark's
worker daemon leaves the process group, not the session), and signals go to all of it.  Each rule of
its hooks must have acted by the end of the test, or the test has shown nothing.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.pipeline import spark_session
from tests.pipeline.driver import RUNNING
from tests.pipeline.hooks import (
    PLAN,
    REACHED,
    VARIABLE,
    Action,
    Point,
    Reached,
    Rule,
    outcome_file,
    release_file,
)
from tests.support.broker_process import ROOT
from tests.support.child_process import ChildFailed, ChildProcess

PATIENCE_S: Final = 240
"""For what takes seconds on a machine that has nothing else to do."""
POLL_S: Final = 0.02
STATE, SESSION = 0, 3
"""Places in /proc/<pid>/stat, after the name of the program."""


class Hooks:
    """The plan of one driver, and what its processes have reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._rules: list[Rule] = []
        directory.mkdir(parents=True)

    def at(
        self,
        point: Point,
        action: Action = Action.PASS,
        *,
        batch: int | None = None,
        partition: int | None = None,
        attempt: int | None = None,
        times: int = 1,
        skip: int = 0,
    ) -> Rule:
        """A rule, in force from now on, also for drivers that run."""
        name = f"rule-{len(self._rules)}"
        rule = Rule(name, point, action, batch, partition, attempt, times, skip)
        self._rules.append(rule)
        draft = self.directory / "draft"
        draft.write_text(json.dumps([each.to_json() for each in self._rules]), "utf-8")
        draft.rename(self.directory / PLAN)
        return rule

    def release(self, rule: Rule) -> None:
        """Those that wait by it go on, now and later."""
        release_file(self.directory, rule.name).touch()

    def outcome(self, rule: Rule) -> str | None:
        """What became of the one that lingers by this rule, as far as it is known."""
        file = outcome_file(self.directory, rule.name)
        return file.read_text("utf-8") if file.exists() else None

    def reached(self, rule: Rule | None = None) -> list[Reached]:
        """What was reported, or only that where this rule acted."""
        path = self.directory / REACHED
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        every = [Reached.from_json(json.loads(line)) for line in lines if line.endswith("\n")]
        return [each for each in every if rule is None or each.rule == rule.name]

    def silent(self) -> list[Rule]:
        """Rules that have not acted as often as they say."""
        return [rule for rule in self._rules if len(self.reached(rule)) < rule.times]


class DriverProcess(ChildProcess):
    """`python -m <module> <JSON>` in a directory of its own."""

    def __init__(
        self, name: str, directory: Path, module: str, given: Mapping[str, object], hooks: Hooks
    ) -> None:
        super().__init__(name, directory)
        self.hooks = hooks
        self._module = module
        self._given = dict(given) | {"directory": str(directory)}

    def command(self) -> list[str]:
        return [sys.executable, "-m", self._module, json.dumps(self._given)]

    def environment(self) -> Mapping[str, str]:
        hooked = {VARIABLE: str(self.hooks.directory)}
        return os.environ | spark_session.environment() | hooked

    @property
    def working_directory(self) -> Path:
        return ROOT

    async def is_serving(self) -> bool:
        return RUNNING in self.log(this_run=True)

    # What tests do with it

    async def until(self, rule: Rule) -> Reached:
        """Wait until the rule has acted for the last time; what was reported then."""

        def acted() -> bool:
            return len(self.hooks.reached(rule)) >= rule.times

        await self._until(acted, f"{rule.point} was not reached as {rule} asks")
        return self.hooks.reached(rule)[-1]

    async def finished(self) -> int:
        """Wait for the end of the driver and of all that it started; the exit status."""
        status = await self.finished_alone()
        self.kill()
        return status

    async def finished_alone(self) -> int:
        """Wait for the end of the driver, whatever its workers do; the exit status."""
        assert self._process is not None
        process = self._process
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while (status := process.poll()) is None:
            if loop.time() > deadline:
                raise ChildFailed(f"{self.name} does not end; its log ends so:\n{self.logs()}")
            await asyncio.sleep(POLL_S)
        return status

    async def run_to_end(self) -> None:
        """Start it, and wait for its end, which must be a good one."""
        self.spawn()
        status = await self.finished()
        if status != 0:
            raise ChildFailed(f"{self.name} ended with status {status}:\n{self.logs()}")

    def kill(self) -> None:
        """SIGKILL to all processes at once, and wait until there are none."""
        if self._process is None:
            return
        leader = self._process.pid
        signal_session(leader, signal.SIGKILL)
        super().kill()
        while signal_session(leader, signal.SIGKILL):
            time.sleep(POLL_S)

    def pause(self) -> None:
        """SIGSTOP to all processes.  Returns when it has taken effect."""
        while any(state_of(pid) not in "TZ" for pid in session(self.pid)):
            signal_session(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all processes."""
        signal_session(self.pid, signal.SIGCONT)

    def kill_driver(self) -> None:
        """SIGKILL to the driver and its JVM alone: workers find out when they next speak to it."""
        workers = set(workers_of(self.pid))
        for pid in session(self.pid):
            if pid not in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def logs(self) -> str:
        """What the driver, its JVM and Spark wrote last."""
        jvm = self._end_of(spark_session.JVM_OUTPUT, 4000)
        spark = self._end_of(spark_session.LOG, 8000)
        return f"{self.log()[-4000:]}\nThe JVM printed:\n{jvm}\nSpark's log:\n{spark}"

    def _end_of(self, name: str, characters: int) -> str:
        path = self.directory / name
        return path.read_text("utf-8", "replace")[-characters:] if path.exists() else "(none)"

    async def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while not condition():
            ended = self._process is None or self._process.poll() is not None
            if ended and not condition():
                raise ChildFailed(f"{otherwise}: {self.name} has ended:\n{self.logs()}")
            if loop.time() > deadline:
                raise ChildFailed(f"{otherwise} within {PATIENCE_S} s:\n{self.logs()}")
            await asyncio.sleep(POLL_S)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the program's name; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """One letter; Z for what has ended."""
    fields = _stat(pid)
    return "Z" if fields is None else fields[STATE]


def session(leader: int) -> list[int]:
    """The processes of a session that live, its leader among them."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            fields = _stat(int(path.name))
            if fields and int(fields[SESSION]) == leader and fields[STATE] not in "ZX":
                found.append(int(path.name))
    return found


def workers_of(leader: int) -> list[int]:
    """The processes of a session that run Spark's Python workers, their daemon among them."""
    found = []
    for pid in session(leader):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def signal_session(leader: int, number: signal.Signals) -> int:
    """Send a signal to all of a session; to how many."""
    pids = session(leader)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)
