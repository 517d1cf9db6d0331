"""`python -m tests.pipeline.toy_driver JSON`: toy source into toy sink, until all is done."""

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.pipeline.driver import Given, drive
from tests.pipeline.hooked import Hooked
from tests.pipeline.toy import Toy


class HookedToy(Hooked, Toy):
    """Registered as `toy`."""


def start(spark: SparkSession, given: Given) -> StreamingQuery:
    spark.dataSource.register(HookedToy)
    rows = spark.readStream.format("toy").options(rows=given["rows"], total=given["total"]).load()
    return (
        rows.writeStream.format("toy")
        .option("checkpointLocation", given["checkpoint"])
        .option("path", given["sink"])
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    drive(start)
