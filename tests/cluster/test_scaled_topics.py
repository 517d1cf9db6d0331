"""Three brokers: one dies while a topic's layout changes, or its leader dies or leaves at rest.

If it dies at a step of a change that the policy makes, the next leader finishes the change, or
undoes it and decides again, and keeps the cooldowns.  If it dies or leaves at rest, each consumer
keeps exactly its segments, shared ones too.  No message is lost or stored twice, and each key stays
in order.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import pytest

from broker.scalable.steps import StepKind
from tests.cluster.cluster_state import state_on_failure
from tests.cluster.conftest import three_brokers
from tests.cluster.faults import Site
from tests.conftest import Report
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.dying_broker import DyingBroker
from tests.support.effort import by_effort, draw_seed
from tests.support.layout_steps import DiesAfter
from tests.support.scaled_topic import NAMESPACE, REBUCKETS, ScaledTopic, merges, splits
from tests.support.waiting import until_awaited

ROUNDS: Final = by_effort(quick=2, whole=2, nightly=20)
SEGMENTS: Final = 2
PARTITIONS: Final = 2
TIMEOUT_S: Final = 240 + 60 * ROUNDS
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture
def brokers(ground: Ground, metadata_store_url: str, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three brokers that can die at a chosen write, and whose consumers have time to come back."""
    with three_brokers(
        tmp_path,
        ground,
        metadata_store_url,
        process=DyingBroker,
        scalable_consumer_grace_period_s=60,
        scalable_topic_auto_scale_enabled=True,
        scalable_topic_auto_scale_interval_s=1,
        scalable_topic_load_report_interval_s=1,
    ) as cluster:
        yield cluster


def processes_of(brokers: BrokerCluster) -> list[DyingBroker]:
    """The processes of a cluster."""
    return cast("list[DyingBroker]", brokers.brokers)


def test_next_leader_finishes_or_undoes_a_change_of_the_policy(
    brokers: BrokerCluster, report: Report
) -> None:
    with state_on_failure(brokers, [f"topic://{NAMESPACE}/orders"]):
        outcomes = asyncio.run(_kill_in_changes(brokers, random.Random(draw_seed())))
    report("the leader of a topic killed in automatic changes: " + "; ".join(outcomes))
    assert not brokers.faults(), brokers.faults()


async def _kill_in_changes(brokers: BrokerCluster, rng: random.Random) -> list[str]:
    outcomes: list[str] = []
    processes = processes_of(brokers)
    async with ScaledTopic.with_clients(processes, brokers.url, "orders", SEGMENTS, "ab") as topic:
        for number in range(ROUNDS):
            at = rng.choice([each for each in DiesAfter if each.undone == (number % 2 == 0)])
            active = len(await topic.active())
            kind, policy = StepKind.SPLIT, splits(rng.choice((2, 3)), active)
            if active > SEGMENTS:
                kind, policy = StepKind.MERGE, merges(SEGMENTS)
            stays_away = rng.random() < 0.5
            outcomes.append(await topic.kill_in_change(kind, at, policy, stays_away=stays_away))
        await topic.check_cooldowns()
    return outcomes


def test_brokers_die_in_a_split_rebuckets_and_migrations(
    brokers: BrokerCluster, report: Report
) -> None:
    """The leader of the topic dies, or the owner of a segment; one cluster for all."""
    names = [f"topic://{NAMESPACE}/{each}" for each in ("carried", "shared")]
    with state_on_failure(brokers, names):
        outcomes = asyncio.run(_kill_in_each(brokers, random.Random(draw_seed())))
    report("a broker of three killed in layout changes: " + "; ".join(outcomes))
    assert not brokers.faults(), brokers.faults()


async def _kill_in_each(brokers: BrokerCluster, rng: random.Random) -> list[str]:
    processes, url = processes_of(brokers), brokers.url
    by_leader = [each for each in DiesAfter if not each.by_an_owner]
    outcomes: list[str] = []
    async with ScaledTopic.with_clients(processes, url, "carried", SEGMENTS, "ab") as topic:
        policy = splits(2, SEGMENTS)
        outcomes.append(await topic.kill_in_change(StepKind.SPLIT, DiesAfter.CARRYING, policy))
    # Five consumers have four entry buckets.
    async with ScaledTopic.with_clients(processes, url, "shared", SEGMENTS, "abcde") as topic:
        for number, at in enumerate((rng.choice(by_leader), DiesAfter.SEALING)):
            for segment in await topic.active() if number else ():
                await topic.rest("POST", f"/rebucket/{segment}", bucketCount=2)
            outcomes.append(await topic.kill_in_change(StepKind.REBUCKET, at, REBUCKETS))
    for number, at in enumerate((rng.choice(by_leader), DiesAfter.SEALING)):
        name = f"moving-{number}"
        async with ScaledTopic.once_ordinary(processes, url, name, PARTITIONS) as topic:
            outcomes.append(await topic.kill_in_migration(at, PARTITIONS))
    return outcomes


def test_sharing_consumers_keep_their_segments_when_the_leader_goes(
    ground: Ground, brokers: BrokerCluster
) -> None:
    """Five consumers of two segments with two entry buckets each: one has none."""
    name = f"topic://{NAMESPACE}/shared"
    site = Site(ground, brokers, topic=name, led=name)
    with state_on_failure(brokers, [name]):
        asyncio.run(_move_the_lead(site))
    assert not brokers.faults(), brokers.faults()


async def _move_the_lead(site: Site) -> None:
    processes = processes_of(site.brokers)
    async with ScaledTopic.with_clients(
        processes, site.brokers.url, "shared", SEGMENTS, "abcde"
    ) as topic:
        had = await topic.assigned()
        assert sum(map(len, had.values())) == 2 * SEGMENTS
        for number in range(ROUNDS):
            await topic.all_keys_get_on()
            left = await site.leader()
            assert left is not None
            if number % 2 == 0:
                processes[left].kill()
            else:
                assert await processes[left].terminate() == 0

            async def is_led_by_another(left: int = left) -> bool:
                return await site.leader() not in (None, left)

            await until_awaited(is_led_by_another)
            assert await topic.assigned() == had
            await topic.all_keys_get_on()
            await processes[left].start()
