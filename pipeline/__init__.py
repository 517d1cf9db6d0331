"""Spark through PySpark: a source, an exactly-once sink, and the jobs that stand on them.

    pipeline.register(spark)
    key = pipeline.open_key("pulsar://host:6650", "orders-to-bills")

Spark itself is loaded by `register` alone.
"""

from typing import TYPE_CHECKING

from pipeline.keys import OpenedKey, open_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["OpenedKey", "open_key", "register"]


def register(spark: "SparkSession") -> None:
    """Make the format `pulsar5` known to a session."""
    from pipeline import data_source

    data_source.register(spark)
