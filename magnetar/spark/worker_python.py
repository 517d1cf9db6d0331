"""Checks, before a query starts, whether the Pythons of Spark's workers can run the format.

It checks the Python that plans and commits, which the JVM starts on this machine, and the one of
tasks, if they run on this machine (`local`).
"""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

__all__ = ["pythons_of", "shortcoming", "warn_of_pythons"]

OURS: Final = ("magnetar",)
LIBRARIES: Final = (*OURS, "pyarrow")
ASK_TIMEOUT_S: Final = 5.0
_ASK: Final = (
    "import sys, importlib.util as u; "
    "print(*sys.version_info[:2], *(n for n in sys.argv[1:] if u.find_spec(n) is None))"
)


def warn_of_pythons(spark: SparkSession) -> None:
    """Warn once for each Python that cannot run the format."""
    for name, libraries in pythons_of(spark).items():
        why = shortcoming(name, libraries)
        if why is not None:
            warnings.warn(
                f"Spark runs the format pulsar5 by the Python {name}, which {why}. Set "
                f"PYSPARK_PYTHON={sys.executable}, or another Python that has this one's version "
                "and libraries, in the environment before the session is made, and leave "
                "PYSPARK_DRIVER_PYTHON out or set it alike.",
                RuntimeWarning,
                stacklevel=4,  # The caller of `magnetar.spark.register`.
            )


def shortcoming(name: str, libraries: Sequence[str] = LIBRARIES) -> str | None:
    """Why a Python cannot run the format; None if it can, or if that is not known."""
    path = shutil.which(name)
    if path is None:
        return "is not there"
    here = Path(sys.executable)
    if Path(path).absolute().parent == here.absolute().parent and Path(path).samefile(here):
        return None
    # Some 40 ms: it prints its version and the libraries that it cannot find, and imports none.
    try:
        answer = subprocess.run(
            [path, "-c", _ASK, *libraries],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    major, minor, *missing = answer.stdout.split() or ("", "")
    if answer.returncode or not (major.isdecimal() and minor.isdecimal()):
        return "is no Python"
    mine = sys.version_info[:2]
    if (int(major), int(minor)) != mine:
        return f"is of version {major}.{minor}, where this process is of {mine[0]}.{mine[1]}"
    return f"has no {', no '.join(missing)}" if missing else None


def pythons_of(spark: SparkSession) -> dict[str, Sequence[str]]:
    """The Pythons that Spark runs on this machine, each with the libraries that it needs."""
    try:
        context = spark.sparkContext
        jvm, master = context._jvm, context.master  # Only the JVM knows the Python that it starts.
        if jvm is None or master is None:
            return {}
        utils = getattr(jvm.org.apache.spark.api.python, "PythonUtils$")
        planning = str(getattr(utils, "MODULE$").defaultPythonExec())
    except Exception:  # noqa: BLE001 - Spark Connect has none of it, and this is advice alone
        return {}
    # Spark puts the files of --py-files on the path of the processes that it starts.
    given = context.getConf().get("spark.submit.pyFiles", "")
    libraries = tuple(each for each in LIBRARIES if not (given and each in OURS))
    found: dict[str, Sequence[str]] = {planning: libraries}
    if master.partition("[")[0] == "local":
        found[context.pythonExec] = libraries
    return found
