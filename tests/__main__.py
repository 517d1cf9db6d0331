"""`python -m tests RUN`: runs of the tests, one part after the other, and how long each took.

    check    style, types, import rules
    quick    that, and what proves the embedded broker and the client
    all      the whole, with real ZooKeeper, Oxia and bookies, Spark, and the container image
    nightly  what takes hours; its seed is drawn anew and printed

Every part runs to its end, whatever failed before it.  Some run beside the others, and those that
only compute on the processor time that others leave.  The status is 1 if any part failed, 130 if
the run was interrupted.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, NamedTuple

from tests.support.child_process import BESIDE_VARIABLE
from tests.support.effort import SEED_VARIABLE, chosen_seed
from tests.support.run_parts import RUNS, Command, Part, parts_of
from tests.support.run_times import (
    TestTime,
    UnreadableTimes,
    clock,
    lines_by_folder,
    lines_of_failed,
    lines_of_slowest,
    read_times,
)

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "build" / "tests"
SLOWEST: Final = 20
SHOWN_S: Final = 5.0
"""Folders whose tests took less are left out at the end."""
INTERRUPTED_STATUS: Final = 130
ON_LEFTOVER_TIME: Final = (sys.executable, "-m", "tests.support.leftover_time")


class End(Enum):
    """How a part ended."""

    PASSED = "passed"
    FAILED = "FAILED"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and what it took."""

    name: str
    end: End
    wall_s: float
    processor_s: float
    times: Sequence[TestTime]

    def __str__(self) -> str:
        took = f"{clock(self.wall_s)}   {clock(self.processor_s)}   {self.end.value:11}"
        if not self.times:
            return f"{took} {self.name}"
        skipped = sum(each.skipped for each in self.times)
        ran = f"{len(self.times) - skipped:,} tests" + (f", {skipped} skipped" if skipped else "")
        return f"{took} {self.name}: {ran}"


class Ended(NamedTuple):
    """How a command ended: its exit status, and the processor time of all its processes."""

    status: int
    processor_s: float


Execute = Callable[[Command, Path], Ended]
"""Run a command; the times of its tests go to the file.  Raises `KeyboardInterrupt`."""


def run(part: Part, title: str) -> Outcome:
    """Run a part; what it prints is passed on as it comes."""
    print(f"\n===== {title}: {part.name} =====", flush=True)
    return _outcome_of(part, _execute)


def _outcome_of(part: Part, execute: Execute) -> Outcome:
    name = _file_name(part)
    files = [RESULTS / f"{name}-{number}.xml" for number in range(len(part.commands))]
    began_s, processor_s = time.monotonic(), 0.0
    end = End.PASSED
    times: list[TestTime] = []
    try:
        for command, file in zip(part.commands, files, strict=True):
            file.unlink(missing_ok=True)
            ended = execute(command, file)
            processor_s += ended.processor_s
            if ended.status != 0:
                end = End.FAILED
            try:
                times += read_times(file)
            except UnreadableTimes as error:
                print(error, file=sys.stderr)
                end = End.FAILED
    except KeyboardInterrupt:
        end = End.INTERRUPTED
    return Outcome(part.name, end, time.monotonic() - began_s, processor_s, times)


def _file_name(part: Part) -> str:
    return part.name.replace(" ", "-")


