"""Whole stories from seeds: see `quorum_simulation`."""

import pytest

from storage.ledger.store import LedgerAssertion
from tests.support.effort import by_effort, chosen_seed
from tests.unit.storage.ledger.bookkeeper.broken_rules import BROKEN_RULES, BrokenRule
from tests.unit.storage.ledger.bookkeeper.quorum_simulation import Broken, QuorumRun

SEEDS = by_effort(quick=100, whole=250, nightly=20_000)
FIRST_SEED = chosen_seed(0)
GROUP = 25


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + SEEDS, GROUP))
@pytest.mark.timeout(600)
def test_simulated_faults_break_no_promise_of_a_ledger(first: int) -> None:
    for seed in range(first, min(first + GROUP, FIRST_SEED + SEEDS)):
        try:
            QuorumRun(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.name)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_broken_rule_is_detected(rule: BrokenRule) -> None:
    QuorumRun(rule.seed).run()
    with rule.applied(), pytest.raises((Broken, LedgerAssertion)):
        QuorumRun(rule.seed).run()


def test_a_seed_is_one_run() -> None:
    runs = [QuorumRun(11), QuorumRun(11)]
    for run in runs:
        run.run()
    assert runs[0].loop.digest == runs[1].loop.digest
    assert runs[0].told.data == runs[1].told.data
