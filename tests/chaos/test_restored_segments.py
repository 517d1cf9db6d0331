"""A cluster that replicates a scalable topic is restored from a backup of its files.

Its positions, its layout and its epochs go back, and the other cluster knows later ones.
"""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.replicated_load import (
    PATH,
    loads,
    make_topic,
    read_all,
    stop_all,
    stored_of,
    until_cursors,
)
from tests.chaos.replication_judge import Sent
from tests.support.effort import draw_seed
from tests.support.replicating_clusters import Cluster, replicating


async def store_in(cluster: Cluster, rng: random.Random, label: str) -> set[Sent]:
    """Send in one cluster; the messages that are stored."""
    async with loads([cluster], rng, label) as load:
        await load[0].goes_on(200)
        return stored_of(await stop_all(load))


async def split_first(cluster: Cluster) -> None:
    """Split the first segment."""
    status, answer = await cluster.broker.rest("POST", f"{PATH}/split/0")
    assert status == 204, answer


@pytest.mark.timeout(240)
async def test_what_is_sent_after_a_restore_arrives(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    with_split = rng.random() < 0.7
    async with replicating(tmp_path, ["east", "west"]) as (east, west):
        await make_topic(east, 1)
        await make_topic(west, 2)
        kept = await store_in(east, rng, "kept-")
        await until_cursors(east, "west", all)
        east.broker.kill()
        shutil.copytree(east.broker.data_dir, tmp_path / "backup")
        await east.broker.start()
        if with_split:
            await split_first(east)
        lost = await store_in(east, rng, "lost-")
        await until_cursors(east, "west", all)
        east.broker.kill()
        shutil.rmtree(east.broker.data_dir)
        (tmp_path / "backup").rename(east.broker.data_dir)
        await east.broker.start()
        again = await store_in(east, rng, "again-")
        found = Counter(each.message for each in await read_all(west, kept | lost | again))
        print(f"with a newer layout: {with_split}; twice: {len(found)} of {found.total()}")
        missing = (kept | lost | again) - found.keys()
        assert not missing, sorted(missing)[:5]
        twice = {message for message, times in found.items() if times > 1}
        assert not twice & (lost | again), sorted(twice & (lost | again))[:5]
        assert max(found.values()) <= 2
