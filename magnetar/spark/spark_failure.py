"""The error of ours in Spark's report of a failure.

Spark puts the traces of several processes around an error of ours.  Our errors are recognised by
their module; the last one named is the cause nearest to the work.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from magnetar.spark.errors import PipelineError

__all__ = ["JobFailed", "query_failed", "explain_spark_failure", "sentence_in"]

_OURS: Final = re.compile(r"^\s*magnetar(?:\.\w+)*\.\w+: (.+)$", re.MULTILINE)
_LACKING: Final = re.compile(
    r"No module named '(?P<module>[\w.]+)'|PYTHON_VERSION_MISMATCH|(?P<lost>worker .*connect back)"
)
LONGEST: Final = 1000
_NO_JAVA: Final = "JAVA_GATEWAY_EXITED"


class JobFailed(PipelineError):
    """Spark gave a job up; rows that were not committed are not visible."""


def sentence_in(text: str) -> str:
    """The sentence of our own error in a text; else the first line of Spark's."""
    found: list[str] = _OURS.findall(text)
    if found:
        return found[-1].strip()
    lacking = _LACKING.search(text)
    if lacking is None:
        return text.strip().partition("\n")[0][:LONGEST]
    if lacking["lost"]:
        return (
            "A Python process of Spark did not connect to its JVM, on the same machine, within "
            "10 s. Check that PYSPARK_PYTHON has the version of this Python and what "
            "deploy/spark/requirements-jobs.txt lists, that no firewall blocks connections to "
            "127.0.0.1, and that the machine is not overloaded; docs/spark.md has more."
        )
    what = f"no {lacking['module']}" if lacking["module"] else "another version"
    return (
        f"A Python that Spark runs has {what}. Set PYSPARK_PYTHON to one that has the version of "
        "this one, and what deploy/spark/requirements-jobs.txt lists, on every machine."
    )


def query_failed(error: Exception) -> JobFailed:
    """The failure of a streaming query, as an error of this package."""
    return JobFailed(
        f"The job has failed: {sentence_in(str(error))} What was committed stays; run the same "
        "command again to go on."
    )


@contextmanager
def explain_spark_failure() -> Iterator[None]:
    """Turn errors that Spark raises in the block into `JobFailed` with a sentence."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        if isinstance(error, PySparkException) and error.getCondition() == _NO_JAVA:
            raise JobFailed(
                "Spark has not started; its own message is above. It needs Java 17 or newer, as "
                "java on the path or in JAVA_HOME; --master is like local[4] or spark://host:7077."
            ) from error
        raise JobFailed(
            f"The job has failed: {sentence_in(str(error))} Run the same command again."
        ) from error
