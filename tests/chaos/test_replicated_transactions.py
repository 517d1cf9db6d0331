"""SIGKILL under transactions whose messages are replicated: another cluster gets them whole."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.transacting_worker import Outcome
from tests.chaos.whole_transactions import (
    AUDIT,
    EARLIEST,
    ORDINARY,
    SETTINGS,
    Layout,
    a_commit_more_of_each,
    end_what_is_open,
    everything_that_is_seen,
    ordinary_inputs,
    prepare_inputs,
    transactions_are_whole,
    workers_on,
)
from tests.support.effort import by_effort, draw_seed
from tests.support.replicating_clusters import Cluster, Link, replicating, until_replicated
from tests.support.waiting import end

ROUNDS: Final = by_effort(quick=2, whole=4, nightly=60)
INPUTS: Final = ordinary_inputs(max(1500, 200 * ROUNDS))[:2]


@pytest.mark.timeout(180 + 20 * ROUNDS)
async def test_committed_transactions_arrive_whole_and_aborted_ones_never(tmp_path: Path) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    layout = Layout()  # Without segments: workers write to ordinary topics alone.
    workers = workers_on(INPUTS, layout, seed)
    stop = asyncio.Event()
    async with replicating(tmp_path, ["east", "west"], SETTINGS) as (east, west):
        for cluster in (east, west):
            client = await cluster.broker.connect()
            for topic in ORDINARY:
                await (await client.subscribe(topic, AUDIT, EARLIEST)).close()
            await client.close()
        for each in INPUTS:
            await prepare_inputs([east.broker], each)
        working = [asyncio.create_task(each.run([east.broker], stop)) for each in workers]
        try:
            for _ in range(ROUNDS):
                await a_commit_more_of_each(workers, working)
                await trouble(east, west, east.links["west"], rng)
            await a_commit_more_of_each(workers, working)
            stop.set()
            await asyncio.gather(*working)
        finally:
            await end(*working)
        await end_what_is_open(east.broker)
        await until_replicated([east], ORDINARY)
        seen = await everything_that_is_seen([west.broker], layout)
        transactions_are_whole(workers, seen)
        for cluster in (east, west):
            assert not cluster.broker.faults(), cluster.name
    outcomes = Counter(each for worker in workers for each in worker.outcomes.values())
    print(dict(outcomes))
    assert outcomes[Outcome.COMMITTED] > ROUNDS
    assert outcomes[Outcome.ABORTED]


async def trouble(east: Cluster, west: Cluster, link: Link, rng: random.Random) -> None:
    """The link is down or held while one of the brokers, or both, are killed."""
    await asyncio.sleep(rng.uniform(0, 0.3))
    rng.choice((link.cut, link.hold, link.tear))()
    for cluster in rng.choice(((east,), (east,), (west,), (east, west))):
        cluster.broker.kill()
        await asyncio.sleep(rng.uniform(0, 0.3))
    link.mend()
    for cluster in (east, west):
        if not cluster.broker.running:
            await cluster.broker.start()
