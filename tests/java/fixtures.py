"""The broker and the official client that folders of tests share, and the options that choose them.

Rules: one Java process and one broker for all tests of a run, in whatever folder they are. Without
options the broker is Magnetar. `--peer` starts Apache Pulsar itself from the recipe in `peer/`;
`--peer=pulsar://HOST:PORT,http://HOST:PORT` uses one that runs already. `--cluster=KIND` runs the
tests on brokers with shared stores (`clusters.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from tests.java import stock_driver
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.clusters import DESCRIBED, KINDS, cluster_of
from tests.java.peer_process import PeerProcess
from tests.java.stock_driver import StockDriver
from tests.support.child_process import free_port
from tests.support.tools import missing_java, require

STARTED_PEER = "started"
GRACE_PERIOD_S = 5
"""60 by default; the cases only need to see that it passes."""
SETTINGS: Final[Mapping[str, object]] = {"scalable_consumer_grace_period_s": GRACE_PERIOD_S}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peer",
        nargs="?",
        const=STARTED_PEER,
        default=None,
        metavar="URL,ADMIN",
        help="run the stock cases on Apache Pulsar: one that is started, or the one at URL,ADMIN",
    )
    parser.addoption(
        "--cluster", choices=KINDS, default=None, help="run the stock cases on brokers of a cluster"
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    kind = config.getoption("--cluster", default=None)
    return None if kind is None else f"stock cases on a cluster: {DESCRIBED[kind]}"


class RunningPeer:
    """A peer that somebody else runs: it can be talked to, not restarted."""

    def __init__(self, addresses: str) -> None:
        self.url, _, self.admin_url = addresses.partition(",")


@pytest.fixture(scope="session")
def on_peer(request: pytest.FixtureRequest) -> bool:
    """True when the broker is Apache Pulsar."""
    return request.config.getoption("--peer", default=None) is not None


@pytest.fixture(scope="session")
def stock_driver_process() -> Iterator[StockDriver]:
    require(missing_java(), "stock-client", "JDK 17 and Maven")
    stock_driver.build()
    driver = StockDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def v4_driver_process(stock_driver_process: StockDriver) -> Iterator[StockDriver]:
    """The driver with a v4 client's jars: cases of the v4 API and of the admin library."""
    driver = StockDriver(v4=True)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerUnderTest]:
    """A Magnetar that is alone, for all tests of a worker that leave it running."""
    yield from serving(MagnetarProcess(tmp_path_factory.mktemp("magnetar"), SETTINGS))


@pytest.fixture(scope="session")
def broker(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    stock_driver_process: StockDriver,
) -> Iterator[BrokerUnderTest | RunningPeer]:
    """The broker, or the brokers, of all cases that leave them running."""
    peer = request.config.getoption("--peer", default=None)
    if peer and peer != STARTED_PEER:
        yield RunningPeer(peer)
        return
    kind = request.config.getoption("--cluster", default=None)
    if kind:
        with cluster_of(kind, request, tmp_path_factory.mktemp(kind), dict(SETTINGS)) as cluster:
            yield from serving(cluster)
        return
    if peer:
        process = PeerProcess(free_port(), free_port(), grace_s=GRACE_PERIOD_S)
        process.wipe()
        yield from serving(process)
        return
    yield request.getfixturevalue("embedded_broker")


def serving(process: BrokerUnderTest) -> Iterator[BrokerUnderTest]:
    """The broker, started; at the end it stops cleanly, and has logged no fault of its own."""
    process.start()
    try:
        yield process
        process.stop()
        faults = process.faults()
        assert not faults, faults
    finally:
        process.kill()
