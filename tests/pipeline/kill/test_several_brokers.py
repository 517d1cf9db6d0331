"""K10 on three brokers, on a real cluster: one of them is killed and does not come back.

Rules: who is killed leads the coordinator of the query's key, or has a segment that it writes to
and does not lead that; by the records in the metadata store.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import magnetar
from magnetar.layout import Segment
from magnetar.protocol.key_hash import coordinator_of_key
from magnetar.protocol.txn_id import CoordinatorId
from tests.cluster.faults import Site
from tests.pipeline.conftest import MakeDriver
from tests.pipeline.hooks import Action, Point
from tests.pipeline.kill.conftest import ROWS, Copying, new_copying
from tests.servers.ground import Ground, new_ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.key_client import COORDINATORS
from txn.records import leader_key

pytestmark = pytest.mark.cluster
SESSION_TIMEOUT_MS = 5_000
BROKERS = 3
SEGMENTS = 6
"""Of the sink: no broker has all of them."""


@pytest.fixture
def ground(java_parts: Path, tmp_path: Path) -> Iterator[Ground]:
    """A ZooKeeper server and three bookies."""
    with new_ground(tmp_path / "ground") as started:
        yield started


@pytest.fixture
def brokers(ground: Ground, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three, which serve."""
    settings = {
        "metadata_store_url": ground.metadata_store(),
        "bookkeeper_metadata_service_uri": ground.bookies.uri,
        "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
    }
    cluster = BrokerCluster(tmp_path / "brokers", settings, BROKERS)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
async def copying(
    brokers: BrokerCluster, driver: MakeDriver, spark: SparkSession
) -> AsyncIterator[Copying]:
    """As elsewhere, on these brokers."""
    async with magnetar.connect(brokers.url) as client:
        yield await new_copying(brokers, client, driver, spark, into=SEGMENTS)


def leader_of(site: Site, key: str) -> int:
    """The broker that leads the coordinator of a transaction key."""
    number = coordinator_of_key(key, COORDINATORS)
    return site.holder(leader_key(CoordinatorId(number)))


def owner_of_a_segment(site: Site, segments: Iterable[Segment], but: int) -> int:
    """A broker that has one of them and is not that one.

    While the query waits nobody asks for a segment that was moved, so one may have no owner: then
    a broker is asked to take it.
    """
    other = (but + 1) % BROKERS
    for segment in segments:
        owner = site.owner_now(segment.topic)
        if owner is None:
            site.use(segment.topic, other)
            owner = site.owner(segment.topic)
        if owner != but:
            return owner
    raise AssertionError(f"broker {but} has all segments of the sink")


@pytest.mark.parametrize(
    ("killed", "point"),
    [
        ("coordinator", Point.WRITE_UNDER_WAY),
        ("coordinator", Point.COMMIT_BEGINS),
        ("segment", Point.WRITE_UNDER_WAY),
    ],
)
async def test_one_of_the_brokers_is_killed(
    copying: Copying, brokers: BrokerCluster, ground: Ground, killed: str, point: Point
) -> None:
    """K10: the others take over what it had, and the query goes on without a restart."""
    site = Site(ground, brokers, topic=copying.sink.name, led=copying.sink.name)
    first = copying.driver("first")
    held = first.hooks.at(point, Action.WAIT, batch=1)
    first.spawn()
    await first.until(held)
    gone = leader = await asyncio.to_thread(leader_of, site, copying.key)
    if killed == "segment":
        segments = (await copying.client.layout(copying.sink.name)).segments.values()
        gone = await asyncio.to_thread(owner_of_a_segment, site, segments, leader)
    brokers.kill_one(gone)
    first.hooks.release(held)
    assert await first.finished() == 0
    assert (await asyncio.to_thread(leader_of, site, copying.key) != leader) == (gone == leader)
    assert await copying.audit(whole=True) == ROWS
    assert not brokers.faults(), brokers.faults()
