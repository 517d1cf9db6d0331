"""What a run of the contract suites covered: a line for each backend at the end of its output.

`python -m pytest tests/contract -m "cluster or not cluster" --collect-only -q` shows what a run
with all backends would.
"""

from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BACKEND_FIXTURES = ("backend", "kind")
"""The parameters that choose a backend, in the suites' own fixtures."""
NO_BACKEND = "no backend"
OUTCOMES = ("passed", "failed", "error", "skipped")

COLLECTED = pytest.StashKey[Counter[str]]()
"""How many tests each suite has, where they are only collected."""
SUITE = "contract suite"
"""Name of the test property that says `SUITE on BACKEND`.  Properties reach the controller from
every worker."""


def suite_of(item: pytest.Item) -> str | None:
    """`SUITE on BACKEND`; None for tests of other folders."""
    if not item.path.is_relative_to(HERE):
        return None
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    chosen = [params[name] for name in BACKEND_FIXTURES if name in params]
    backend = getattr(chosen[0], "name", chosen[0]) if chosen else NO_BACKEND
    return f"{item.path.relative_to(HERE).parts[0]} on {backend}"


def pytest_collection_finish(session: pytest.Session) -> None:
    collected: Counter[str] = Counter()
    for item in session.items:
        suite = suite_of(item)
        if suite is not None:
            item.user_properties.append((SUITE, suite))
            collected[suite] += 1
    if session.config.option.collectonly:
        session.config.stash[COLLECTED] = collected


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    collected = config.stash.get(COLLECTED, Counter[str]())
    counts: dict[str, Counter[str]] = {suite: Counter() for suite in collected}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            for name, suite in report.user_properties:
                if name == SUITE:
                    counts.setdefault(str(suite), Counter())[outcome] += 1
    if not counts:
        return
    terminalreporter.section("contract suites")
    for suite, outcomes in sorted(counts.items()):
        parts = [f"{collected[suite]} collected"] if suite in collected else []
        parts += [f"{outcomes[each]} {each}" for each in OUTCOMES if outcomes[each]]
        terminalreporter.write_line(f"{suite}: {', '.join(parts)}")
