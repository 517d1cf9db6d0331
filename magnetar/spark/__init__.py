"""Spark through PySpark: a source, an exactly-once sink, and the jobs that use them.

    magnetar.spark.register(spark)
    key = magnetar.spark.open_key("pulsar://host:6650", "orders-to-bills")

`register` alone loads Spark, and the modules for keys are loaded when a key is first used.  So the
commands can say what is missing where Spark is not installed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # `magnetar.spark` can be imported without pyspark.
    from pyspark.sql import SparkSession

    from magnetar.spark.keys import OpenedKey, open_key
else:

    def __getattr__(name: str) -> object:
        if name not in ("OpenedKey", "open_key"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from magnetar.spark import keys

        return getattr(keys, name)


__all__ = ["OpenedKey", "open_key", "register"]


def register(spark: "SparkSession") -> None:
    """Make the format `pulsar5` known to a session."""
    from magnetar.spark import data_source

    data_source.register(spark)
