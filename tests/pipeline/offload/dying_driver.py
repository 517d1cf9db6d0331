"""`python -m tests.pipeline.offload.dying_driver JSON`: an offload that is killed at a manifest."""

import json
import os
import signal
import sys
from pathlib import Path

from magnetar.spark.admin import AdminRest
from magnetar.spark.offload import job
from magnetar.spark.offload.place import TablePlace, place_of
from magnetar.spark.options import Connection
from tests.pipeline import spark_session


def die(place: TablePlace, name: str, text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    job.put_text = die
    with spark_session.running(Path(given["directory"])) as spark:
        job.offload(
            spark,
            Connection(given["url"]),
            AdminRest(given["admin_url"]),
            given["topic"],
            place_of(given["to"]),
            drop=True,
            file_bytes=given["file_bytes"],
        )
