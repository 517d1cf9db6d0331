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
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.functions import col, explode, split
from pyspark.sql.streaming.query import StreamingQuery

import magnetar.spark
import magnetar.sync
from magnetar.settings import ClientOptions

SENTENCES = [
    "a segment is split and its children go on where it ended",
    "a query reads the parent to its end and then the children",
    "no word is lost and no word is counted twice",
]
HALF = 300
"""Number of sentences before the split, and after it."""
PATIENCE_S = 300


def access() -> tuple[ClientOptions, dict[str, str]]:
    """The authorities to trust and the token: for `magnetar.connect`, and as options of Spark."""
    settings, options = ClientOptions(), dict[str, str]()
    if trust := os.environ.get("MAGNETAR_TLS_TRUST_FILE"):
        settings["tls_trust_file"] = options["tlsTrustFile"] = trust
    if token := os.environ.get("MAGNETAR_TOKEN_FILE"):
        settings["token"] = Path(token).absolute().as_uri()
        options["tokenFile"] = token
    return settings, options


SETTINGS, OPTIONS = access()


def publish(url: str, topic: str, first: int) -> int:
    """Publish `HALF` sentences; returns the number of their words."""
    words = 0
    with (
        magnetar.sync.connect(url, **SETTINGS) as client,
        client.producer(topic, schema=str) as producer,
    ):
        for number in range(first, first + HALF):
            sentence = SENTENCES[number % len(SENTENCES)]
            producer.send_nowait(sentence, key=f"author-{number % 20}")
            words += len(sentence.split())
        producer.flush()
    return words


def magnetar_topics(admin_url: str, *arguments: str) -> None:
    """Run `magnetar topics ...`, a command of magnetar-broker."""
    command = [sys.executable, "-m", "magnetar.cli.main", "topics", *arguments]
    subprocess.run([*command, "--admin-url", admin_url], check=True)


def counted(spark: SparkSession) -> int:
    """The number of words that the query has counted so far."""
    row = spark.sql("SELECT coalesce(sum(count), 0) FROM words").first()
    assert row is not None, "a sum is one row"
    return int(row[0])


def wait_for(spark: SparkSession, query: StreamingQuery, words: int) -> None:
    """Wait until the query has counted so many words."""
    deadline = time.monotonic() + PATIENCE_S
    while counted(spark) < words:
        error = query.exception()
        if error is not None:
            raise error
        if time.monotonic() > deadline:
            sys.exit(f"{counted(spark)} of {words} words were counted in {PATIENCE_S} s")
        time.sleep(0.5)


def main() -> None:
    """Publish, split the topic, publish again, and compare the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get("MAGNETAR_URL", "pulsar://127.0.0.1:6650"))
    admin_url = os.environ.get("MAGNETAR_ADMIN_URL", "http://127.0.0.1:8080")
    parser.add_argument("--admin-url", default=admin_url)
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
    magnetar.spark.register(spark)
    options = {"serviceUrl": given.url, "topic": topic, **OPTIONS}
    sentences = spark.readStream.format("pulsar5").options(**options).load()
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
