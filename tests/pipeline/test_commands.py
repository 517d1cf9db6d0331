"""`magnetar pipeline ...` as a shell starts it: how mistakes are told."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.pipeline.bare_python import build_wheel, environment, make_bare_python, spark_home
from tests.pipeline.conftest import MakeTopic
from tests.stock.broker_under_test import BrokerUnderTest
from tests.support.broker_process import ROOT
from tests.support.tools import missing_java, require

PATIENCE_S: Final = 200


def told(*arguments: str, path: str) -> tuple[int, list[str]]:
    """Status of a command, and the lines of its standard error."""
    command = [sys.executable, "-m", "broker.cli.main", "pipeline", *arguments]
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = subprocess.run(
        command,
        env=kept | {"PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def without_java(directory: Path) -> str:
    """A PATH with a shell's tools, and no java."""
    for name in ("bash", "dirname", "readlink", "uname"):
        found = next(p for each in ("/bin", "/usr/bin") if (p := Path(each, name)).exists())
        (directory / name).symlink_to(found)
    return str(directory)


def test_a_machine_without_java_is_told_what_is_missing(tmp_path: Path) -> None:
    status, lines = told("audit", "orders", path=without_java(tmp_path))
    assert status == 1
    assert lines[-1].startswith("magnetar: Spark has not started")
    assert "Java 17" in lines[-1]
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("audit", "orders", "--report", "/nowhere/at/all.html"), "/nowhere/at/all.html"),
        (("audit", "orders", "--table", "ftp://host/table"), "no place for a table"),
        (("audit", "orders", "--admin-url", "host:8080"), "no REST address"),
        (("compact", "orders", "made", "--drop-tombstones-older-than", "soon"), "'soon'"),
        (("offload", "orders", "--to", "ftp://host/table"), "no place for a table"),
    ],
)
def test_what_the_command_line_shows_to_be_wrong_is_told_before_spark_starts(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """Here it cannot start."""
    status, lines = told(*arguments, path=without_java(tmp_path))
    assert status == 1
    assert len(lines) == 1
    assert expected in lines[0]


async def test_jobs_run_under_spark_submit(
    service: BrokerUnderTest, topic: MakeTopic, tmp_path: Path
) -> None:
    """With the wheel and what the two files name, on executors too."""
    require(missing_java(), "pipeline", "JDK 17")
    made = await topic(2)
    python = make_bare_python(tmp_path / "bare", jobs=True)
    zipped = build_wheel(tmp_path).rename(tmp_path / "magnetar.zip")
    page = tmp_path / "page.html"
    submit = [
        *(str(spark_home(python) / "bin" / "spark-submit"), "--master", "local-cluster[1,2,1024]"),
        *("--driver-memory", "1g", "--executor-memory", "1g"),
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
        *("--py-files", str(zipped), str(ROOT / "deploy" / "spark" / "jobs.py")),
        *("audit", made.name, "--url", service.url, "--admin-url", service.admin_url),
        *("--report", str(page)),
    ]
    done = await asyncio.to_thread(
        subprocess.run,
        submit,
        cwd=tmp_path,
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert "no violation" in done.stdout
    assert "svg" in page.read_text("utf-8")
