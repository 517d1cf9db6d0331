"""Whether the Pythons that Spark will run can do what the format needs, as far as is known before.

Rules:

- Two are asked about: the one that plans and decides, which the JVM starts on this machine, and the
  one of tasks, if they run on this machine (`local`).  What other machines have nobody tells.
- One that is at the same place as this process is not asked.  Another one is run once, for some
  40 ms, and tells its version and which libraries it cannot find; it imports none of them.
- What cannot be learned is not warned of.
"""

import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pythons_of", "shortcoming", "warn_of_pythons"]

OURS: Final = ("magnetar", "pipeline")
LIBRARIES: Final = (*OURS, "pyarrow")
ASK_TIMEOUT_S: Final = 5.0
_ASK: Final = (
    "import sys, importlib.util as u; "
    "print(*sys.version_info[:2], *(n for n in sys.argv[1:] if u.find_spec(n) is None))"
)


def warn_of_pythons(spark: "SparkSession") -> None:
    """Warn, once for each Python that cannot do it."""
    for name, libraries in pythons_of(spark).items():
        why = shortcoming(name, libraries)
        if why is not None:
            warnings.warn(
                f"Spark runs the format pulsar5 by the Python {name}, which {why}. Set "
                f"PYSPARK_PYTHON={sys.executable}, or another Python that has this one's version "
                "and libraries, in the environment before the session is made, and leave "
                "PYSPARK_DRIVER_PYTHON out or set it alike.",
                RuntimeWarning,
                stacklevel=4,  # Whoever has called `pipeline.register`.
            )


def shortcoming(name: str, libraries: Sequence[str] = LIBRARIES) -> str | None:
    """What the Python of that name lacks; None: nothing, or nobody knows."""
    path = shutil.which(name)
    if path is None:
        return "is not there"
    here = Path(sys.executable)
    if Path(path).absolute().parent == here.absolute().parent and Path(path).samefile(here):
        return None
    try:
        told = subprocess.run(
            [path, "-c", _ASK, *libraries],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    major, minor, *missing = told.stdout.split() or ("", "")
    if told.returncode or not (major.isdecimal() and minor.isdecimal()):
        return "is no Python"
    mine = sys.version_info[:2]
    if (int(major), int(minor)) != mine:
        return f"is of version {major}.{minor}, where this process is of {mine[0]}.{mine[1]}"
    return f"has no {', no '.join(missing)}" if missing else None


def pythons_of(spark: "SparkSession") -> dict[str, Sequence[str]]:
    """Those that run on this machine, by what Spark calls them, with what they need."""
    try:
        context = spark.sparkContext
        jvm, master = context._jvm, context.master  # Nothing else tells what the JVM starts.
        if jvm is None or master is None:
            return {}
        utils = getattr(jvm.org.apache.spark.api.python, "PythonUtils$")
        planning = str(getattr(utils, "MODULE$").defaultPythonExec())
    except Exception:  # noqa: BLE001 - Spark Connect has none of it, and this is advice alone
        return {}
    # What is given by --py-files Spark puts on the path of the processes that it starts.
    given = context.getConf().get("spark.submit.pyFiles", "")
    libraries = tuple(each for each in LIBRARIES if not (given and each in OURS))
    found: dict[str, Sequence[str]] = {planning: libraries}
    if master.partition("[")[0] == "local":
        found[context.pythonExec] = libraries
    return found
