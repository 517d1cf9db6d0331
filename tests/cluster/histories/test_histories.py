"""Histories on three brokers over ZooKeeper and bookies, with and without faults, by two clients.

All workloads of `workloads.py` run beside each other; what comes of them is judged by `checker.py`.
`make histories` runs more transactions and every fault again and again, in an order that is drawn.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from tests.cluster.conftest import METADATA, empty_metadata_store, three_brokers
from tests.cluster.faults import FAULTS, RESHAPES, Site, is_possible
from tests.cluster.histories.sessions import OurSession, Session, TheirSession
from tests.cluster.histories.stall import describe
from tests.cluster.histories.workloads import Stage, name_of, run
from tests.conftest import Report
from tests.java.stock_driver import StockDriver
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.effort import Effort, by_effort, chosen_effort, draw_seed

TRANSACTIONS: Final = int(
    os.environ.get("MAGNETAR_TEST_TRANSACTIONS", by_effort(quick=500, whole=500, nightly=10_000))
)
"""That commit, in all tests together."""
TROUBLES: Final = {**FAULTS, **RESHAPES}
CHOSEN: Final = {
    "ours": ("split", "kill-owner", "pause-owner", "merge", "restart-metadata-store"),
    "java": ("split", "kill-coordinator", "merge", "kill-bookie"),
}
"""Of `TROUBLES`, where there is no time for all."""
ORDERED_RELAYS: Final = {"ours": 2, "java": 1}
"""The official client drops an acknowledgement, in a transaction too and without a word, when its
segment has gone to another consumer: docs/differences.md."""
RUNS: Final = 2 * len(CHOSEN)
BETWEEN: Final = 20
"""So many transactions commit between two faults."""
GOING_ON_S: Final = 60.0
"""So long that may take."""
THREADS: Final = 32
"""For calls of the Java client: each actor may wait in one."""
POLL_S: Final = 0.05
SEGMENTS: Final = (3, 2, 2, 2)
"""Of the topics of a stage."""
EXAMPLES: Final = 10
TIMEOUT_S: Final = by_effort(quick=300, whole=300, nightly=3600)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(TIMEOUT_S, func_only=True)]


@pytest.fixture(scope="module", params=METADATA)
def brokers(
    request: pytest.FixtureRequest, ground: Ground, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerCluster]:
    """Three brokers for all tests here."""
    url = empty_metadata_store(request.param, ground)
    with three_brokers(tmp_path_factory.mktemp("brokers"), ground, url) as cluster:
        yield cluster


OpenSession = Callable[[], Awaitable[Session]]


@pytest.fixture(params=CHOSEN)
def client(request: pytest.FixtureRequest) -> str:
    """Whose client it is."""
    return str(request.param)


@pytest.fixture
def open_session(
    client: str, brokers: BrokerCluster, request: pytest.FixtureRequest
) -> OpenSession:
    """Opens sessions of that client."""
    if client == "ours":
        return lambda: OurSession.open(brokers.url)
    driver: StockDriver = request.getfixturevalue("driver")
    return lambda: TheirSession.open(driver, brokers.url, brokers.admin_url)


class Run:
    """Histories of a share of the transactions, made in a thread of their own.

    What a test starts dies with the thread that has started it, so faults are done by the test's.
    """

    def __init__(self, brokers: BrokerCluster, client: str, open_session: OpenSession) -> None:
        self.brokers = brokers
        self.seed = draw_seed()
        self.stage = Stage.named(
            f"h-{uuid.uuid4().hex[:8]}",
            wanted=-(-TRANSACTIONS // RUNS),
            ordered_relays=ORDERED_RELAYS[client],
            seed=self.seed,
        )
        self.stage.troubled = True
        self.stage.stalled = self._tell_what_stands
        self._open_session = open_session
        self._began = time.monotonic()
        self._pool = ThreadPoolExecutor(1)
        self._made = self._pool.submit(asyncio.run, self._make())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self.stage.troubled = False
        if failed is not None:
            self.stage.wanted = 0
        self._pool.shutdown()

    async def _make(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
        for topic, segments in zip(self.stage.topics, SEGMENTS, strict=True):
            await create(self.brokers.brokers[0], topic.topic, segments)
        await run(self.stage, self._open_session, lambda: OurSession.open(self.brokers.url))

    async def _tell_what_stands(self) -> None:
        topics = [each.topic for each in self.stage.topics]
        print(f"nothing moves, seed {self.seed}:", await describe(self.brokers, topics), sep="\n")

    def goes_on(self) -> None:
        """Wait until some more transactions have committed."""
        until_there_are = self.stage.committed + BETWEEN
        deadline = time.monotonic() + GOING_ON_S
        while self.stage.committed < until_there_are:
            if self._made.done():
                self._made.result()
            if time.monotonic() >= deadline:
                asyncio.run(self._tell_what_stands())
                pytest.fail(f"nothing commits: {self.stage.outcomes()}")
            time.sleep(POLL_S)

    def judge(self, report: Report, what: str) -> None:
        """Wait for the end; nothing that must not be is in the histories."""
        self.stage.troubled = False
        self._made.result()
        made_s = time.monotonic() - self._began
        anomalies = self.stage.anomalies()
        ends = ", ".join(f"{count} {end.value}" for end, count in self.stage.outcomes().items())
        report(f"histories, {what}, seed {self.seed}: {ends}, in {made_s:.0f} s")
        assert not anomalies, f"{len(anomalies)} anomalies:\n" + "\n".join(anomalies[:EXAMPLES])
        assert self.stage.committed >= self.stage.wanted
        assert not self.brokers.faults(), self.brokers.faults()


async def create(broker: BrokerProcess, topic: str, segments: int) -> None:
    """A topic with a subscription that holds everything, for whoever reads from the first on."""
    await broker.create_scalable(topic, segments)
    path = f"/scalable/public/default/{topic}/subscriptions/held"
    status, answer = await broker.rest("PUT", path, type="QUEUE")
    assert status == 204, answer


def test_histories_without_faults_have_no_anomaly(
    brokers: BrokerCluster, open_session: OpenSession, report: Report, client: str
) -> None:
    with Run(brokers, client, open_session) as made:
        made.judge(report, client)


def test_histories_with_faults_have_no_anomaly(
    ground: Ground, brokers: BrokerCluster, open_session: OpenSession, report: Report, client: str
) -> None:
    with Run(brokers, client, open_session) as made:
        topic = name_of(made.stage.lists.topic)
        site = Site(ground, brokers, topic=topic, led=topic)
        made.goes_on()
        for fault in troubles(made.stage, client):
            if is_possible(fault, brokers):
                TROUBLES[fault](site)
                made.goes_on()
        made.judge(report, f"{client}, faults")


def troubles(stage: Stage, client: str) -> Iterator[str]:
    """The chosen ones; at night all, in rounds of an order that is drawn, until enough is done."""
    if chosen_effort() is not Effort.NIGHTLY:
        yield from CHOSEN[client]
        return
    luck = stage.new_luck()
    while True:
        yield from luck.sample(list(TROUBLES), len(TROUBLES))
        if stage.committed >= stage.wanted:
            return
