"""Whole stories from seeds: see `quorum_simulation`.  MAGNETAR_QUORUM_SEEDS=n runs more of them."""

import os

import pytest

from storage.ledger.store import LedgerAssertion
from tests.unit.storage.ledger.bookkeeper.broken_rules import BROKEN_RULES, BrokenRule
from tests.unit.storage.ledger.bookkeeper.quorum_simulation import Broken, QuorumRun

SEEDS = int(os.environ.get("MAGNETAR_QUORUM_SEEDS", "250"))
GROUP = 25


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
@pytest.mark.timeout(600)
def test_whatever_happens_the_ledger_is_what_was_promised(first: int) -> None:
    for seed in range(first, min(first + GROUP, SEEDS)):
        try:
            QuorumRun(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("rule", BROKEN_RULES, ids=lambda rule: rule.name)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broken_rule_is_found(rule: BrokenRule) -> None:
    QuorumRun(rule.seed).run()
    with rule.applied(), pytest.raises((Broken, LedgerAssertion)):
        QuorumRun(rule.seed).run()


def test_a_seed_is_one_run() -> None:
    runs = [QuorumRun(11), QuorumRun(11)]
    for run in runs:
        run.run()
    assert runs[0].loop.digest == runs[1].loop.digest
    assert runs[0].told.data == runs[1].told.data
