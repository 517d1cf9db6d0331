"""Transaction keys outlive the brokers that lead their coordinators, on three brokers.

The first process stands still in mid-transaction of two jobs.  The broker that leads the key of one
is stopped, then the one that leads that of the other is killed.  Each time the second opens the key
through whoever leads its coordinator then, and does the work, whole.  Whatever the first still asks
for when it wakes is refused, and a reader sees the work once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

import magnetar
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.txn_id import CoordinatorId
from tests.cluster.conftest import three_brokers
from tests.cluster.faults import Site
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.key_client import COORDINATORS
from tests.support.key_worker_process import (
    INPUT,
    LATE,
    WorkerProcess,
    everything_in,
    put_input,
    workers,
    written_by,
)
from txn.records import leader_key

TIMEOUT_S: Final = 300
KEEP_ALIVE_INTERVAL_S: Final = 5
"""A segment whose consumer stands still is another one's after two of them and a grace period."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S)]

GOES: Final[Mapping[str, Callable[[BrokerCluster, int], None]]] = {
    "stopped": BrokerCluster.stop_one,
    "killed": BrokerCluster.kill_one,
}


@pytest.fixture
def brokers(ground: Ground, metadata_store_url: str, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three brokers that notice soon that a client stands still."""
    with three_brokers(
        tmp_path, ground, metadata_store_url, keep_alive_interval_s=KEEP_ALIVE_INTERVAL_S
    ) as cluster:
        yield cluster


def test_a_zombie_does_no_harm_when_its_coordinator_moves(
    ground: Ground, brokers: BrokerCluster, tmp_path: Path
) -> None:
    jobs = {f"{how}-{uuid.uuid4().hex[:8]}": goes for how, goes in GOES.items()}
    some = _source(next(iter(jobs)))
    site = Site(ground, brokers, topic=some, led=some)
    with workers(tmp_path, "first", "second") as (first, second):
        for job in jobs:
            asyncio.run(_until_the_middle(brokers, first, second, job))
        first.pause()
        for job, goes in jobs.items():
            leader = leader_key(CoordinatorId(coordinator_of_key(job, COORDINATORS)))
            left = site.holder(leader)
            goes(brokers, left)
            asyncio.run(_the_other_does_it(second, job))
            assert site.holder(leader) != left
        first.resume()
        for job in jobs:
            asyncio.run(_all_that_is_late_is_refused(first, job))
    for job in jobs:
        asyncio.run(_the_work_is_there_once(brokers, job))
    assert not brokers.faults(), brokers.faults()


def _source(job: str) -> str:
    return f"topic://public/default/source-{job}"


def _sink(job: str) -> str:
    return f"topic://public/default/sink-{job}"


async def _until_the_middle(
    brokers: BrokerCluster, first: WorkerProcess, second: WorkerProcess, job: str
) -> None:
    """The first has done half of its work, and not committed it."""
    for what in ("source", "sink"):
        await brokers.brokers[0].create_scalable(f"{what}-{job}", 1)
    async with magnetar.connect(brokers.url) as client:
        await put_input(client, _source(job))
    for worker in (first, second):
        await worker.set_up(job, brokers.url, _source(job), _sink(job))
    for step in ("open", "begin", "work"):
        await first.take(step, job, len(INPUT) // 2)


async def _the_other_does_it(second: WorkerProcess, job: str) -> None:
    assert await second.take("open", job, 0) == [1, False], "one epoch more, and once"
    for step in ("begin", "work", "commit"):
        await second.take(step, job, len(INPUT))


async def _all_that_is_late_is_refused(first: WorkerProcess, job: str) -> None:
    for request, refusals in LATE.items():
        assert await first.refusal(request, job) in refusals, request


async def _the_work_is_there_once(brokers: BrokerCluster, job: str) -> None:
    async with magnetar.connect(brokers.url) as client:
        assert await everything_in(client, _sink(job)) == written_by("second")
    other = next(each for each in brokers.brokers if each.running)
    status, shown = await other.rest("GET", f"/transactions/transaction-keys/{job}")
    assert status == 200, shown
    assert isinstance(shown, dict)
    assert (shown["epoch"], shown["transactionState"]) == (1, "COMMITTED")
