"""The session of Spark that a job runs in."""

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
"""Loggers that print every error of PySpark; commands print a sentence instead."""

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""The environment variable that spark-submit sets, also where the cluster runs the driver."""


@contextmanager
def session(master: str | None, name: str) -> Iterator[SparkSession]:
    """The active session, or a new one that ends with the block.

    `master` None: the one that spark-submit chose, else all cores of this machine.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # Workers run by the Python of the job: another one may lack the libraries.
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
            # PySpark's own handler cancels jobs in the middle of another request to the JVM, and
            # logs that and its failure.  Here Ctrl-C ends the session, which ends its jobs.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield spark
        finally:
            spark.stop()
    finally:
        logging.getLogger().removeFilter(_not_of_py4j)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    """Whether a record is not of Py4J, which logs interrupted requests by the root logger."""
    return record.module != "java_gateway"
