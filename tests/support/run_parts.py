"""The parts of each run of the tests: which commands, in which order, with how many workers.

Parts on servers wait a lot: they leave a third of the processors' time.  Tests that only compute
use it, in a part that runs beside the others.  Before that the image does, beside the builds.

Workers are processes of pytest-xdist.  Each has its own brokers and servers, so what tests share
is shared within a worker.  A worker with no tests left takes tests that another one has not begun.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.java.clusters import OXIA_GIVEN
from tests.support.effort import SEED_VARIABLE, VARIABLE, Effort

SECURE_VARIABLE: Final = "MAGNETAR_TEST_SECURE"
"""Set where the brokers of faults and take-overs have everything on."""
RUNS: Final = ("check", "quick", "all", "nightly")
BIN: Final = Path(sys.executable).parent
WORKERS_VARIABLE: Final = "MAGNETAR_TEST_WORKERS"
"""How many workers there are where there are several."""
SPARK: Final = ("tests/pipeline", "tests/unit/magnetar/spark")
"""What needs Spark's packages."""
COMPUTING: Final = (
    "tests/docs/test_pages.py",
    "tests/docs/test_protocol_page.py",
    "tests/docs/test_pure_modules.py",
    "tests/docs/test_tidy.py",
    "tests/fuzz/test_mutated_tokens.py",
    "tests/model",
    "tests/replicated_subscriptions",
    "tests/segment_replication",
    "tests/simulation",
    "tests/unit/magnetar/spark/test_sink_schedules.py",
    "tests/unit/magnetar/spark/test_state_schedules.py",
    "tests/unit/security/test_access.py",
    "tests/unit/security/test_tokens.py",
    "tests/unit/storage/ledger/bookkeeper/test_simulation.py",
    "tests/unit/storage/ledger/local",
    "tests/unit/storage/managed_ledger",
    "tests/unit/txn",
)
"""Tests that need neither servers nor clients.  No clock makes them fail but that of `until`, which
waits ten times as long there."""
COMPUTING_TIMEOUT_S: Final = 1800
"""Of such a test, where no mark says another: it may get no processor for minutes."""
WITH_CLUSTER_TESTS: Final = (
    "tests/cluster",
    "tests/contract",
    "tests/servers",
    "tests/pipeline/kill/test_several_brokers.py",
)
"""Where tests marked `cluster` are: a worker takes 15 s to collect all tests, and 2 s for these."""
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
ANY_STORE: Final = ("test_messages", "test_producers", "test_queue", "test_schemas")
"""Java tests in which a broker does the same whatever its stores: on a cluster they run once, on
ZooKeeper."""
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
    beside: bool = False
    """Whether it runs beside the others, which go on."""
    leftover: bool = False
    """Whether it has the lowest priority then."""


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


def broker_and_client_part(effort: Effort, marks: str, *, elsewhere: Sequence[str] = ()) -> Part:
    """All tests that need neither Spark, a cluster nor the image, but for those elsewhere."""
    without = [f"--ignore={place}" for place in (*SPARK, "tests/image", *elsewhere)]
    command = pytest_command(effort, *without, marks=f"not cluster and {marks}", workers=4)
    return Part("broker and client", [command])


def computing_part(effort: Effort, marks: str) -> Part:
    """The tests that only compute.  Before them the files of all tests are compiled."""
    compiled = module_command("tests.support.compiled_tests")
    limit = f"--timeout={COMPUTING_TIMEOUT_S}"
    tests = pytest_command(
        effort, *COMPUTING, limit, marks=f"not cluster and {marks}", workers=ON_SERVERS
    )
    return Part("models and simulations", [compiled, tests], beside=True, leftover=True)


def secured_faults_command(faults: str) -> Command:
    """Each fault and take-over once, on brokers that have everything on."""
    take_overs = "tests/cluster/test_take_over.py"
    command = pytest_command(Effort.WHOLE, faults, take_overs, marks="cluster", workers=1)
    return replace(command, settings={**command.settings, SECURE_VARIABLE: "1"})


def java_client_part(effort: Effort, marks: str) -> Part:
    """The cases of the official Java client on each kind of cluster."""
    workers = {"oxia": ON_SERVERS, "zookeeper": ON_SERVERS}
    without = {"oxia": [f"--ignore=tests/java/{name}.py" for name in ANY_STORE]}
    if OXIA_GIVEN in os.environ:
        workers["oxia-several"] = 1
    return Part(
        "Java client on clusters",
        [
            pytest_command(
                effort,
                "tests/java",
                *without.get(kind, ()),
                f"--cluster={kind}",
                marks=marks,
                workers=count,
            )
            for kind, count in workers.items()
        ],
    )


def whole_parts() -> list[Part]:
    """Everything that does not need hours."""
    effort, marks = Effort.WHOLE, "not nightly"
    # Tests delete all records of the given Oxia server, so only one worker may use it.
    on_servers = 1 if OXIA_GIVEN in os.environ else ON_SERVERS
    without_computing = [f"--ignore={place}" for place in COMPUTING]
    spark = pytest_command(
        effort, *SPARK, *without_computing, marks=f"not cluster and {marks}", workers=2
    )
    cluster = pytest_command(
        effort, *WITH_CLUSTER_TESTS, marks=f"cluster and {marks}", workers=on_servers
    )
    image = pytest_command(effort, "tests/image", marks=marks, workers=1)
    return [
        builds_part(),
        check_part(),
        # These three leave time, and the last part leaves none.
        Part("Spark", [spark]),
        Part("cluster", [cluster]),
        java_client_part(Effort.QUICK, "not long and not nightly"),
        broker_and_client_part(effort, marks, elsewhere=COMPUTING),
        # Beside those, from the first on.
        Part("image", [image], beside=True),
        computing_part(effort, marks),
    ]


def nightly_parts(seed: int) -> list[Part]:
    """What needs hours."""
    effort = Effort.NIGHTLY
    simulation = ["tests.simulation", "--from", str(seed), "--minutes"]
    matrix = ("tests/pipeline/kill", "tests/pipeline/test_harness.py")
    compaction = ("tests/pipeline/test_jobs.py", "-k=a_dict_keeps")
    faults = "tests/cluster/test_faults.py"
    killed = ("tests/cluster/test_scaled_topics.py", "tests/cluster/test_v4_transactions.py")
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
            [
                pytest_command(
                    effort, "--ignore=tests/pipeline", marks="nightly and not cluster", workers=2
                )
            ],
        ),
        Part(
            "kill matrix of Spark",
            [pytest_command(effort, *matrix, marks="not cluster", workers=2, seed=seed)],
        ),
        Part(
            "kills and hostile frames",
            [pytest_command(effort, *DRAWN, marks="not nightly", workers=2, seed=seed)],
        ),
        Part(
            "faults of a cluster",
            [
                pytest_command(effort, faults, marks="cluster", workers=1),
                pytest_command(effort, *killed, marks="cluster", workers=1, seed=seed),
            ],
        ),
        Part("faults of a secured cluster", [secured_faults_command(faults)]),
        Part(
            "histories of a cluster",
            [pytest_command(effort, histories, marks="cluster", workers=1, seed=seed)],
        ),
        java_client_part(effort, "long"),
        Part("a large compaction", [pytest_command(effort, *compaction, marks="", workers=1)]),
    ]
