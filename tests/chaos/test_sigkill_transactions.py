"""SIGKILL under transactions: each is seen whole or not at all, each input goes through once."""

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.chaos.transacting_worker import Outcome
from tests.chaos.whole_transactions import (
    ORDINARY,
    SETTINGS,
    Layout,
    a_commit_more_of_each,
    end_what_is_open,
    everything_that_is_seen,
    inputs_went_through_once,
    nothing_is_left,
    ordinary_inputs,
    prepare_inputs,
    prepare_outputs,
    reshape,
    transactions_are_whole,
    workers_on,
)
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import end

ROUNDS: Final = by_effort(quick=4, whole=6, nightly=100)
INPUTS: Final = ordinary_inputs(max(1500, 200 * ROUNDS))


@pytest.mark.timeout(180 + 10 * ROUNDS)
async def test_sigkill_under_transactions(tmp_path: Path) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    layout = Layout()
    workers = workers_on(INPUTS, layout, seed)
    stop = asyncio.Event()
    async with running(tmp_path, {**SETTINGS, "log_file_size_bytes": 1024 * 1024}) as broker:
        await prepare_outputs([broker], layout)
        for each in INPUTS:
            await prepare_inputs([broker], each)
        working = [asyncio.create_task(worker.run([broker], stop)) for worker in workers]
        try:
            for turn in range(ROUNDS):
                await a_commit_more_of_each(workers, working)
                await trouble(broker, layout, rng, turn)
            await a_commit_more_of_each(workers, working)
            stop.set()
            await asyncio.gather(*working)
        finally:
            await end(*working)
        await layout.look(broker)
        await end_what_is_open(broker)
        seen = await everything_that_is_seen([broker], layout)
        used = transactions_are_whole(workers, seen)
        for each in INPUTS:
            await inputs_went_through_once([broker], each, used)
        await nothing_is_left([broker], INPUTS)
        assert not broker.faults()
    outcomes = Counter(each for worker in workers for each in worker.outcomes.values())
    print(f"{dict(outcomes)}, {len(used)} inputs used")
    assert outcomes[Outcome.COMMITTED] > ROUNDS * len(workers)


async def trouble(broker: BrokerProcess, layout: Layout, rng: random.Random, turn: int) -> None:
    """One round: unloads and a reshape, then the end of the process, in one of its forms."""
    await asyncio.sleep(rng.uniform(0, 0.5))
    for topic in rng.sample([*(each.topic for each in INPUTS), *ORDINARY], rng.randrange(3)):
        await broker.rest("PUT", f"/{topic.replace('://', '/')}/unload")
    reshaping = asyncio.create_task(reshape(broker, rng, merging=turn % 3 == 2))
    await asyncio.wait({reshaping}, timeout=rng.choice((0, 0.05, 3)))
    kind = rng.randrange(6)
    if kind == 0:
        assert await broker.terminate() == 0
    elif kind == 1:
        broker.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        broker.signal(signal.SIGCONT)
    else:
        broker.kill()
    await asyncio.wait({reshaping})
    reshaping.exception()
    if not broker.running:
        await broker.start()
    await layout.look(broker)
