"""What the scripts have in common that tests run as drivers of their own.

Rules: the only argument is JSON, `directory` in it is the script's own; one line of standard output
says that the query runs, the exit status how it ended: 0 well, 1 the query failed.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.pipeline import spark_session

RUNNING: Final = "driver: the query runs"
FAILED: Final = 1
Given = dict[str, Any]


def drive(start: Callable[[SparkSession, Given], StreamingQuery]) -> None:
    """Start the query in a session, wait for its end, and end the process."""
    given: Given = json.loads(sys.argv[1])
    with spark_session.running(Path(given["directory"]), given.get("java")) as spark:
        query = start(spark, given)
        print(RUNNING, flush=True)
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            print(f"driver: {error}", flush=True)
            sys.exit(FAILED)
