"""`python -m tests.pipeline.kill.replay_driver JSON`: the command `replay`, with hooks.

The job is run as the command runs it; its processes pass the points of `hooks`.
"""

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import magnetar.spark
from magnetar.spark.errors import PipelineError
from magnetar.spark.options import Connection
from magnetar.spark.progress import Progress
from magnetar.spark.replay.job import Speed, replay
from magnetar.spark.replay.request import Replay
from tests.pipeline import spark_session
from tests.pipeline.driver import FAILED, RUNNING, Given
from tests.pipeline.kill.copy_driver import HookedPulsar5

UNFINISHED = 3


def registered(spark: SparkSession) -> None:
    """In place of `magnetar.spark.register`."""
    spark.dataSource.register(HookedPulsar5)


def main() -> int:
    given: Given = json.loads(sys.argv[1])
    magnetar.spark.register = registered
    asked = Replay(given["source"], given["sink"], where=given["where"], select=(given["select"],))
    with (
        spark_session.running(Path(given["directory"]), given.get("java")) as spark,
        Progress("Replay") as progress,
    ):
        print(RUNNING, flush=True)
        try:
            speed = Speed(given["rows"], given.get("rows_per_second"))
            outcome = replay(
                spark, Connection(given["url"]), asked, given["checkpoint"], speed, progress
            )
        except PipelineError as error:
            print(f"driver: {error}", flush=True)
            return FAILED
    print(outcome.sentence(), flush=True)
    return 0 if outcome.finished else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
