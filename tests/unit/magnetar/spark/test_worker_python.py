"""What is told of Pythons before Spark runs them."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import SparkSession

from magnetar.spark.worker_python import LIBRARIES, shortcoming, warn_of_pythons

MINE = f"{sys.version_info[0]} {sys.version_info[1]}"


def python(directory: Path, says: str, status: int = 0) -> str:
    """An executable that says so when it is asked."""
    path = directory / "python-of-a-test"
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "status", "why"),
    [
        (MINE, 0, None),
        (f"{MINE} magnetar", 0, "has no magnetar"),
        (f"{MINE} magnetar pyarrow", 0, "has no magnetar, no pyarrow"),
        ("2 7", 0, "is of version 2.7, where this process is of"),
        ("usage: jupyter", 0, "is no Python"),
        ("", 0, "is no Python"),
        (MINE, 1, "is no Python"),
    ],
)
def test_shortcoming_names_what_a_python_lacks(
    tmp_path: Path, says: str, status: int, why: str | None
) -> None:
    found = shortcoming(python(tmp_path, says, status))
    assert found == why or (found is not None and why is not None and found.startswith(why))


def test_shortcoming_is_none_here_and_names_a_missing_python() -> None:
    assert shortcoming(sys.executable) is None
    assert shortcoming("/nowhere/python") == "is not there"


def test_shortcoming_runs_the_python(tmp_path: Path) -> None:
    """By another path, so that it is none that is known; without what this one is told to have."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', "utf-8")
    path.chmod(0o755)
    assert shortcoming(str(path)) is None
    assert shortcoming(str(path), (*LIBRARIES, "nowhere_to_be_found")) == (
        "has no nowhere_to_be_found"
    )


def session(planning: str, tasks: str, master: str = "local[2,4]", files: str = "") -> SparkSession:
    """As much of a session as is asked."""
    utils = SimpleNamespace(**{"MODULE$": SimpleNamespace(defaultPythonExec=lambda: planning)})
    python = SimpleNamespace(**{"PythonUtils$": utils})
    spark = SimpleNamespace(api=SimpleNamespace(python=python))
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(spark=spark)))
    conf = {"spark.submit.pyFiles": files}
    context = SimpleNamespace(_jvm=jvm, getConf=lambda: conf, master=master, pythonExec=tasks)
    return cast("SparkSession", SimpleNamespace(sparkContext=context))


def told(spark: SparkSession) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_pythons(spark)
    return [str(each.message) for each in found]


def test_register_warns_once_of_each_local_python(tmp_path: Path) -> None:
    bad = python(tmp_path, f"{MINE} magnetar")
    assert told(session(sys.executable, sys.executable)) == []
    for spark in (session(bad, bad), session(sys.executable, bad), session(bad, sys.executable)):
        [warning] = told(spark)
        assert warning.startswith(
            f"Spark runs the format pulsar5 by the Python {bad}, which has no"
        )
        assert f"Set PYSPARK_PYTHON={sys.executable}" in warning
    assert told(session(sys.executable, bad, "yarn")) == [], "tasks run on other machines"
    assert told(cast("SparkSession", SimpleNamespace())) == [], "Spark Connect tells nothing"
