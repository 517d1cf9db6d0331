"""A Python that has Spark and what `deploy/spark/requirements.txt` names, and nothing of ours.

Rules: it is a virtual environment whose packages are links to those of the Python that runs the
tests; Spark's home is a directory of its own in it, for Spark writes there.
"""

import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.support.broker_process import ROOT

REQUIREMENTS: Final = ROOT / "deploy" / "spark" / "requirements.txt"
JOB_REQUIREMENTS: Final = REQUIREMENTS.with_name("requirements-jobs.txt")
"""What the jobs need besides."""
NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
BUILD_TIMEOUT_S: Final = 120
SUBMIT_TIMEOUT_S: Final = 200
BUILT_FROM: Final = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")
PACKAGED: Final = ("magnetar",)


def required(file: Path = REQUIREMENTS) -> dict[str, str]:
    """The bounds of each library that an executor needs, or what else a file names."""
    lines = file.read_text("utf-8").splitlines()
    return {_name(line): line for line in lines if line and not line.startswith(("#", "-r "))}


def _name(requirement: str) -> str:
    found = NAME.match(requirement)
    assert found, requirement
    return found[0].lower().replace("_", "-")


def _closure(names: list[str]) -> set[str]:
    """These distributions and what they need, without extras."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in found:
            continue
        found.add(name)
        needed = metadata.distribution(name).requires or []
        names += [_name(each) for each in needed if ";" not in each]
    return found


def make_bare_python(directory: Path, *, jobs: bool = False) -> Path:
    """The environment, also with what `jobs` need; its interpreter."""
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    site = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        ).strip()
    )
    besides = required(JOB_REQUIREMENTS) if jobs else {}
    for name in _closure([*required(), *besides, "pyspark"]):
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            source, link = Path(str(distribution.locate_file(top))), site / top
            if top == "pyspark":
                link.mkdir()
                for each in source.iterdir():
                    (link / each.name).symlink_to(each)
            elif source.exists() and not link.exists():
                link.symlink_to(source)
    (site / "pyspark" / "work").mkdir(exist_ok=True)
    return python


def spark_home(python: Path) -> Path:
    """Where its Spark is."""
    (home,) = python.parents[1].glob("lib/python*/site-packages/pyspark")
    return home


def environment(python: Path) -> dict[str, str]:
    """Without a path to our modules."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {
        "SPARK_HOME": str(spark_home(python)),
        "PYSPARK_PYTHON": str(python),
        "PYSPARK_DRIVER_PYTHON": str(python),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_HOSTNAME": "localhost",
    }


def submit(
    python: Path, zipped: Path, script: Path, *arguments: str
) -> "subprocess.CompletedProcess[str]":
    """`spark-submit` of a script with the wheel as zip, on an executor of its own."""
    return subprocess.run(
        [
            str(spark_home(python) / "bin" / "spark-submit"),
            *("--master", "local-cluster[1,2,1024]"),
            *("--driver-memory", "1g", "--executor-memory", "1g"),
            *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
            *("--py-files", str(zipped), str(script), *arguments),
        ],
        cwd=zipped.parent,
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=SUBMIT_TIMEOUT_S,
        check=False,
    )


def build_wheel(directory: Path) -> Path:
    """The project's wheel, of the files that git knows, built in a copy."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", *BUILT_FROM, *PACKAGED], cwd=ROOT, text=True
    )
    tree = directory / "tree"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(tree)),
        ],
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )
    (wheel,) = directory.glob("magnetar-*.whl")
    assert zipfile.is_zipfile(wheel)
    return wheel
