"""The session that a job runs in.

Rules: one that is there already is used, and left; one that is made here is ended.  Workers are run
by the Python that runs the job, for another one may lack what they need.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["session"]

_ERRORS: Final = "SQLQueryContextLogger"
"""Where PySpark writes every error that it raises; commands tell it in a sentence."""

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
    logging.getLogger(_ERRORS).setLevel(logging.CRITICAL)
    builder = SparkSession.builder.appName(name).config("spark.sql.session.timeZone", "UTC")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    if master is not None:
        builder = builder.master(master)
    elif _SUBMITTED not in os.environ:
        builder = builder.master("local[*,4]")  # A task has four tries, as on a cluster.
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
