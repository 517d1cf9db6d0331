"""Fixtures of the stock-client suite: cases of the driver, on the run's broker or one's own."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.clusters import cluster_of
from tests.java.fixtures import STARTED_PEER, serving
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StartedCase, StockDriver
from tests.support.json_line_process import Facts

TEST_TIMEOUT_S = 120
"""Of the test alone: Maven's first build, in a fixture, has a limit of its own."""

BROKERS = {"broker", "restartable", "offloading"}
"""Fixtures of brokers that are a cluster where `--cluster` says so."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.stock)
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S, func_only=True))
    if config.getoption("--cluster", default=None):
        # A test with a broker of its own, which is alone, would only be run again.
        alone = [each for each in ours if not BROKERS & set(getattr(each, "fixturenames", ()))]
        config.hook.pytest_deselected(items=alone)
        items[:] = [each for each in items if each not in alone]


@pytest.fixture
def restartable(
    request: pytest.FixtureRequest, tmp_path: Path, stock_driver_process: StockDriver
) -> Iterator[BrokerUnderTest]:
    """A broker that the test may stop, kill and start again; its parameter are settings."""
    settings: dict[str, object] = getattr(request, "param", {})
    peer = request.config.getoption("--peer", default=None)
    if peer and peer != STARTED_PEER:
        pytest.skip("somebody else runs this peer: it is not restarted")
    if peer:
        # One peer is enough for this machine's memory: all cases share it.
        yield request.getfixturevalue("broker")
        return
    kind = request.config.getoption("--cluster", default=None)
    if kind:
        with cluster_of(kind, request, tmp_path, settings) as cluster:
            yield from serving(cluster)
        return
    process = MagnetarProcess(tmp_path, settings)
    yield from serving(process)


RunCase = Callable[..., Facts]


@pytest.fixture
def run_case(broker: BrokerUnderTest, stock_driver_process: StockDriver) -> RunCase:
    """Runs a case on the run's broker: see `run_on_fresh_topic`."""
    return partial(run_on_fresh_topic, stock_driver_process, broker)


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


@pytest.fixture
def run_v4_case(broker: BrokerUnderTest, v4_driver_process: StockDriver) -> RunCase:
    """Runs a case of the v4 client on the run's broker: see `run_on_fresh_topic`."""
    return partial(run_on_fresh_topic, v4_driver_process, broker)
