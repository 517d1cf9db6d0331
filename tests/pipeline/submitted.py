"""Given to `spark-submit` by a test: what is there in a task, and rows written by the sink.

It says what it found in one line of JSON.  Its arguments: service URL, topic, transaction key.
"""

import json
import sys
from collections.abc import Iterable, Iterator

from pyspark.sql import SparkSession

import magnetar.spark

ROWS = 200


def found_in_a_task(_rows: Iterable[int]) -> Iterator[dict[str, object]]:
    import google.protobuf.internal.api_implementation as protobuf  # noqa: PLC0415

    import magnetar  # noqa: PLC0415
    from magnetar.compression import CompressionType, compress  # noqa: PLC0415

    for kind in (CompressionType.LZ4, CompressionType.ZSTD, CompressionType.SNAPPY):
        compress(kind, b"x")
    yield {"magnetar": magnetar.__file__, "protobuf": protobuf.Type(), "python": sys.executable}


def main() -> None:
    url, topic, key_name = sys.argv[1:]
    spark = SparkSession.builder.getOrCreate()
    (found,) = spark.sparkContext.parallelize([1], 1).mapPartitions(found_in_a_task).collect()
    magnetar.spark.register(spark)
    key = magnetar.spark.open_key(url, key_name)
    rows = spark.range(ROWS).selectExpr(
        "concat('k', id % 10) AS key", "encode(cast(id AS string), 'utf-8') AS value"
    )
    rows.write.format("pulsar5").mode("append").options(
        serviceUrl=url, topic=topic, txnKey=key_name, txnEpoch=key.epoch
    ).save()
    print(json.dumps({"driver": magnetar.spark.__file__, **found}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
