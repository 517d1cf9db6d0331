"""Spark as the tests run it: in this process and its children, on 127.0.0.1, in one directory.

Rules: two cores, and four tries of a task (`local[n]` alone means one try, whatever is set); no
user interface, and no generated code, which takes longer to compile than tests run; everything
that it writes is in the directory given, its log in `spark.log` there.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from tests.pipeline import quick_spark
from tests.support.broker_process import ROOT
from tests.support.child_process import HOST, LOG_TAIL, ChildFailed

LOGGING: Final = Path(__file__).with_name("log4j2.properties")
LOG: Final = "spark.log"
JVM_OUTPUT: Final = "jvm-output.log"
"""What the JVM prints itself, and what processes print that it starts."""
MASTER: Final = "local[2,4]"
HEAP: Final = "1g"
SHUFFLE_PARTITIONS: Final = 2


def environment() -> dict[str, str]:
    """What the processes of Spark are told: this Python, these modules, this address."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "SPARK_HOME": str(quick_spark.home()),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def settings(directory: Path, java_options: Sequence[str]) -> dict[str, str]:
    """Of a session whose files are in this directory."""
    java = (
        *java_options,
        f"-Dlog4j2.configurationFile={LOGGING.as_uri()}",
        f"-Dmagnetar.test.log={directory / LOG}",
        f"-Djava.io.tmpdir={directory}",
        f"-Dderby.system.home={directory}",
    )
    return {
        "spark.master": MASTER,
        "spark.driver.memory": HEAP,
        "spark.driver.host": HOST,
        "spark.driver.bindAddress": HOST,
        "spark.driver.extraJavaOptions": " ".join(java),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.python.filterPushdown.enabled": "true",
    }


def start_context(directory: Path, given: Mapping[str, str]) -> SparkContext:
    """Spark with these settings; what its JVM prints goes to `JVM_OUTPUT` in the directory.

    Raises ChildFailed with that output if the JVM ends at its start: pyspark says only that it did.
    """
    conf = SparkConf().setAppName(directory.name).setAll(list(given.items()))
    output = directory / JVM_OUTPUT
    with output.open("ab") as file:
        try:
            gateway = launch_gateway(  # type: ignore[no-untyped-call]
                conf, {"stdout": file, "stderr": subprocess.STDOUT}
            )
        except PySparkRuntimeError as error:
            printed = output.read_text("utf-8", "replace")[-LOG_TAIL:] or "(nothing)"
            raise ChildFailed(f"Spark's JVM does not start; it printed:\n{printed}") from error
    return SparkContext(conf=conf, gateway=gateway)


@contextmanager
def running(directory: Path, java_options: Sequence[str] | None = None) -> Iterator[SparkSession]:
    """A session, which has ended afterwards with all that it started."""
    if java_options is None:
        java_options = quick_spark.java_options()
    directory.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment())
    context = start_context(directory, settings(directory, java_options))
    gateway = context._gateway
    session = SparkSession(context)
    try:
        yield session
    finally:
        session.stop()
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait()
