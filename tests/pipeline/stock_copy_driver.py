"""`python -m tests.pipeline.stock_copy_driver JSON`: topic to topic, with a key in a state topic.

One task, one transaction for each batch; else as `kill/copy_driver.py`.
"""

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import magnetar.spark
from tests.pipeline.driver import Given, drive
from tests.pipeline.kill.copy_driver import HookedPulsar5


def start(spark: SparkSession, given: Given) -> StreamingQuery:
    spark.dataSource.register(HookedPulsar5)
    key = magnetar.spark.open_key(given["url"], given["key"], state_topic=given["state"])
    rows = (
        spark.readStream.format("pulsar5")
        .options(serviceUrl=given["url"], topic=given["source"])
        .load()
        .selectExpr("key", "value")
    )
    return (
        rows.coalesce(1)
        .writeStream.format("pulsar5")
        .options(**key.options)
        .options(serviceUrl=given["url"], topic=given["sink"])
        .options(txnTimeoutMs=given["timeout_ms"], checkpointLocation=given["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    drive(start)
