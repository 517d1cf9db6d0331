"""The official client reads topics whose ledgers were offloaded and deleted."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from broker.cli.rest_client import call
from tests.interop.java_client import JavaClient, told
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.clusters import cluster_of
from tests.java.fixtures import serving
from tests.java.stock_driver import StockDriver

MESSAGES = 200
PATH = "/admin/v2/scalable/public/default/offloaded"


SETTINGS = {
    "offload_deletion_lag_s": -1,
    "entry_cache_bytes": 0,
    "ledger_max_entries": 50,
    "ledger_min_age_s": 0,
}


@pytest.fixture
def offloading(
    request: pytest.FixtureRequest, tmp_path: Path, stock_driver_process: StockDriver, on_peer: bool
) -> Iterator[BrokerUnderTest]:
    if on_peer:
        pytest.skip("Apache Pulsar has no offloader here")
    settings = {**SETTINGS, "offload_url": f"file://{tmp_path}/copies"}
    kind = request.config.getoption("--cluster", default=None)
    if kind:
        with cluster_of(kind, request, tmp_path, settings) as cluster:
            yield from serving(cluster)
    else:
        yield from serving(MagnetarProcess(tmp_path, settings))


def test_java_consumer_reads_offloaded_data(
    offloading: BrokerUnderTest, stock_driver_process: StockDriver
) -> None:
    asyncio.run(offloaded_and_read(offloading, stock_driver_process))


async def offloaded_and_read(broker: BrokerUnderTest, driver: StockDriver) -> None:
    def rest(method: str, path: str) -> object:
        return call(broker.admin_url, method, PATH + path)

    await asyncio.to_thread(rest, "PUT", "?numInitialSegments=1")
    java = JavaClient.start(driver, broker.url, broker.admin_url, transactions=False)
    queue = await java.queue("offloaded", "s")
    producer = await java.producer("offloaded", batching=False)
    values = [b"%d" % number for number in range(MESSAGES)]
    sent = await producer.send(values)
    await producer.close()
    await queue.close()
    await asyncio.to_thread(rest, "POST", "/split/0")
    await asyncio.to_thread(rest, "PUT", "/offload")
    sealed: Mapping[str, object] = {}
    while not sealed or sealed["status"] == "RUNNING":
        answer = await asyncio.to_thread(rest, "GET", "/offload/manifest")
        assert isinstance(answer, dict)
        sealed = answer["segments"]["0"]
    await asyncio.to_thread(rest, "POST", "/offload/dropHot")
    answer = await asyncio.to_thread(rest, "GET", "/offload/manifest")
    assert isinstance(answer, dict)
    ledgers = answer["segments"]["0"]["ledgers"]
    assert all(each["bookkeeperDeleted"] for each in ledgers)
    assert sum(each["entries"] for each in ledgers) == MESSAGES
    again = await java.queue("offloaded", "s")
    received = await again.receive(MESSAGES)
    assert [each.value for each in received] == [told(value) for value in values]
    assert [each.id for each in received] == sent
    java.end()
