"""Every interleaving of two clients with one transaction key, with a crash, a move, a deletion."""

from dataclasses import replace

import pytest

from tests.unit.txn.key_clients import KeyWorld, Plan
from tests.unit.txn.key_mutants import COLLECTED, HELD, MUTANTS, Mutant
from tests.unit.txn.schedules import Extent, Found, explore


def explored(plan: Plan) -> Extent:
    return explore(lambda loop: KeyWorld(loop, plan))


@pytest.mark.parametrize(
    ("plan", "states"),
    [
        pytest.param(Plan(), 700, id="one-leader"),
        pytest.param(Plan((0, 1)), 700, id="two-leaders-at-once"),
        pytest.param(Plan(writes=False, crashes=1), 2000, id="a-crash"),
        pytest.param(Plan(steps=(1, 1), deletions=1), 1500, id="a-deletion"),
        pytest.param(HELD, 1500, id="connections-that-hold-it"),
        pytest.param(COLLECTED, 3000, id="a-collection"),
    ],
)
def test_a_newer_epoch_ends_the_older_ones_in_every_schedule(plan: Plan, states: int) -> None:
    """K1 to K8; a zombie is a client that the explorer lets go on last."""
    assert explored(plan).states > states, "less happened than is meant"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(crashes=1, arrive_late=True), id="a-crash-with-late-writes"),
        pytest.param(Plan(crashes=1), id="a-crash-with-writes"),
        pytest.param(Plan((0, 1), crashes=1), id="two-leaders-and-a-crash"),
        pytest.param(Plan(steps=(1, 2), deletions=1), id="a-deletion-of-what-is-used"),
    ],
)
def test_longer_schedules_keep_the_rules_of_keys(plan: Plan) -> None:
    explored(plan)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_broken_rule_of_keys_is_found(mutant: Mutant) -> None:
    with pytest.raises(Found):
        explored(replace(mutant.plan, keys=mutant.keys))
