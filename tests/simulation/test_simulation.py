"""Runs of the simulation that belong to every test run; longer ones are `make simulate`."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.scalable.segments import Segments
from tests.conftest import Report
from tests.simulation.injection import ASSERTING, Parts
from tests.simulation.mutants import AT_ONCE, MUTANTS, Mutant
from tests.simulation.scenario import CHECKER, STORIES, WRITTEN_SEED, run
from tests.simulation.world import simulate
from tests.support.effort import by_effort
from tests.unit.txn.group_mutants import CommitsBlindly
from tests.unit.txn.key_mutants import AnswersEarly
from txn.coordinator import Coordinator

PROCESSOR_S = by_effort(quick=6.0, whole=45.0, nightly=60.0)
TIMEOUT_S = 1800
"""In `make test-all` these tests run on leftover time, of which there may be none for minutes."""
FIRST_SEED = 1
BY_LUCK = [mutant for mutant in MUTANTS if mutant.profile]
LEAST_RUNS = by_effort(quick=10, whole=len(BY_LUCK) + 5, nightly=len(BY_LUCK) + 5)
SEARCHED_SEEDS = 40
OTHER_SEEDS = by_effort(quick=3, whole=3, nightly=10)
STORY_FILES = sorted(STORIES.glob("*.txt"))
MIGRATION_SEED = 2
RACES = {AT_ONCE}
"""Stories in which an answer and the end of its connection are under way at once."""
CERTAIN = [path for path in STORY_FILES if path.stem not in RACES]


def replay(seed: int, profile: str | None) -> str:
    kind = f" PROFILE={profile}" if profile else ""
    return f"replay: make simulate SEED={seed}{kind} [TRACE=1]"


def runs() -> Iterator[tuple[int, str | None]]:
    """Those in which the broken rules show, as long as none is broken; then seeds by luck."""
    for mutant in BY_LUCK:
        yield mutant.seed, mutant.profile
    for seed in itertools.count(FIRST_SEED):
        yield seed, None


@pytest.mark.timeout(TIMEOUT_S)
def test_nothing_is_lost_shown_or_delivered_that_must_not_be(report: Report) -> None:
    began = time.process_time()
    for number, (seed, profile) in enumerate(runs()):
        if number >= LEAST_RUNS and time.process_time() - began > PROCESSOR_S:
            report(f"the simulation of the broker: {number} seeds")
            return
        outcome = simulate(seed, profile=profile)
        assert not outcome.violations, "\n".join([*outcome.violations[:20], replay(seed, profile)])


def test_one_seed_is_one_run() -> None:
    """In this process, and in others whose strings hash otherwise."""
    program = "from tests.simulation.world import simulate; print(simulate(7).digest)"
    digests = {str(simulate(7).digest)}
    for hash_seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        )
        digests.add(found.stdout.strip())
    assert len(digests) == 1


def wrong_in(path: Path, parts: Parts, seed: int = WRITTEN_SEED) -> list[str]:
    """Where a story does not go as it is written."""
    wrong = []
    for block, found in run(path, parts, seed):
        if block.directive == CHECKER:
            wrong += found.splitlines()
        elif block.expected != found:
            wrong.append(f"{block.directive}: {found!r} came instead of {block.expected!r}")
    return wrong


@pytest.mark.parametrize("path", STORY_FILES, ids=[path.stem for path in STORY_FILES])
def test_story(path: Path) -> None:
    assert not wrong_in(path, ASSERTING)


@pytest.mark.long
@pytest.mark.parametrize("path", CERTAIN, ids=[path.stem for path in CERTAIN])
def test_story_whoever_goes_first(path: Path) -> None:
    """What a story leaves open, delays and who goes first, does not change what comes of it."""
    for seed in range(WRITTEN_SEED + 1, WRITTEN_SEED + 1 + OTHER_SEEDS):
        wrong = wrong_in(path, ASSERTING, seed)
        assert not wrong, f"with seed {seed}: {wrong}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_broken_rule_breaks_its_story(mutant: Mutant) -> None:
    assert wrong_in(STORIES / f"{mutant.story}.txt", mutant.parts)


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("profile", "part", "broken", "seed"),
    [
        pytest.param("keys", "keys_class", AnswersEarly, 39, id="K2-answer"),
        pytest.param("groups", "commit_group", CommitsBlindly.commit_group, 24, id="G4-version"),
    ],
)
def test_zombies_of_a_key_are_seen_when_a_rule_is_broken(
    profile: str, part: str, broken: Callable[..., object], seed: int
) -> None:
    """Every schedule is in `tests/unit/txn`; here with messages, and with all that goes wrong."""
    assert not simulate(seed, profile=profile).violations
    parts = {**ASSERTING, (Coordinator, part): broken}
    assert any(
        simulate(each, profile=profile, parts=parts).violations
        for each in range(seed, seed + SEARCHED_SEEDS)
    )


async def _without_subscriptions(*arguments: object) -> None:
    """Children of a layout change get no subscriptions of their parents."""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_migration_that_leaves_subscriptions_behind_is_seen() -> None:
    assert not simulate(MIGRATION_SEED, profile="migrations").violations
    parts = {
        **ASSERTING,
        (Segments, "prepare"): _without_subscriptions,
        (Segments, "carry_over"): _without_subscriptions,
    }
    assert any(
        simulate(each, profile="migrations", parts=parts).violations
        for each in range(MIGRATION_SEED, MIGRATION_SEED + SEARCHED_SEEDS)
    )


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("mutant", BY_LUCK, ids=[mutant.name for mutant in BY_LUCK])
def test_a_broken_rule_is_found_by_luck(mutant: Mutant) -> None:
    """By its seed, at once; after a change of the broker maybe by one of those that follow.

    Then pin that one: `make simulate BREAK=...` names it.
    """
    assert any(
        simulate(seed, profile=mutant.profile, parts=mutant.parts).violations
        for seed in range(mutant.seed, mutant.seed + SEARCHED_SEEDS)
    )
