"""Three brokers: one dies, again and again, under v4 and v5 transactions on the same topics.

Workers of both kinds take inputs (one by one, messages of batches, or everything up to one) and
write in the same transactions to the same ordinary topics, those of version 5 to a scalable one
too.  Some transactions are left open until their deadline.  Who dies leads a coordinator, or owns a
topic of inputs or outputs.  At the end every transaction is whole or not there at all, every input
went through once, and nothing of any transaction is left.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from tests.chaos.transacting_worker import Outcome
from tests.chaos.whole_transactions import (
    ORDINARY,
    SETTINGS,
    Input,
    Layout,
    a_commit_more_of_each,
    end_what_is_open,
    everything_that_is_seen,
    input_names,
    inputs_went_through_once,
    nothing_is_left,
    ordinary_inputs,
    prepare_inputs,
    prepare_outputs,
    reshape,
    transactions_are_whole,
    workers_on,
)
from tests.cluster.cluster_state import state_of
from tests.cluster.conftest import SESSION_TIMEOUT_MS, three_brokers
from tests.conftest import Report
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.effort import by_effort, draw_seed
from tests.support.raw_client import BrokerError
from tests.support.routed_client import COORDINATORS, RoutedClient
from tests.support.waiting import end, until_awaited

ROUNDS: Final = by_effort(quick=4, whole=4, nightly=40)
TIMEOUT_S: Final = 240 + 45 * ROUNDS
COMMITS_S: Final = 90
"""By then every worker has another commit: others take over when a session has ended."""
MOVED_S: Final = 30
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S)]


MOST: Final = 600 * ROUNDS
SOURCE: Final = "sources"
INPUTS: Final = (
    *ordinary_inputs(MOST),
    Input(f"segment://public/default/{SOURCE}/0000-ffff-0", input_names("g", MOST), v4=False),
)
ROLES: Final = (
    f"{COORDINATORS}-partition-0",
    INPUTS[0].topic,
    ORDINARY[0],
    INPUTS[2].topic,
)
"""The coordinator and topics whose broker dies, in turn."""


@pytest.fixture
def brokers(ground: Ground, metadata_store_url: str, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three brokers with small ledgers, which collect ended transactions soon."""
    with three_brokers(tmp_path, ground, metadata_store_url, **SETTINGS) as cluster:
        yield cluster


def test_v4_and_v5_transactions_are_whole_when_brokers_die(
    brokers: BrokerCluster, report: Report
) -> None:
    try:
        report(asyncio.run(_kill_under_transactions(brokers.brokers, draw_seed())))
    except Exception as failure:
        failure.add_note(asyncio.run(state_of(brokers, ["topic://public/default/shifting"])))
        raise
    assert not brokers.faults(), brokers.faults()


async def _kill_under_transactions(brokers: Sequence[BrokerProcess], seed: int) -> str:
    rng = random.Random(seed)
    layout = Layout()
    workers = workers_on(INPUTS, layout, seed)
    stop = asyncio.Event()
    await _prepare(brokers, layout)
    working = [asyncio.create_task(each.run(brokers, stop)) for each in workers]
    done: list[str] = []
    try:
        for turn in range(ROUNDS):
            await a_commit_more_of_each(workers, working, COMMITS_S)
            done.append(await _trouble(brokers, layout, rng, turn))
        await a_commit_more_of_each(workers, working, COMMITS_S)
        stop.set()
        await asyncio.gather(*working)
    finally:
        await end(*working)
    await layout.look(brokers[0])
    await end_what_is_open(brokers[0])
    used = transactions_are_whole(workers, await everything_that_is_seen(brokers, layout))
    for each in INPUTS:
        await inputs_went_through_once(brokers, each, used)
    await nothing_is_left(brokers, INPUTS)
    outcomes = Counter(each.value for worker in workers for each in worker.outcomes.values())
    left_open = sum(worker.left_open for worker in workers)
    assert outcomes[Outcome.COMMITTED.value] > ROUNDS * len(workers)
    return (
        f"v4 and v5 transactions, a broker of three hit {ROUNDS} times ({', '.join(done)}): "
        f"{dict(outcomes)}, {left_open} left open, {len(used)} inputs used"
    )


async def _prepare(brokers: Sequence[BrokerProcess], layout: Layout) -> None:
    await prepare_outputs(brokers, layout)
    await brokers[0].create_scalable(SOURCE, 1)
    for each in INPUTS:
        await prepare_inputs(brokers, each)


async def _trouble(
    brokers: Sequence[BrokerProcess], layout: Layout, rng: random.Random, turn: int
) -> str:
    """One round: a reshape, and the end or a pause of the broker that has a role."""
    await asyncio.sleep(rng.uniform(0, 0.5))
    role = ROLES[turn % len(ROLES)]
    number = await _holder(brokers, role)
    other = brokers[(number + 1) % len(brokers)]
    reshaping = asyncio.create_task(reshape(other, rng, merging=turn % 3 == 2))
    await asyncio.wait({reshaping}, timeout=rng.choice((0, 0.05, 1)))
    kind = rng.choice(("killed", "killed for long", "paused"))
    if kind == "paused":
        brokers[number].signal(signal.SIGSTOP)
        await asyncio.sleep(SESSION_TIMEOUT_MS / 1000 + 1)
        brokers[number].signal(signal.SIGCONT)
    else:
        brokers[number].kill()
        if kind == "killed for long":
            await _until_moved(brokers, role, number)
        await brokers[number].start()
    await asyncio.wait({reshaping})
    reshaping.exception()
    await _look(brokers, layout)
    return f"{role.rpartition('/')[2]}: {kind}"


async def _holder(brokers: Sequence[BrokerProcess], role: str) -> int:
    """The number of the broker that serves a topic or leads a coordinator."""
    found: list[int] = []

    async def is_named() -> bool:
        try:
            async with RoutedClient(brokers) as routes:
                port = await routes.port_of(role)
        except (OSError, BrokerError):
            return False
        found[:] = [n for n, each in enumerate(brokers) if each.port == port]
        return True

    await until_awaited(is_named, MOVED_S)
    return found[0]


async def _until_moved(brokers: Sequence[BrokerProcess], role: str, number: int) -> None:
    async def is_elsewhere() -> bool:
        return await _holder(brokers, role) != number

    await until_awaited(is_elsewhere, MOVED_S)


async def _look(brokers: Sequence[BrokerProcess], layout: Layout) -> None:
    """The layout as it is, once a broker answers."""

    async def is_shown() -> bool:
        try:
            await layout.look(brokers[0])
        except (aiohttp.ClientError, AssertionError):
            return False
        return True

    await until_awaited(is_shown, MOVED_S)
