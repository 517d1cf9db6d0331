"""The parts of each run of the tests: which commands, in which order, with how many workers.

Workers are processes of pytest-xdist.  Each has its own brokers and servers, so what tests share
is shared within a worker.  A worker with no tests left takes tests that another one has not begun.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.java.clusters import OXIA_GIVEN
from tests.support.effort import SEED_VARIABLE, VARIABLE, Effort

RUNS: Final = ("check", "quick", "all", "nightly")
BIN: Final = Path(sys.executable).parent
WORKERS_VARIABLE: Final = "MAGNETAR_TEST_WORKERS"
"""How many workers there are where there are several."""
SPARK: Final = ("tests/pipeline", "tests/unit/magnetar/spark")
"""What needs Spark's packages."""
WITHOUT_SPARK: Final = (
    "--ignore-missing-imports",
    "--allow-subclassing-any",
    "--no-warn-return-any",
    "--no-warn-unused-ignores",
)
"""What mypy is told where Spark's packages are not installed: their types are anything then."""
ON_SERVERS: Final = 2
"""Workers where each has servers of its own, some ten processes: with three, two processors were so
busy that sessions ended and clients gave up."""
SIMULATED_MINUTES: Final = 120
SEARCHED_MINUTES: Final = 5
DRAWN: Final = (
    "tests/chaos",
    "tests/fuzz",
    "tests/unit/storage/ledger/bookkeeper/test_simulation.py",
)
"""Tests that try more at night, with a seed that is drawn anew."""


@dataclass(frozen=True)
class Command:
    """A program, its arguments, and variables that are added to its environment."""

    words: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    times: str | None = None
    """The option of pytest that names the JUnit file."""

    def line(self, times: Path) -> list[str]:
        """Its command line; the times of its tests go to that file."""
        return [*self.words, *([f"{self.times}={times}"] if self.times else [])]

    def environment(self) -> dict[str, str]:
        """The environment of this process, with the settings added; bytecode is kept.

        Otherwise every worker and every broker that a test starts compiles all modules anew.
        """
        return os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | dict(self.settings)


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other."""

    name: str
    commands: Sequence[Command]


def tool_command(name: str, *words: str) -> Command:
    """A program that is installed beside this Python."""
    return Command([str(BIN / name), *words])


def module_command(name: str, *words: str) -> Command:
    """A module of this Python."""
    return Command([sys.executable, "-m", name, *words])


def pytest_command(
    effort: Effort, *words: str, marks: str, workers: int, seed: int | None = None
) -> Command:
    """A pytest command for the tests with these marks."""
    count = int(os.environ.get(WORKERS_VARIABLE, workers)) if workers > 1 else 1
    side_by_side = ["-n", str(count), "--dist", "worksteal"] if count > 1 else []
    line = [sys.executable, "-m", "pytest", *side_by_side, "-m", marks, *words]
    settings = {VARIABLE: effort.value} | ({} if seed is None else {SEED_VARIABLE: str(seed)})
    return Command(line, settings, times="--junitxml")


def parts_of(run: str, seed: int) -> list[Part]:
    """The parts of one of the `RUNS`; the seed is for what is drawn anew at night."""
    if run == "nightly":
        return nightly_parts(seed)
    if run == "all":
        return whole_parts()
    if run == "quick":
        return [check_part(), broker_and_client_part(Effort.QUICK, "not long and not nightly")]
    return [check_part()]


def check_part() -> Part:
    """Style, types, import rules."""
    commands = [
        tool_command("ruff", "format", "--check", "--quiet", "."),
        tool_command("ruff", "check", "--quiet", "."),
        tool_command("lint-imports"),
    ]
    if find_spec("pyspark") is None:
        return Part("check, Spark's types aside", [*commands, tool_command("mypy", *WITHOUT_SPARK)])
    return Part("check", [*commands, tool_command("mypy")])


def builds_part() -> Part:
    """Builds made before the tests, so that no test's time includes them."""
    return Part("builds", [module_command("tests.support.builds")])


def broker_and_client_part(effort: Effort, marks: str) -> Part:
    """All tests that need neither Spark, a cluster nor the image."""
    without = [f"--ignore={place}" for place in (*SPARK, "tests/image")]
    command = pytest_command(effort, *without, marks=f"not cluster and {marks}", workers=4)
    return Part("broker and client", [command])


def java_client_part(effort: Effort, marks: str) -> Part:
    """The cases of the official Java client on each kind of cluster."""
    workers = {"oxia": ON_SERVERS, "zookeeper": ON_SERVERS}
    if OXIA_GIVEN in os.environ:
        workers["oxia-several"] = 1
    return Part(
        "Java client on clusters",
        [
            pytest_command(effort, "tests/java", f"--cluster={kind}", marks=marks, workers=count)
            for kind, count in workers.items()
        ],
    )


def whole_parts() -> list[Part]:
    """Everything that does not need hours."""
    effort, marks = Effort.WHOLE, "not nightly"
    # Tests delete all records of the given Oxia server, so only one worker may use it.
    on_servers = 1 if OXIA_GIVEN in os.environ else ON_SERVERS
    spark = pytest_command(effort, *SPARK, marks=f"not cluster and {marks}", workers=2)
    cluster = pytest_command(effort, marks=f"cluster and {marks}", workers=on_servers)
    image = pytest_command(effort, "tests/image", marks=marks, workers=1)
    return [
        builds_part(),
        check_part(),
        broker_and_client_part(effort, marks),
        Part("Spark", [spark]),
        Part("cluster", [cluster]),
        java_client_part(Effort.QUICK, "not long and not nightly"),
        Part("image", [image]),
    ]


def nightly_parts(seed: int) -> list[Part]:
    """What needs hours."""
    effort = Effort.NIGHTLY
    simulation = ["tests.simulation", "--from", str(seed), "--minutes"]
    matrix = ("tests/pipeline/kill", "tests/pipeline/test_harness.py")
    compaction = ("tests/pipeline/test_jobs.py", "-k=a_dict_keeps")
    faults = "tests/cluster/test_faults.py"
    histories = "tests/cluster/histories"
    return [
        builds_part(),
        Part(
            "simulation",
            [
                module_command(*simulation, str(SIMULATED_MINUTES)),
                module_command(*simulation, str(SEARCHED_MINUTES), "--break", "all"),
            ],
        ),
        Part(
            "schedules",
            [pytest_command(effort, "--ignore=tests/pipeline", marks="nightly", workers=2)],
        ),
        Part(
            "kill matrix of Spark",
            [pytest_command(effort, *matrix, marks="not cluster", workers=2, seed=seed)],
        ),
        Part(
            "kills and hostile frames",
            [pytest_command(effort, *DRAWN, marks="not nightly", workers=2, seed=seed)],
        ),
        Part("faults of a cluster", [pytest_command(effort, faults, marks="cluster", workers=1)]),
        Part(
            "histories of a cluster",
            [pytest_command(effort, histories, marks="cluster", workers=1, seed=seed)],
        ),
        java_client_part(effort, "long"),
        Part("a large compaction", [pytest_command(effort, *compaction, marks="", workers=1)]),
    ]
