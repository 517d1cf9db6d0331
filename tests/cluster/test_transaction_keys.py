"""A transaction key outlives the broker that leads its coordinator, on three brokers.

The first process stands still in mid-transaction while that broker is killed, or stopped.  The
second opens the key through whoever leads the coordinator then, and does the work, whole.  Whatever
the first still asks for when it wakes is refused, and a reader sees the work once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

import magnetar
from protocol.key_hash import coordinator_of_key
from tests.client.key_worker_process import (
    INPUT,
    LATE,
    WorkerProcess,
    everything_in,
    two_workers,
)
from tests.cluster.faults import Site
from tests.parts.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.key_client import COORDINATORS
from txn.records import leader_key
from txn.txn_id import CoordinatorId

TIMEOUT_S: Final = 300
"""A segment whose consumer stands still is another one's after a keep-alive and a grace period."""
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S)]

GOES: Final[Mapping[str, Callable[[BrokerCluster, int], None]]] = {
    "killed": BrokerCluster.kill_one,
    "stopped": BrokerCluster.stop_one,
}


@pytest.mark.parametrize("how", GOES)
def test_a_zombie_does_no_harm_when_the_coordinator_moves(
    ground: Ground, brokers: BrokerCluster, tmp_path: Path, how: str
) -> None:
    unique = uuid.uuid4().hex[:8]
    source, sink, key = (f"{what}-{unique}" for what in ("source", "sink", "job"))
    for name in (source, sink):
        asyncio.run(brokers.brokers[0].create_scalable(name, 1))
    topics = {"source": _url(source), "sink": _url(sink)}
    site = Site(ground, brokers, topic=topics["source"], led=topics["source"])
    with two_workers(tmp_path) as (first, second):
        asyncio.run(_until_the_middle(brokers, first, second, topics, key))
        leader = leader_key(CoordinatorId(coordinator_of_key(key, COORDINATORS)))
        left = site.holder(leader)
        GOES[how](brokers, left)
        asyncio.run(_the_other_does_it(second))
        assert site.holder(leader) != left
        first.resume()
        asyncio.run(_all_that_is_late_is_refused(first))
        assert asyncio.run(_read(brokers, topics["sink"])) == sorted(
            value.upper() for value in INPUT
        )
        other = next(each for each in brokers.brokers if each.running)
        path = f"/transactions/transaction-keys/{key}"
        status, shown = asyncio.run(other.rest("GET", path))
        assert status == 200, shown
        assert isinstance(shown, dict)
        assert (shown["epoch"], shown["transactionState"]) == (1, "COMMITTED")
    assert not brokers.faults(), brokers.faults()


def _url(name: str) -> str:
    return f"topic://public/default/{name}"


async def _until_the_middle(
    brokers: BrokerCluster,
    first: WorkerProcess,
    second: WorkerProcess,
    topics: Mapping[str, str],
    key: str,
) -> None:
    """The first has done half of its work, not committed it, and stands still."""
    async with (
        magnetar.connect(brokers.url) as client,
        client.producer(topics["source"], schema=str) as producer,
    ):
        for value in INPUT:
            await producer.send(value)
    for worker in (first, second):
        await worker.ask("setup", url=brokers.url, key=key, **topics)
    assert await first.ask("open") == 0
    await first.ask("begin")
    await first.ask("work", count=len(INPUT) // 2)
    first.pause()


async def _the_other_does_it(second: WorkerProcess) -> None:
    assert await second.ask("open") == 1, "one more than the first had, and once"
    await second.ask("begin")
    await second.ask("work", count=len(INPUT))
    await second.ask("commit")


async def _all_that_is_late_is_refused(first: WorkerProcess) -> None:
    for request, refusals in LATE.items():
        assert await first.refusal(request) in refusals, request


async def _read(brokers: BrokerCluster, topic: str) -> list[str]:
    async with magnetar.connect(brokers.url) as client:
        return await everything_in(client, topic)
