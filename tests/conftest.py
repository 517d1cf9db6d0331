"""Fixtures that tests of several rooms use."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

pytest_plugins = ("tests.parts.fixtures", "tests.stock.fixtures")

Report = Callable[[str], None]
REPORTED = pytest.StashKey[list[str]]()


def pytest_configure() -> None:
    _hear_ctrl_c()
    # Properties hold or do not; how long an example takes depends on what else the machine does.
    settings.register_profile("magnetar", deadline=None)
    settings.load_profile("magnetar")


def _hear_ctrl_c() -> None:
    """A shell starts what runs in the background deaf to Ctrl-C, and its children with it: tests
    that interrupt themselves or what they start would wait in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a line to the end of the run's output: what is counted, not judged."""
    return request.config.stash.setdefault(REPORTED, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(REPORTED, [])
    if lines:
        terminalreporter.section("counted, not judged")
        for line in lines:
            terminalreporter.write_line(line)
