"""`python -m tests RUN`: runs of the tests, one part after the other, and how long each took.

    check    style, types, import rules
    quick    that, and what proves the embedded broker and the client
    all      the whole, with real ZooKeeper, Oxia and bookies, Spark, and the container image
    nightly  what takes hours; its seed is drawn anew and printed

Every part runs to its end, whatever failed before it.  The status is 1 if any part failed, 130 if
the run was interrupted.
"""

import argparse
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Final

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


def run(part: Part, title: str) -> Outcome:
    """Run a part; what it prints is passed on as it comes."""
    print(f"\n===== {title}: {part.name} =====", flush=True)
    name = part.name.replace(" ", "-")
    files = [RESULTS / f"{name}-{number}.xml" for number in range(len(part.commands))]
    began_s, used_s = time.monotonic(), _children_processor_s()
    end = End.PASSED
    times: list[TestTime] = []
    try:
        for command, file in zip(part.commands, files, strict=True):
            file.unlink(missing_ok=True)
            if _status_of(command, file) != 0:
                end = End.FAILED
            try:
                times += read_times(file)
            except UnreadableTimes as error:
                print(error, file=sys.stderr)
                end = End.FAILED
    except KeyboardInterrupt:
        end = End.INTERRUPTED
    wall_s = time.monotonic() - began_s
    return Outcome(part.name, end, wall_s, _children_processor_s() - used_s, times)


def _status_of(command: Command, file: Path) -> int:
    """The exit status of the command.  An interrupt is passed on, and its end is waited for."""
    process = subprocess.Popen(command.line(file), cwd=ROOT, env=command.environment())

    def end_too(number: int, frame: FrameType | None) -> None:
        # Pytest takes SIGINT for the order to end what it has started, and SIGTERM for its death.
        process.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end_too)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal sends Ctrl-C to the command as well.
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _children_processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show(outcomes: Sequence[Outcome]) -> None:
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
    wall_s = sum(outcome.wall_s for outcome in outcomes)
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
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, 1):
        outcomes.append(run(part, f"part {number} of {len(parts)}"))
        if outcomes[-1].end is End.INTERRUPTED:
            break
    show(outcomes)
    print(seed_line, flush=True)
    if outcomes[-1].end is End.INTERRUPTED:
        return INTERRUPTED_STATUS
    return int(any(outcome.end is End.FAILED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
