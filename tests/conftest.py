"""Fixtures that tests of several folders use, and the summary at the end of a run."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import structlog
from hypothesis import settings

# gRPC handles each fork of a process unless told otherwise, and children of tests that use it abort
# now and then.  pyspark forks: it then says that its JVM exited.  gRPC reads this when it begins.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

pytest_plugins = ("tests.servers.fixtures", "tests.java.fixtures")

SPARK_IS_HERE = find_spec("pyspark") is not None
collect_ignore = (
    [] if SPARK_IS_HERE else ["pipeline", "unit/magnetar/spark", "interop/test_source.py"]
)

Report = Callable[[str], None]
COUNTED = "counted, not judged"
"""Name of the test property that carries such a line.  Properties reach the controller from every
worker."""


def pytest_configure() -> None:
    _hear_ctrl_c()
    _log_plainly()
    # Properties hold or do not; how long an example takes depends on what else the machine does.
    settings.register_profile("magnetar", deadline=None)
    settings.load_profile("magnetar")


def pytest_collection_finish() -> None:
    """Keep modules and collected tests out of garbage collections: each would take half a second,
    and a run of the simulation ends with one.
    """
    gc.collect()
    gc.freeze()


def _log_plainly() -> None:
    """Log tracebacks as Python prints them: coloured ones with source took seconds each."""
    *processors, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(processors=[*processors, plain])


def _hear_ctrl_c() -> None:
    """A shell starts what runs in the background deaf to Ctrl-C, and its children with it: tests
    that interrupt themselves or what they start would wait in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a line to the end of the run's output: what is counted, not judged."""

    def add(line: str) -> None:
        request.node.user_properties.append((COUNTED, line))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not SPARK_IS_HERE:
        terminalreporter.section("left out")
        names = ", ".join(collect_ignore)
        terminalreporter.write_line(f"{names}: they need Spark's packages (`make spark`).")
    lines = dict.fromkeys(
        str(line)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown"
        for name, line in report.user_properties
        if name == COUNTED
    )
    if lines:
        terminalreporter.section(COUNTED)
        for line in lines:
            terminalreporter.write_line(line)
