"""Fixtures of the tests on whole clusters: parts that a test may break, and the official client.

The brokers' metadata is on the ZooKeeper server of the tests; where `MAGNETAR_TEST_OXIA` names an
Oxia server, every test that asks for brokers runs a second time on that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Report
from tests.java import stock_driver
from tests.java.clusters import OXIA_GIVEN
from tests.java.stock_driver import StockDriver
from tests.servers.ground import Ground, new_ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.effort import by_effort
from tests.support.empty_oxia import empty_oxia
from tests.support.tools import missing_java, require

ROUNDS: Final = by_effort(quick=1, whole=1, nightly=10)
SESSION_TIMEOUT_MS: Final = 5_000
METADATA: Final = ("zookeeper", "given-oxia") if OXIA_GIVEN in os.environ else ("zookeeper",)
RAN_ON: Final = "several brokers on ZooKeeper " + (
    f"and on the Oxia server {os.environ[OXIA_GIVEN]}"
    if OXIA_GIVEN in os.environ
    else f"ONLY: {OXIA_GIVEN} names no Oxia server (0.14.4 or newer)"
)


@pytest.fixture(scope="module")
def ground(java_parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Parts of this module's own: others' bookies and sessions survive what is done to them."""
    with new_ground(tmp_path_factory.mktemp("ground")) as started:
        yield started


def empty_metadata_store(kind: str, ground: Ground) -> str:
    """URL of an empty metadata store of one of the kinds in `METADATA`."""
    if kind == "zookeeper":
        return ground.metadata_store()
    address = os.environ[OXIA_GIVEN]
    asyncio.run(empty_oxia(address))
    return f"oxia://{address}/default"


@pytest.fixture(params=METADATA)
def metadata_store_url(request: pytest.FixtureRequest, ground: Ground, report: Report) -> str:
    """Of an empty metadata store.  The end of the run says on which ones brokers were tested."""
    report(RAN_ON)
    return empty_metadata_store(request.param, ground)


@contextmanager
def three_brokers(
    directory: Path, ground: Ground, metadata_store_url: str, **more: object
) -> Iterator[BrokerCluster]:
    """Started, with more settings; at the end they stop well."""
    settings = {
        "metadata_store_url": metadata_store_url,
        "bookkeeper_metadata_service_uri": ground.bookies.uri,
        "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
        "scalable_consumer_grace_period_s": 5,
        **more,
    }
    cluster = BrokerCluster(directory, settings, count=3)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        cluster.kill()


@pytest.fixture
def brokers(ground: Ground, metadata_store_url: str, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three brokers of a test's own."""
    with three_brokers(tmp_path, ground, metadata_store_url) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def driver() -> Iterator[StockDriver]:
    """The official client."""
    require(missing_java(), "cluster", "JDK 17 and Maven")
    stock_driver.build()
    started = StockDriver()
    yield started
    started.close()
