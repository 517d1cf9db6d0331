"""Fixtures that tests of several rooms use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest_plugins = ("tests.parts.fixtures", "tests.stock.fixtures")

Report = Callable[[str], None]
REPORTED = pytest.StashKey[list[str]]()


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
