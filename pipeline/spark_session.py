"""The session that a job runs in.

Rules:

- One that is there already is used, and left; one that is made here is ended.
- Workers are run by the Python that runs the job, for another one may lack what they need.
- Ctrl-C is an interruption like any other and ends the session, which ends its jobs.  PySpark's own
  handler asks for that in the middle of another request, and has it and its failure logged.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["session"]

_ERRORS: Final = ("SQLQueryContextLogger", "py4j")
"""Where every error is written that PySpark raises; commands tell it in a sentence."""

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Has whom spark-submit has started, also where the cluster runs the driver."""


@contextmanager
def session(master: str | None, name: str) -> Iterator[SparkSession]:
    """A session; `master` None: what spark-submit chose, else all cores of this machine."""
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for logger in _ERRORS:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if master is not None:
        builder = builder.master(master)
    elif _SUBMITTED not in os.environ:
        builder = builder.master("local[*,4]")  # A task has four tries, as on a cluster.
    logging.getLogger().addFilter(_not_of_py4j)
    try:
        spark = builder.getOrCreate()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield spark
        finally:
            spark.stop()
    finally:
        logging.getLogger().removeFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """The bridge to the JVM logs requests that were broken off, by the root of all loggers."""
    return record.module != "java_gateway"
