"""Fixtures of the tests on whole clusters: parts that a test may break, and the stock client.

The brokers' metadata is on the ZooKeeper server of the tests; where `MAGNETAR_TEST_OXIA` names an
Oxia server, every test that asks for brokers runs a second time on that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import REPORTED
from tests.parts.ground import Ground, new_ground
from tests.stock import stock_driver
from tests.stock.clusters import OXIA_GIVEN
from tests.stock.stock_driver import StockDriver
from tests.support.broker_cluster import BrokerCluster
from tests.support.empty_oxia import empty_oxia
from tests.support.tools import missing_java, require

ROUNDS: Final = int(os.environ.get("MAGNETAR_FAULT_ROUNDS", "1"))
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


@pytest.fixture(params=METADATA)
def metadata_store_url(request: pytest.FixtureRequest, ground: Ground) -> str:
    """Of an empty metadata store.  The end of the run says on which ones brokers were tested."""
    reported = request.config.stash.setdefault(REPORTED, [])
    if RAN_ON not in reported:
        reported.append(RAN_ON)
    if request.param == "zookeeper":
        return ground.metadata_store()
    address = os.environ[OXIA_GIVEN]
    asyncio.run(empty_oxia(address))
    return f"oxia://{address}/default"


@pytest.fixture
def brokers(ground: Ground, metadata_store_url: str, tmp_path: Path) -> Iterator[BrokerCluster]:
    """Three brokers, started; at the end none has logged a fault."""
    settings = {
        "metadata_store_url": metadata_store_url,
        "bookkeeper_metadata_service_uri": ground.bookies.uri,
        "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
        "scalable_consumer_grace_period_s": 5,
    }
    cluster = BrokerCluster(tmp_path, settings, count=3)
    try:
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        cluster.kill()


@pytest.fixture(scope="module")
def driver() -> Iterator[StockDriver]:
    """The stock client."""
    require(missing_java(), "cluster", "JDK 17 and Maven")
    stock_driver.build()
    started = StockDriver()
    yield started
    started.close()
