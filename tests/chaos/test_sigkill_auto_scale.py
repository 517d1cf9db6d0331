"""SIGKILL at each step of changes that the policy makes: split, merge of several, rebucket.

The broker dies after a chosen write and starts again.  A change that was published is finished;
any other one is undone, and the policy makes it again.  The cooldowns of the policy are kept over
the kill, since they are counted from the times in the layout.  No message is lost or stored twice,
keys stay in order, and stream consumers keep their segments.
"""

import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from broker.scalable.steps import StepKind
from tests.conftest import Report
from tests.support.dying_broker import DyingBroker
from tests.support.effort import by_effort, draw_seed
from tests.support.layout_steps import DiesAfter
from tests.support.scaled_topic import REBUCKETS, SETTINGS, ScaledTopic, merges, splits

ROUNDS: Final = by_effort(quick=2, whole=3, nightly=70)
SEGMENTS: Final = 2
BUCKETS: Final = 4
"""Entry buckets of the first segment of a new topic."""
MOST_SEGMENTS: Final = 6
pytestmark = pytest.mark.timeout(120 + 30 * ROUNDS)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[DyingBroker]:
    """A broker on its embedded stores; at the end it must have reported no faults."""
    process = DyingBroker(tmp_path, SETTINGS)
    try:
        await process.start()
        yield process
        assert not process.faults()
    finally:
        process.kill()


def draw_steps(rng: random.Random) -> list[DiesAfter]:
    """The steps at which the broker dies: in every third round the change is undone."""
    undone = [each for each in DiesAfter if each.undone]
    finished = [each for each in DiesAfter if not each.undone]
    return [rng.choice(undone if number % 3 == 0 else finished) for number in range(ROUNDS)]


async def test_splits_and_merges_go_on_after_a_kill_at_each_step(
    broker: DyingBroker, report: Report
) -> None:
    rng = random.Random(draw_seed())
    outcomes: list[str] = []
    async with ScaledTopic.with_clients(
        [broker], url_of(broker), "orders", SEGMENTS, "ab"
    ) as topic:
        for number, at in enumerate(draw_steps(rng)):
            kind, policy = draw_change(rng, number, len(await topic.active()))
            outcomes.append(await topic.kill_in_change(kind, at, policy))
        await topic.kill_at_rest()
        await topic.check_cooldowns()
    report("a broker killed in automatic changes: " + "; ".join(outcomes))


def draw_change(
    rng: random.Random, number: int, active: int
) -> tuple[StepKind, Mapping[str, object]]:
    """The change that the policy is to make: more and fewer segments by turns."""
    if active == SEGMENTS or (number % 2 == 0 and active < MOST_SEGMENTS):
        return StepKind.SPLIT, splits(rng.choice((2, 3, 4)), active)
    return StepKind.MERGE, merges(SEGMENTS)


async def test_rebuckets_go_on_after_a_kill_at_each_step(
    broker: DyingBroker, report: Report
) -> None:
    """Five consumers of one segment have entry buckets for four, until the policy rebuckets."""
    rng = random.Random(draw_seed())
    outcomes: list[str] = []
    async with ScaledTopic.with_clients([broker], url_of(broker), "shared", 1, "abcde") as topic:
        for number, at in enumerate(draw_steps(rng)):
            (segment,) = await topic.active()
            if number > 0:
                # The policy waits for its cooldown after this one too.
                await topic.rest("POST", f"/rebucket/{segment}", bucketCount=BUCKETS)
            outcomes.append(await topic.kill_in_change(StepKind.REBUCKET, at, REBUCKETS))
        await topic.check_cooldowns()
    report("a broker killed in automatic rebuckets: " + "; ".join(outcomes))


def url_of(broker: DyingBroker) -> str:
    """The service URL."""
    return f"pulsar://127.0.0.1:{broker.port}"
