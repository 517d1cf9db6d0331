"""What a run of the contract suites covered: a line for each backend at the end of its output.

`python -m pytest tests/contract -m "cluster or not cluster" --collect-only -q` shows what a run
with all backends would.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BACKEND_FIXTURES = ("backend", "kind")
"""The parameters that choose a backend, in the suites' own fixtures."""
NO_BACKEND = "no backend"
OUTCOMES = ("passed", "failed", "error", "skipped")

Suite = tuple[str, str]
"""A suite and the backend that it runs on."""
SUITES = pytest.StashKey[Mapping[str, Suite]]()


def suite_of(item: pytest.Item) -> Suite | None:
    """None for tests of other rooms."""
    if not item.path.is_relative_to(HERE):
        return None
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    chosen = [params[name] for name in BACKEND_FIXTURES if name in params]
    backend = getattr(chosen[0], "name", chosen[0]) if chosen else NO_BACKEND
    return item.path.relative_to(HERE).parts[0], str(backend)


def pytest_collection_finish(session: pytest.Session) -> None:
    found = {item.nodeid: suite_of(item) for item in session.items}
    session.config.stash[SUITES] = {name: suite for name, suite in found.items() if suite}


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    suites = config.stash.get(SUITES, {})
    if not suites:
        return
    counts: dict[Suite, Counter[str]] = {suite: Counter() for suite in suites.values()}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            if report.nodeid in suites:
                counts[suites[report.nodeid]][outcome] += 1
    terminalreporter.section("contract suites")
    collected = Counter(suites.values())
    for (name, backend), outcomes in sorted(counts.items()):
        parts = [f"{collected[name, backend]} collected"]
        parts += [f"{outcomes[each]} {each}" for each in OUTCOMES if outcomes[each]]
        terminalreporter.write_line(f"{name} on {backend}: {', '.join(parts)}")
