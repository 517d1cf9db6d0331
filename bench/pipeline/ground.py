"""What all measurements of the pipeline stand on: a broker, a session, topics and rows.

Rules: one broker and one session (`local[2,4]`, 1 GiB) for all; a sink writes to a topic of its own
each time; rows have one of `KEYS` keys.
"""

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

import magnetar.spark
from bench.measures import create_topic
from bench.pipeline.readers import BenchReaders
from magnetar.spark.admin import AdminRest
from tests.java.broker_under_test import BrokerUnderTest
from tests.support.broker_process import ROOT
from tests.support.child_process import HOST

SCALABLE: Final = "topic://public/default/"
REST: Final = "/admin/v2/scalable/public/default"
KEYS: Final = 1000


@dataclass(frozen=True)
class Ground:
    """A broker and a session."""

    spark: SparkSession
    broker: BrokerUnderTest

    @property
    def url(self) -> str:
        """Of the broker."""
        return self.broker.url

    def new_topic(self, segments: int) -> str:
        """An empty one."""
        name = f"bench-{uuid.uuid4().hex[:8]}"
        create_topic(self.broker, name, segments)
        return SCALABLE + name

    @contextmanager
    def topic(self, segments: int) -> Iterator[str]:
        """An empty one that is deleted afterwards."""
        topic = self.new_topic(segments)
        yield topic
        AdminRest(self.broker.admin_url).call("DELETE", f"{REST}/{local(topic)}?force=true", {})

    def reshape(self, topic: str, step: str) -> None:
        """`step`: `split/ID` or `merge/ID/ID`."""
        AdminRest(self.broker.admin_url).call("POST", f"{REST}/{local(topic)}/{step}", {})

    def generated(self, rows: int, size: int) -> DataFrame:
        """Rows of `size` bytes that Spark makes, in two partitions."""
        return self.spark.range(rows, numPartitions=2).selectExpr(*row_of("id", size))

    def stream(self, topic: str, **options: str) -> DataFrame:
        """A topic's keys and values, as they come."""
        reader = self.spark.readStream.format("pulsar5").schema("key string, value binary")
        return reader.options(serviceUrl=self.url, topic=topic, **options).load()

    def sink(self, rows: DataFrame, topic: str, **options: str) -> None:
        """Write rows to a topic."""
        writer = rows.write.format("pulsar5").mode("append")
        writer.options(serviceUrl=self.url, topic=topic, **options).save()

    def key(self, topic: str) -> dict[str, str]:
        """The options of a transaction key of the topic's own, opened."""
        return dict(magnetar.spark.open_key(self.url, local(topic)).options)


def row_of(number: str, size: int) -> tuple[str, str]:
    """Key and value, in SQL, of the row that the column `number` counts."""
    value = f"rpad(cast({number} AS string), {size}, 'x')"
    return f"concat('k', {number} % {KEYS}) AS key", f"cast({value} AS binary) AS value"


def local(topic: str) -> str:
    """A topic's name in its namespace."""
    return topic.rpartition("/")[2]


def session(directory: Path) -> SparkSession:
    """Spark as it is measured; silent, for a stream that is stopped in a batch would fill pages."""
    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT), SPARK_LOCAL_IP=HOST)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.host", HOST)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(directory))
        .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
        .config("spark.log.level", "OFF")
        .getOrCreate()
    )
    magnetar.spark.register(spark)
    spark.dataSource.register(BenchReaders)
    return spark
