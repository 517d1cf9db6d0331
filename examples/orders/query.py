"""The driver: orders become enriched orders, and these become totals, exactly once.

It reads the topic orders, writes orders-enriched and orders-totals, and ends when all is done.
Started again, after its end or after its death, it goes on.

    python examples/orders/query.py --checkpoints /tmp/orders
"""

import argparse
import os
import sys

from access import access
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

import magnetar.spark

SETTINGS, OPTIONS = access()
CUSTOMERS = [(f"customer-{number}", ("Graz", "Linz", "Wien")[number % 3]) for number in range(10)]


def source(spark: SparkSession, url: str, topic: str, columns: str) -> DataFrame:
    """The JSON values of a topic, as columns."""
    rows = (
        spark.readStream.format("pulsar5")
        .options(serviceUrl=url, topic=topic, maxRowsPerTrigger=100, **OPTIONS)
        .load()
    )
    parsed = rows.select(f.from_json(f.col("value").cast("string"), columns).alias("parsed"))
    return parsed.select("parsed.*")


def as_rows(table: DataFrame) -> DataFrame:
    """Key and value for the sink: the customer is the key, which keeps its rows in order."""
    return table.select(f.col("customer").alias("key"), f.to_json(f.struct("*")).alias("value"))


def start_rows(table: DataFrame, url: str, topic: str, checkpoints: str) -> StreamingQuery:
    """Write new rows into a topic, exactly once: the key is opened before every start."""
    name = "to-" + topic.rpartition("/")[2]
    key = magnetar.spark.open_key(url, name, **SETTINGS)
    return (
        as_rows(table)
        .writeStream.format("pulsar5")
        .options(**key.options)
        .options(serviceUrl=url, topic=topic, **OPTIONS)
        .option("checkpointLocation", f"{checkpoints}/{name}")
        .trigger(availableNow=True)
        .start()
    )


def start_updates(table: DataFrame, url: str, topic: str, checkpoints: str) -> StreamingQuery:
    """Write the totals that each batch has changed, exactly once.

    Spark gives sinks in Python new rows only, so each batch is a job by itself, whose `jobId` names
    its query and batch: one that comes again is recognised by it, and written once.
    """
    name = "to-" + topic.rpartition("/")[2]
    key = magnetar.spark.open_key(url, name, **SETTINGS)

    def write(changed: DataFrame, batch: int) -> None:
        query = changed.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        (
            as_rows(changed)
            .write.format("pulsar5")
            .mode("append")
            .options(**key.options)
            .options(serviceUrl=url, topic=topic, jobId=f"{query}-{batch}", **OPTIONS)
            .save()
        )

    return (
        table.writeStream.foreachBatch(write)
        .outputMode("update")
        .option("checkpointLocation", f"{checkpoints}/{name}")
        .trigger(availableNow=True)
        .start()
    )


def main() -> None:
    """Run both queries, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get("MAGNETAR_URL", "pulsar://127.0.0.1:6650"))
    parser.add_argument("--orders", default="topic://public/default/orders")
    parser.add_argument("--checkpoints", required=True)
    given = parser.parse_args()
    enriched_topic, totals_topic = f"{given.orders}-enriched", f"{given.orders}-totals"

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    magnetar.spark.register(spark)

    customers = spark.createDataFrame(CUSTOMERS, "customer string, city string")
    orders = source(spark, given.url, given.orders, "number int, customer string, cents int")
    enriched = orders.join(customers, "customer")
    start_rows(enriched, given.url, enriched_topic, given.checkpoints).awaitTermination()

    sold = source(
        spark, given.url, enriched_topic, "number int, customer string, cents int, city string"
    )
    totals = sold.groupBy("customer", "city").agg(f.sum("cents").alias("cents"))
    start_updates(totals, given.url, totals_topic, given.checkpoints).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