def _execute(command: Command, file: Path) -> Ended:
    """Run a command in front.  An interrupt is passed on, and its end is waited for."""
    process = subprocess.Popen(command.line(file), cwd=ROOT, env=command.environment())

    def end_too(number: int, frame: FrameType | None) -> None:
        # Pytest takes SIGINT for the order to end what it has started, and SIGTERM for its death.
        _interrupt(process)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end_too)
    try:
        return _wait(process)
    except KeyboardInterrupt:
        # A terminal sends Ctrl-C to the command as well.
        _wait(process)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(process: "subprocess.Popen[bytes]") -> Ended:
    """Wait for the end of a process.  Its own time: others may have ended meanwhile."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, used.ru_utime + used.ru_stime)


def _interrupt(process: "subprocess.Popen[bytes]") -> None:
    # Not `send_signal`: it waits for a process that has ended, and `_wait` would find none.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)


class PartsBeside:
    """Parts that run beside others, one after the other.

    What each prints goes to a file, and is shown when all parts have ended.
    """

    def __init__(self, parts: Sequence[Part], on_leftover_time: Sequence[str]) -> None:
        """`on_leftover_time` are the first words of a command with the lowest priority."""
        self._parts = parts
        self._on_leftover_time = on_leftover_time
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._defect: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="parts beside")

    def start(self) -> None:
        """Begin the first part."""
        for part in self._parts:
            print(f"beside the other parts: {part.name}, output in {_output_of(part)}", flush=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Have the command that runs end, and begin no other."""
        with self._lock:
            self._interrupted = True
            if self._process is not None:
                _interrupt(self._process)

    def finish(self) -> list[Outcome]:
        """Wait until all have ended, and show what they printed.  An interrupt is passed on.

        Raises what kept a part from being run.
        """

        def end_too(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, end_too)
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.interrupt()
            self._thread.join()
        finally:
            signal.signal(signal.SIGTERM, before)
        for part, _ in zip(self._parts, self._outcomes, strict=False):
            print(f"\n===== beside the other parts: {part.name} =====", flush=True)
            print(_output_of(part).read_text("utf-8", "replace"), flush=True)
        if self._defect is not None:
            raise self._defect
        return self._outcomes

    def _run(self) -> None:
        try:
            self._run_all()
        except Exception as error:  # noqa: BLE001 - raised by `finish`, in the thread that waits
            self._defect = error

    def _run_all(self) -> None:
        for part in self._parts:
            with _output_of(part).open("wb") as output:
                first_words = self._on_leftover_time if part.leftover else ()
                execute = partial(self._execute, first_words=first_words, output=output)
                self._outcomes.append(_outcome_of(part, execute))
            if self._outcomes[-1].end is End.INTERRUPTED:
                return

    def _execute(
        self, command: Command, file: Path, *, first_words: Sequence[str], output: BinaryIO
    ) -> Ended:
        with self._lock:
            if self._interrupted:
                raise KeyboardInterrupt
            process = self._process = subprocess.Popen(
                [*first_words, *command.line(file)],
                cwd=ROOT,
                env=command.environment() | {BESIDE_VARIABLE: "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C does not reach it: `interrupt` passes it on, once.
                start_new_session=True,
            )
        ended = _wait(process)
        with self._lock:
            self._process = None
            if self._interrupted:
                raise KeyboardInterrupt
        return ended


def _output_of(part: Part) -> Path:
    return RESULTS / f"{_file_name(part)}.txt"


def show(outcomes: Sequence[Outcome], wall_s: float) -> None:
    """Print the slowest tests, the time by folder and by part, and at last what failed."""
    times = [each for outcome in outcomes for each in outcome.times]
    if times:
        print(f"\n===== time by folder, all workers together, from {SHOWN_S:.0f} s =====")
        print(*lines_by_folder(times, SHOWN_S), sep="\n")
        print(f"\n===== the {SLOWEST} slowest tests =====")
        print(*lines_of_slowest(times, SLOWEST), sep="\n")
    print("\n===== time by part: wall, processor =====")
    for outcome in outcomes:
        print(outcome)
    processor_s = sum(outcome.processor_s for outcome in outcomes)
    print(f"{clock(wall_s)}   {clock(processor_s)}   {'':11} in all", flush=True)
    failed = list(lines_of_failed(times))
    if failed:
        print("\n===== failed =====")
        print(*failed, sep="\n", flush=True)


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The parts of these names, or all; raises `ValueError` if one is unknown."""
    unknown = set(names) - {part.name for part in parts}
    if unknown:
        known = ", ".join(part.name for part in parts)
        raise ValueError(f"there is no part {', '.join(sorted(unknown))}: give one of {known}.")
    return [part for part in parts if not names or part.name in names]


def run_all(
    parts: Sequence[Part], *, on_leftover_time: Sequence[str] = ON_LEFTOVER_TIME
) -> list[Outcome]:
    """Run the parts one after the other, and some beside them, unless only such are chosen."""
    front = [part for part in parts if not part.beside] or parts
    beside = PartsBeside([part for part in parts if part not in front], on_leftover_time)
    beside.start()
    outcomes: list[Outcome] = []
    try:
        for number, part in enumerate(front, 1):
            outcomes.append(run(part, f"part {number} of {len(front)}"))
            if outcomes[-1].end is End.INTERRUPTED:
                beside.interrupt()
                break
    except BaseException:
        beside.interrupt()
        raise
    return outcomes + beside.finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--part", action="append", default=[], help="only the part of this name")
    options = parser.parse_args()
    seed = chosen_seed(random.randrange(2**32))
    try:
        parts = chosen(parts_of(options.run, seed), options.part)
    except ValueError as error:
        parser.error(str(error))
    seed_line = f"seed: {SEED_VARIABLE}={seed}" if options.run == "nightly" else ""
    print(seed_line, flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    outcomes = run_all(parts)
    show(outcomes, time.monotonic() - began_s)
    print(seed_line, flush=True)
    if any(outcome.end is End.INTERRUPTED for outcome in outcomes):
        return INTERRUPTED_STATUS
    return int(any(outcome.end is End.FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
