"""Clusters that replicate a scalable topic to each other, while its layouts change and brokers die.

Links are cut, held and torn meanwhile.  At the end each cluster has each message once, in the order
of its key, and no message of an aborted transaction; and sealed segments are pruned.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import aiohttp
import pytest

from broker.scalable.steps import StepKind
from tests.chaos.replicated_load import (
    AUDIT,
    LOCAL_NAME,
    PATH,
    everything_is_everywhere_once,
    loads,
    make_topic,
    segments_of,
    stop_all,
)
from tests.support.dying_broker import DyingBroker, until_some_die
from tests.support.effort import by_effort, draw_seed
from tests.support.layout_steps import DiesAfter
from tests.support.replicating_clusters import Cluster, replicating
from tests.support.waiting import until_awaited

ROUNDS: Final = by_effort(quick=2, whole=2, nightly=80)
COUNT: Final = by_effort(quick=2, whole=3, nightly=3)
"""Of the clusters."""
SETTINGS: Final = {
    "ledger_max_entries": 400,
    "ledger_min_age_s": 0,
    "sealed_segment_prune_interval_s": 1,
}
PAUSE_S: Final = 0.5
"""How long a link is broken, at most, before more goes wrong."""
DIES_S: Final = 20
"""How long a change may take to the step at which its broker dies."""
MOST_SEGMENTS: Final = 5
PRUNED_S: Final = 60


async def active_of(cluster: Cluster) -> list[int]:
    """The ids of the ACTIVE segments, in the order of hashes."""
    segments = await segments_of(cluster)
    active = [number for number, each in segments.items() if each["state"] == "ACTIVE"]
    return sorted(
        active, key=lambda each: cast("dict[str, int]", segments[each]["hashRange"])["start"]
    )


async def draw_change(cluster: Cluster, rng: random.Random) -> tuple[StepKind, str]:
    """A split or a merge, and its path."""
    active = await active_of(cluster)
    if len(active) == 1 or (len(active) < MOST_SEGMENTS and rng.randrange(2)):
        return StepKind.SPLIT, f"{PATH}/split/{rng.choice(active)}"
    first, second = rng.choice(list(pairwise(active)))
    return StepKind.MERGE, f"{PATH}/merge/{first}/{second}"


async def change_layout(cluster: Cluster, rng: random.Random) -> None:
    """Split or merge, unless another change is under way, or the broker is killed first."""
    with suppress(aiohttp.ClientError):
        await request_change(cluster, (await draw_change(cluster, rng))[1])


async def request_change(cluster: Cluster, path: str) -> None:
    """Ask for a change; the broker may be killed meanwhile."""
    with suppress(aiohttp.ClientError):
        await cluster.broker.rest("POST", path)


async def die_in_change(cluster: Cluster, rng: random.Random, at: DiesAfter) -> bool:
    """Change the layout, have the broker die at a step of that, start it; whether it died there."""
    broker = cluster.broker
    assert isinstance(broker, DyingBroker)
    kind, path = await draw_change(cluster, rng)
    child = max(await segments_of(cluster)) + 1
    broker.die_at(at.patterns(LOCAL_NAME, kind, child, AUDIT))
    with suppress(aiohttp.ClientError):
        await broker.rest("POST", path)
    try:
        await until_some_die([broker], DIES_S)
    except TimeoutError:
        broker.kill()
        broker.live_on()
        return False
    else:
        return True
    finally:
        await broker.start()


async def trouble(clusters: Sequence[Cluster], rng: random.Random, steps: list[DiesAfter]) -> None:
    """Break a link, change layouts and kill a broker; then let all brokers die in a change each."""
    links = [link for each in clusters for link in each.links.values()]
    link = rng.choice(links)
    rng.choice((link.cut, link.hold, link.tear, link.reset))()
    changing = [asyncio.create_task(change_layout(each, rng)) for each in clusters]
    await asyncio.sleep(rng.uniform(0, PAUSE_S))
    killed = rng.choice(clusters)
    killed.broker.kill()
    await asyncio.gather(*changing)
    link.mend()
    await killed.broker.start()
    chosen = [steps.pop() if steps else rng.choice(list(DiesAfter)) for _ in clusters]
    link = rng.choice(links)
    rng.choice((link.cut, link.tear, link.reset))()
    died = await asyncio.gather(
        *(die_in_change(each, rng, at) for each, at in zip(clusters, chosen, strict=True))
    )
    link.mend()
    shown = [f"{at.value}: {did}" for at, did in zip(chosen, died, strict=True)]
    print(f"killed {killed.name}, and each in a change, after {', '.join(shown)}")


async def sealed_segments_go(cluster: Cluster) -> None:
    """Return when only ACTIVE segments are left, once nothing but replicators holds the others."""
    await cluster.ask("DELETE", f"{PATH}/subscriptions/{AUDIT}?force=true")

    async def are_gone() -> bool:
        gone = len(await segments_of(cluster)) == len(await active_of(cluster))
        if not gone:
            await asyncio.sleep(0.2)
        return gone

    try:
        await until_awaited(are_gone, PRUNED_S)
    except TimeoutError:
        raise AssertionError(f"{cluster.name} keeps {await segments_of(cluster)}") from None


@pytest.mark.timeout(240 + 30 * ROUNDS)
async def test_each_message_is_in_each_cluster_once_whatever_the_layouts(
    tmp_path: Path,
) -> None:
    rng = random.Random(draw_seed())
    names = ["east", "west", "north"][:COUNT]
    steps = rng.sample(list(DiesAfter), len(DiesAfter))
    async with replicating(tmp_path, names, SETTINGS, DyingBroker) as clusters:
        for segments, each in enumerate(clusters, 1):
            await make_topic(each, segments)
        async with loads(clusters, rng) as load:
            for _ in range(ROUNDS):
                await asyncio.gather(*(each.goes_on() for each in load))
                await trouble(clusters, rng, steps)
            await asyncio.gather(*(each.goes_on() for each in load))
            sent = await stop_all(load)
        await everything_is_everywhere_once(clusters, sent)
        await asyncio.gather(*(sealed_segments_go(each) for each in clusters))
        for each in clusters:
            assert not each.broker.faults(), each.name
