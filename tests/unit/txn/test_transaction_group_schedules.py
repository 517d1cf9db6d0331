"""Every interleaving of two drivers that commit groups, with a crash, late attempts, collection."""

import pytest

from tests.unit.txn import group_mutants
from tests.unit.txn.group_clients import GroupPlan, GroupWorld
from tests.unit.txn.group_mutants import GROUP_MUTANTS, GroupMutant
from tests.unit.txn.schedules import Extent, Found, explore


def explored(plan: GroupPlan) -> Extent:
    return explore(lambda loop: GroupWorld(loop, plan))


@pytest.mark.parametrize(
    ("plan", "states"),
    [
        pytest.param(group_mutants.ONE_EACH, 400, id="an-attempt-each"),
        pytest.param(group_mutants.ABORTS, 500, id="abort-hooks"),
        pytest.param(group_mutants.HINTS, 350, id="hints"),
        pytest.param(group_mutants.EXTENDS, 400, id="extended"),
    ],
)
def test_every_batch_is_committed_once_in_every_schedule(plan: GroupPlan, states: int) -> None:
    """G2 to G8; the driver that is overtaken goes on at any time."""
    assert explored(plan).states > states, "less happened than is meant"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("plan", "states"),
    [
        pytest.param(group_mutants.BATCHES, 1000, id="two-empty-batches"),
        pytest.param(group_mutants.LATE, 2000, id="a-late-attempt"),
        pytest.param(group_mutants.CRASH, 2000, id="a-crash-without-attempts"),
        pytest.param(group_mutants.CRASH_WITH_ATTEMPT, 3000, id="a-crash"),
        pytest.param(group_mutants.COLLECTED, 3000, id="a-collection"),
        pytest.param(group_mutants.TWO_LEADERS, 20_000, id="two-leaders"),
    ],
)
def test_longer_schedules_of_groups(plan: GroupPlan, states: int) -> None:
    assert explored(plan).states > states, "less happened than is meant"


@pytest.mark.parametrize("mutant", GROUP_MUTANTS, ids=[mutant.name for mutant in GROUP_MUTANTS])
def test_a_broken_rule_of_groups_is_found(mutant: GroupMutant) -> None:
    with pytest.raises(Found) as found:
        explored(mutant.plan)
    print(mutant.name, found.value)
