"""A query that copies a topic, its drivers to kill, and the audit of what it wrote."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import magnetar
from magnetar.spark.audit.report import Report
from tests.client.conftest import Topic
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.pipeline import rows
from tests.pipeline.conftest import MakeDriver, create_topic
from tests.pipeline.driver_process import DriverProcess
from tests.pipeline.kill.auditing import audit, audit_topic
from tests.pipeline.rows import Pair

COPY = "tests.pipeline.kill.copy_driver"
ROWS = 240
IN_A_BATCH = 80
AT_ONCE = 20
ENTRIES_OF_A_LEDGER = 3
TXN_TIMEOUT_MS = 60_000
OPERATION_TIMEOUT_MS = 30_000


@dataclass
class Copying:
    """Two topics, what was published to the first, and drivers that copy it to the second."""

    service: BrokerUnderTest
    client: magnetar.Client
    source: Topic
    sink: Topic
    make_driver: MakeDriver
    spark: SparkSession
    key: str = field(default_factory=lambda: f"copy-{uuid.uuid4().hex[:8]}")
    published: list[Pair] = field(default_factory=list)

    async def publish(self, count: int = ROWS) -> None:
        """So many rows more."""
        given = rows.pairs(count, first=len(self.published))
        await rows.publish(self.client, self.source.name, given, at_once=AT_ONCE)
        self.published += given

    def driver(self, name: str, **given: object) -> DriverProcess:
        """One that is not started yet; all have one checkpoint unless they are given others."""
        told = {
            "url": self.service.url,
            "source": self.source.name,
            "sink": self.sink.name,
            "key": self.key,
            "start": "earliest",
            "rows": IN_A_BATCH,
            "timeout_ms": TXN_TIMEOUT_MS,
            "fail_on_data_loss": "true",
            "operation_timeout_ms": OPERATION_TIMEOUT_MS,
        }
        return self.make_driver(name, COPY, **(told | given))

    async def audit(self, *, whole: bool, at_rest: bool = True) -> int:
        """How many copies readers see; see `auditing`."""
        sink = self.sink.name
        seen = await audit(self.client, self.published, sink, whole=whole, at_rest=at_rest)
        await self.report(seen, whole=whole)
        return seen

    async def report(self, seen: int, *, whole: bool = True) -> Report:
        """What the audit tells of the sink, of which readers see so many rows."""
        service = self.service
        return await asyncio.to_thread(
            audit_topic,
            self.spark,
            service.url,
            service.admin_url,
            self.sink.name,
            seen=seen,
            whole=whole,
        )

    async def last_batch(self) -> int | None:
        """The last batch that was committed under the key, which is opened for it."""
        async with self.client.transaction_key(self.key) as key:
            return None if key.last_group is None else key.last_group.batch


@pytest.fixture
async def copying(
    service: BrokerUnderTest, client: magnetar.Client, driver: MakeDriver, spark: SparkSession
) -> Copying:
    """Of two segments into two, with rows to copy; on the broker of all tests."""
    return await new_copying(service, client, driver, spark)


@pytest.fixture
async def own_broker(tmp_path: Path) -> AsyncIterator[MagnetarProcess]:
    """One that the test may kill, whose ledgers are short."""
    settings = {"ledger_max_entries": ENTRIES_OF_A_LEDGER, "ledger_min_age_s": 0}
    process = MagnetarProcess(tmp_path / "own-broker", settings)
    await asyncio.to_thread(process.start)
    yield process
    process.kill()


@pytest.fixture
async def copying_alone(
    own_broker: MagnetarProcess, driver: MakeDriver, spark: SparkSession
) -> AsyncIterator[Copying]:
    """As `copying`, on `own_broker`."""
    async with magnetar.connect(own_broker.url) as client:
        yield await new_copying(own_broker, client, driver, spark)


async def new_copying(
    service: BrokerUnderTest,
    client: magnetar.Client,
    driver: MakeDriver,
    spark: SparkSession,
    *,
    into: int = 2,
) -> Copying:
    """Of two segments into so many, with rows to copy."""
    made = Copying(
        service,
        client,
        await create_topic(service, "source", 2),
        await create_topic(service, "sink", into),
        driver,
        spark,
    )
    await made.publish()
    return made
