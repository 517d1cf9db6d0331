"""Queries into the sink that tests have in common: the counting source, into a topic."""

from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import pipeline
from tests.pipeline.rows import Pair
from tests.pipeline.toy import KEYS, Toy


def expected(total: int) -> list[Pair]:
    """Key and value of each row of the counting source, in order."""
    return [(f"k{number % KEYS}", b"%d" % number) for number in range(total)]


def counted(spark: SparkSession, *, rows: int, total: int) -> DataFrame:
    """The counting source as a stream of key and value, `rows` in a batch."""
    spark.dataSource.register(Toy)
    toy = spark.readStream.format("toy").options(rows=rows, total=total).load()
    return toy.selectExpr("key", "CAST(number AS STRING) AS value")


def started(
    frame: DataFrame, options: Mapping[str, object], checkpoint: Path | str
) -> StreamingQuery:
    """Into the sink, until all is done."""
    pipeline.register(frame.sparkSession)
    return (
        frame.writeStream.format("pulsar5")
        .options(**{name: str(value) for name, value in options.items()})
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
