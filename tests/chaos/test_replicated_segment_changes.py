"""What is replicated of a scalable topic changes, while layouts change and brokers are killed.

A cluster leaves the list and comes back; the topic is deleted and created anew.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.replicated_load import (
    PATH,
    everything_is_everywhere_once,
    loads,
    make_topic,
    stop_all,
    until_cursors,
)
from tests.chaos.replication_judge import Outcome, Sent
from tests.chaos.test_sigkill_replicated_segments import change_layout
from tests.support.effort import draw_seed
from tests.support.replicating_clusters import Cluster, replicating


async def send_in(
    clusters: Sequence[Cluster], rng: random.Random, label: str, *, killing: bool = False
) -> dict[Sent, Outcome]:
    """Send in all clusters, and change their layouts meanwhile; what was sent.

    With `killing` a broker is killed in that.
    """
    async with loads(clusters, rng, label) as load:
        await asyncio.gather(*(each.goes_on() for each in load))
        changing = [asyncio.create_task(change_layout(each, rng)) for each in clusters]
        if killing:
            await asyncio.sleep(rng.uniform(0, 0.2))
            await restart(rng.choice(clusters))
        await asyncio.gather(*changing)
        await asyncio.gather(*(each.goes_on() for each in load))
        return await stop_all(load)


async def restart(cluster: Cluster) -> None:
    """SIGKILL, and start again."""
    cluster.broker.kill()
    await cluster.broker.start()


@pytest.mark.timeout(240)
async def test_a_cluster_that_leaves_the_list_lacks_what_is_sent_until_it_is_back(
    tmp_path: Path,
) -> None:
    rng = random.Random(draw_seed())
    async with replicating(tmp_path, ["east", "west"]) as clusters:
        east, west = clusters
        await make_topic(east, 2)
        await make_topic(west, 1)
        sent = await send_in(clusters, rng, "before-")
        await until_cursors(east, "west", all)
        await east.replicate(["east"])
        await restart(east)
        await until_cursors(east, "west", lambda shown: not any(e is not None for e in shown))
        off = await send_in([east], rng, "off-")
        await east.replicate(["east", "west"])
        await until_cursors(east, "west", lambda shown: None not in shown)
        sent |= await send_in(clusters, rng, "after-", killing=True)
        await everything_is_everywhere_once(clusters, sent | off, {"west": off})
        for each in clusters:
            assert not each.broker.faults(), each.name


@pytest.mark.timeout(240)
async def test_a_topic_that_is_deleted_and_created_anew_is_replicated_anew(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    async with replicating(tmp_path, ["east", "west"]) as clusters:
        east, west = clusters
        await make_topic(east, 2)
        await make_topic(west, 1)
        before = await send_in(clusters, rng, "before-")
        await until_cursors(east, "west", all)
        await until_cursors(west, "east", all)
        status, answer = await east.broker.rest("DELETE", PATH, force="true")
        assert status == 204, answer
        if rng.randrange(2):
            await restart(east)
        await make_topic(east, 3)
        after = await send_in(clusters, rng, "after-", killing=True)
        await everything_is_everywhere_once(clusters, before | after, {"east": before})
        for each in clusters:
            assert not each.broker.faults(), each.name
