"""Fixtures of the tests on whole clusters: parts that a test may break, and the official client.

The brokers' metadata is on the ZooKeeper server of the tests; where `MAGNETAR_TEST_OXIA` names an
Oxia server, every test that asks for brokers runs a second time on that.

With `MAGNETAR_TEST_SECURE` the brokers of faults and take-overs have everything on: TLS with
clients, with each other, with ZooKeeper and with bookies (START_TLS), tokens, and authorization.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.faults import on_zookeeper
from tests.conftest import Report
from tests.java import stock_driver
from tests.java.clusters import OXIA_GIVEN
from tests.java.stock_driver import StockDriver
from tests.servers.ground import Ground, new_ground, tls_to_stores
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.effort import by_effort
from tests.support.empty_oxia import empty_oxia
from tests.support.run_parts import SECURE_VARIABLE
from tests.support.security import APP_ROLE, Security
from tests.support.stalling_relay import StallingRelay
from tests.support.tools import missing_java, require

COUNT: Final = 3
SECURE: Final = bool(os.environ.get(SECURE_VARIABLE))
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
    security = Security(tmp_path_factory.mktemp("security"))
    with new_ground(tmp_path_factory.mktemp("ground"), security=security) as started:
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


@pytest.fixture
def secured(request: pytest.FixtureRequest) -> bool:
    """Whether the brokers have everything on; a test may ask for it by a parameter."""
    return SECURE or bool(getattr(request, "param", False))


@contextmanager
def three_brokers(
    directory: Path,
    ground: Ground,
    metadata_store_url: str,
    *,
    secured: bool = False,
    relays: bool = False,
    process: type[BrokerProcess] = BrokerProcess,
    **more: object,
) -> Iterator[BrokerCluster]:
    """Started, with more settings; at the end they stop well.

    `secured`: they have everything on if their metadata is on ZooKeeper, and `app` may use
    `public/default`.  `relays`: each has a relay of its own before ZooKeeper.
    `process` is the class of their processes.
    """
    # The Oxia server that is given has no TLS.
    security = ground.security if secured and on_zookeeper(metadata_store_url) else None
    settings = {
        "metadata_store_url": metadata_store_url,
        "bookkeeper_metadata_service_uri": ground.bookies.uri,
        "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
        "scalable_consumer_grace_period_s": 5,
        **(
            tls_to_stores(security.broker_certificate, security.authority.chain) if security else {}
        ),
        **more,
    }
    with ExitStack() as stack:
        target = ground.zookeeper.address_tls if security else ground.zookeeper.address
        opened = [
            stack.enter_context(closing(StallingRelay(target))) for _ in range(COUNT * relays)
        ]
        addresses = [each.address for each in opened] or [target] * COUNT

        def own_settings(number: int) -> Mapping[str, object]:
            """Of the stores, by the address at which this broker reaches ZooKeeper."""
            names = ("metadata_store_url", "bookkeeper_metadata_service_uri")
            plain = ground.zookeeper.address
            return {name: str(settings[name]).replace(plain, addresses[number]) for name in names}

        cluster = BrokerCluster(directory, settings, COUNT, security, own_settings, process)
        cluster.relays = opened
        stack.callback(cluster.kill)
        cluster.start()
        if security:
            asyncio.run(_grant_to_app(cluster))
        yield cluster
        cluster.stop()


async def _grant_to_app(cluster: BrokerCluster) -> None:
    path = f"/namespaces/public/default/permissions/{APP_ROLE}"
    status, answer = await cluster.brokers[0].rest("POST", path, body=["produce", "consume"])
    assert status == 204, answer


@pytest.fixture
def brokers(
    ground: Ground, metadata_store_url: str, secured: bool, tmp_path: Path
) -> Iterator[BrokerCluster]:
    """Three brokers of a test's own."""
    with three_brokers(tmp_path, ground, metadata_store_url, secured=secured) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def driver() -> Iterator[StockDriver]:
    """The official client."""
    require(missing_java(), "cluster", "JDK 17 and Maven")
    stock_driver.build()
    started = StockDriver()
    yield started
    started.close()
