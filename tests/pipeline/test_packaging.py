"""The wheel as executors get it, and how little it needs there."""

import asyncio
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

import magnetar
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import rows
from tests.pipeline.bare_python import (
    JOB_REQUIREMENTS,
    build_wheel,
    make_bare_python,
    required,
    submit,
)
from tests.pipeline.conftest import MakeTopic
from tests.pipeline.submitted import ROWS
from tests.support.broker_process import ROOT
from tests.support.tools import missing_java, require

TASKS: Final = ("magnetar.spark.data_source",)
"""What Spark's Python processes import by themselves; the rest comes with it."""
SAY_LOADED: Final = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
OURS: Final = {"magnetar"}
OF_SPARK: Final = {"pandas"}
"""Asked for by pyspark, where it gives and takes Arrow."""
NOT_THERE: Final = ("aiohttp", "grpc", "kazoo", "pydantic", "rich", "structlog", "typer", "avro")


def test_the_bounds_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    known = {*project["dependencies"], *project["optional-dependencies"]["spark"]}
    assert set(required().values()) <= known
    assert set(required(JOB_REQUIREMENTS).values()) <= known


def test_a_task_imports_nothing_else(tmp_path: Path) -> None:
    """In a Python that has only what is required, and one that would have the rest."""
    bare = make_bare_python(tmp_path / "bare")
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for name in NOT_THERE:
        assert not (site / name).exists()
    for name in sorted(OURS):
        (site / name).symlink_to(ROOT / name)
    loaded = {}
    for python in (bare, Path(sys.executable)):
        done = subprocess.run(
            [python, "-c", SAY_LOADED, *TASKS],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        loaded[python] = set(json.loads(done.stdout))
    assert loaded[bare] >= OURS
    assert not loaded[Path(sys.executable)] & {
        *NOT_THERE,
        "broker",
        "config",
        "security",
        "storage",
        "txn",
    }


async def test_the_wheel_runs_from_py_files_on_an_executor_of_its_own(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic, tmp_path: Path
) -> None:
    """Spark puts zips on the path of its workers, and no wheels: the same file by another name."""
    require(missing_java(), "pipeline", "JDK 17")
    made = await topic(2)
    python = make_bare_python(tmp_path / "bare")
    zipped = tmp_path / "magnetar.zip"
    shutil.copy(build_wheel(tmp_path), zipped)
    done = await asyncio.to_thread(
        submit,
        python,
        zipped,
        Path(__file__).with_name("submitted.py"),
        *(service.url, made.name, f"{made.local_name}-key"),
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "magnetar.zip" in found["magnetar"]
    assert "magnetar.zip" in found["driver"]
    assert found["python"] == str(python)
    assert found["protobuf"] == "upb", "the protobuf modules are read by the C parser"
    stored = [row.value for row in await rows.committed(client, made.name)]
    assert sorted(stored) == sorted(b"%d" % number for number in range(ROWS))


@pytest.mark.parametrize("name", sorted(required().keys() - OF_SPARK))
def test_each_is_needed(name: str) -> None:
    """pyproject names it for the client or the pipeline, which import it somewhere."""
    module = {"google-crc32c": "google_crc32c", "protobuf": "google.protobuf"}.get(name, name)
    texts = (path.read_text("utf-8") for room in OURS for path in (ROOT / room).rglob("*.py"))
    assert any(f"import {module}" in text or f"from {module}" in text for text in texts)
