"""Counts the words of a topic that is split while the query runs.

make run                         # a broker, in another terminal
python examples/wordcount.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import uuid

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, explode, split
from pyspark.sql.streaming import StreamingQuery

import magnetar.sync
import pipeline

SENTENCES = [
    "a segment is split and its children go on where it ended",
    "a query reads the parent to its end and then the children",
    "no word is lost and no word is counted twice",
]
HALF = 300
"""Sentences before the split, and as many after it."""
PATIENCE_S = 300


def publish(url: str, topic: str, first: int) -> int:
    """So many sentences; how many words that are."""
    words = 0
    with magnetar.sync.connect(url) as client, client.producer(topic, schema=str) as producer:
        for number in range(first, first + HALF):
            sentence = SENTENCES[number % len(SENTENCES)]
            producer.send_nowait(sentence, key=f"author-{number % 20}")
            words += len(sentence.split())
        producer.flush()
    return words


def magnetar_topics(admin_url: str, *arguments: str) -> None:
    """`magnetar topics ...`"""
    command = [sys.executable, "-m", "broker.cli.main", "topics", *arguments]
    subprocess.run([*command, "--admin-url", admin_url], check=True)


def counted(spark: SparkSession) -> int:
    """Words that the query has counted so far."""
    return spark.sql("SELECT coalesce(sum(count), 0) FROM words").first()[0]


def wait_for(spark: SparkSession, query: StreamingQuery, words: int) -> None:
    """Until so many are counted."""
    deadline = time.monotonic() + PATIENCE_S
    while counted(spark) < words:
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > deadline:
            sys.exit(f"{counted(spark)} of {words} words were counted in {PATIENCE_S} s")
        time.sleep(0.5)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="pulsar://127.0.0.1:6650")
    parser.add_argument("--admin-url", default="http://127.0.0.1:8080")
    given = parser.parse_args()
    topic = f"topic://public/default/sentences-{uuid.uuid4().hex[:8]}"
    magnetar_topics(given.admin_url, "create", topic)

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    pipeline.register(spark)
    sentences = spark.readStream.format("pulsar5").options(serviceUrl=given.url, topic=topic).load()
    words = sentences.select(explode(split(col("value").cast("string"), " ")).alias("word"))
    with tempfile.TemporaryDirectory() as checkpoint:
        query = (
            words.groupBy("word")
            .count()
            .writeStream.format("memory")
            .queryName("words")
            .outputMode("complete")
            .option("checkpointLocation", checkpoint)
            .start()
        )
        before = publish(given.url, topic, 0)
        wait_for(spark, query, before)
        magnetar_topics(given.admin_url, "split", topic, "0")
        everything = before + publish(given.url, topic, HALF)
        wait_for(spark, query, everything)
        query.stop()
    spark.sql("SELECT * FROM words ORDER BY count DESC, word").show(10)
    print(f"{counted(spark)} of {everything} words were counted, each once.")
    spark.stop()


if __name__ == "__main__":
    main()
