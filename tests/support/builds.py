"""`python -m tests.support.builds`: what tests need and is built once, before they are timed.

Where a tool is missing, what it builds is left out: the tests that need it say so.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from tests.interop.go_client import build_go_client
from tests.java import stock_driver
from tests.pipeline import quick_spark
from tests.servers.java_parts import resolve_jars
from tests.servers.oxia_part import build_oxia
from tests.support.tools import missing_go, missing_java

FAILED: Final = "FAILED"


def main() -> int:
    failed = False
    java, go = missing_java(), missing_go()
    for what, build, missing in (
        ("the official Java client's driver", stock_driver.build, java),
        ("jars of ZooKeeper and BookKeeper", resolve_jars, java),
        ("Spark's home", quick_spark.ready, java),
        ("the Oxia server", build_oxia, go),
        ("the Go client's program", build_go_client, go),
    ):
        result = missing or result_of(build)
        failed = failed or result.startswith(FAILED)
        print(f"{what}: {result}", flush=True)
    return int(failed)


def result_of(build: Callable[[], object]) -> str:
    """How long the build took, or why it failed.  The other builds go on."""
    began_s = time.monotonic()
    try:
        build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{FAILED}: {error}"
    return f"{time.monotonic() - began_s:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
