"""`python -m tests.pipeline.kill.copy_driver JSON`: a topic to a topic, exactly once.

As a user's script does it, save that the processes pass the points of `hooks`: the key is opened,
then the query starts, which reads what there is and ends.  `start` in the JSON is where a query
without checkpoint begins, `"last"` the positions that were committed last.
"""

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import magnetar.spark
from magnetar.spark.data_source import Pulsar5
from tests.pipeline.driver import Given, drive
from tests.pipeline.hooked import Hooked


class HookedPulsar5(Hooked, Pulsar5):
    """Registered as `pulsar5`."""


def start(spark: SparkSession, given: Given) -> StreamingQuery:
    spark.dataSource.register(HookedPulsar5)
    key = magnetar.spark.open_key(given["url"], given["key"])
    connection = {
        "serviceUrl": given["url"],
        "operationTimeoutMs": given["operation_timeout_ms"],
    }
    start = key.source_options if given["start"] == "last" else {"start": given["start"]}
    rows = (
        spark.readStream.format("pulsar5")
        .options(**connection, topic=given["source"], **start)
        .options(maxRowsPerTrigger=given["rows"], failOnDataLoss=given["fail_on_data_loss"])
        .load()
    )
    copies = rows.selectExpr("key", "concat('copy of ', decode(value, 'utf-8')) AS value")
    return (
        copies.writeStream.format("pulsar5")
        .options(**connection, **key.options)
        .options(topic=given["sink"], trackPositions="true")
        .options(txnTimeoutMs=given["timeout_ms"], checkpointLocation=given["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )


if __name__ == "__main__":
    drive(start)
