"""Fixtures of the stock-client suite: the driver, and the broker that it talks to.

`pytest tests/stock` runs against Magnetar. `pytest tests/stock --peer` starts Apache Pulsar itself
from the recipe in `peer/` and runs the same cases there;
`--peer=pulsar://HOST:PORT,http://HOST:PORT` uses one that runs already.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stock import stock_driver
from tests.stock.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.stock.peer_process import PeerProcess
from tests.stock.stock_driver import Facts, StartedCase, StockDriver
from tests.support.broker_process import free_port

STARTED_PEER = "started"
GRACE_PERIOD_S = 5
"""60 by default; the cases only need to see that it passes."""
TEST_TIMEOUT_S = 120
"""Of the test alone: Maven's first build, in a fixture, has a limit of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--peer",
        nargs="?",
        const=STARTED_PEER,
        default=None,
        metavar="URL,ADMIN",
        help="run the stock cases on Apache Pulsar: one that is started, or the one at URL,ADMIN",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.stock)
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))


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
    missing = stock_driver.missing_tools()
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the stock-client tests must run under CI, but {missing}")
        line = f"STOCK-CLIENT TESTS DO NOT RUN: {missing}. Install JDK 17 and Maven to run them."
        warnings.warn(line, stacklevel=1)
        pytest.skip(line)
    stock_driver.build()
    driver = StockDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def broker(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    stock_driver_process: StockDriver,
) -> Iterator[BrokerUnderTest | RunningPeer]:
    """The broker of all cases that leave it running."""
    peer = request.config.getoption("--peer", default=None)
    if peer and peer != STARTED_PEER:
        yield RunningPeer(peer)
        return
    started: BrokerUnderTest
    if peer:
        process = PeerProcess(free_port(), free_port(), grace_s=GRACE_PERIOD_S)
        process.wipe()
        started = process
    else:
        started = MagnetarProcess(
            tmp_path_factory.mktemp("magnetar"),
            {"scalable_consumer_grace_period_s": GRACE_PERIOD_S},
        )
    yield from serving(started)


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


@pytest.fixture
def restartable(
    request: pytest.FixtureRequest, tmp_path: Path, stock_driver_process: StockDriver
) -> Iterator[BrokerUnderTest]:
    """A broker that the test may stop, kill and start again."""
    peer = request.config.getoption("--peer", default=None)
    if peer and peer != STARTED_PEER:
        pytest.skip("somebody else runs this peer: it is not restarted")
    if peer:
        # One peer is enough for this machine's memory: all cases share it.
        yield request.getfixturevalue("broker")
        return
    process = MagnetarProcess(tmp_path)
    yield from serving(process)


RunCase = Callable[..., Facts]


@pytest.fixture
def run_case(broker: BrokerUnderTest, stock_driver_process: StockDriver) -> RunCase:
    """Runs a case on a fresh topic and gives its facts."""

    def run(case: str, **args: object) -> Facts:
        topic = f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}"
        started = stock_driver_process.start(
            case, broker.url, broker.admin_url, **{"topic": topic, **args}
        )
        return started.result()

    return run


StartCase = Callable[..., StartedCase]


@pytest.fixture
def start_case(restartable: BrokerUnderTest, stock_driver_process: StockDriver) -> StartCase:
    """Begins a case on the restartable broker."""

    def start(case: str, **args: object) -> StartedCase:
        topic = f"{case.replace('_', '-')}-{uuid.uuid4().hex[:8]}"
        return stock_driver_process.start(
            case, restartable.url, restartable.admin_url, **{"topic": topic, **args}
        )

    return start


Report = Callable[[str], None]
REPORTED = pytest.StashKey[list[str]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Adds a line to the end of the run's output: what is counted, not judged."""
    return request.config.stash.setdefault(REPORTED, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(REPORTED, [])
    if lines:
        terminalreporter.section("stock client: counted, not judged")
        for line in lines:
            terminalreporter.write_line(line)
