"""Spark's home as the tests use it, made once: the same Spark, quicker to start.

Rules: it is a directory of links to the installed pyspark, with two things besides.  The modules
for Python processes are a directory, where Spark has a zip: a zip holds no bytecode, so each of
the six processes of a driver would compile them.  And there is an archive of loaded classes, which
one run of the counting source writes: it saves a third of the processor time of each further one.
Both are of this Java and this pyspark; with others they are made again.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pyspark

from tests.support.broker_process import ROOT
from tests.support.tools import built_once

HOME: Final = ROOT / "build" / "spark"
ARCHIVE: Final = HOME / "classes.jsa"
INSTALLED: Final = Path(pyspark.__file__).parent
BUILD_TIMEOUT_S: Final = 600
FORM: Final = b"1"
"""To be raised when what is built changes."""
JAVA_OPTIONS: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""Of a JVM that lives for seconds: without what pays off later."""


def ready() -> None:
    """Make the home unless it is there."""
    version = subprocess.run(["java", "-version"], capture_output=True, check=True).stderr
    given = (version, pyspark.__version__.encode(), FORM)
    digest = hashlib.sha256(b"\0".join(given)).hexdigest()
    built_once(ROOT / "build" / "spark.built", digest, _build)


def home() -> Path:
    """Where Spark is: as installed, until this one is made."""
    return HOME if (HOME / "bin").exists() else INSTALLED


def java_options() -> tuple[str, ...]:
    """Of the JVM of a driver."""
    shared = f"-XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else "-Xshare:auto"
    return (*JAVA_OPTIONS, shared)


def _build() -> None:
    shutil.rmtree(HOME, ignore_errors=True)
    _link(INSTALLED, HOME, but="python")
    _link(INSTALLED / "python", HOME / "python", but="lib")
    _link(INSTALLED / "python" / "lib", HOME / "python" / "lib", but="pyspark.zip")
    modules = HOME / "python" / "lib" / "pyspark.zip"
    modules.mkdir()
    (modules / "pyspark").symlink_to(INSTALLED)
    _archive_classes()


def _link(directory: Path, home: Path, *, but: str) -> None:
    home.mkdir(parents=True)
    for each in directory.iterdir():
        if each.name != but:
            (home / each.name).symlink_to(each)


def _archive_classes() -> None:
    """Run a query once, and keep the classes that it has loaded.  Without them all goes as well."""
    with tempfile.TemporaryDirectory() as place:
        given = {
            "directory": f"{place}/driver",
            "checkpoint": f"{place}/checkpoint",
            "sink": f"{place}/sink",
            "rows": 10,
            "total": 20,
            "java": [f"-XX:ArchiveClassesAtExit={ARCHIVE}"],
        }
        subprocess.run(
            [sys.executable, "-m", "tests.pipeline.toy_driver", json.dumps(given)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
