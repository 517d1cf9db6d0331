"""`magnetar pipeline ...` as a shell starts it: how mistakes are told."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import magnetar
from magnetar.cli.common import INTERRUPTED
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import rows, spark_session
from tests.pipeline.bare_python import (
    build_wheel,
    make_bare_python,
    submit,
)
from tests.pipeline.conftest import MakeTopic
from tests.support.broker_process import ROOT
from tests.support.child_process import dying_with_its_parent
from tests.support.tools import missing_java, require

PATIENCE_S: Final = 200
ROWS: Final = 3000


def told(*arguments: str, path: str) -> tuple[int, list[str]]:
    """Status of a command, and the lines of its standard error."""
    command = [sys.executable, "-m", "magnetar.cli.main", "pipeline", *arguments]
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


def test_without_java_the_error_names_what_is_missing(tmp_path: Path) -> None:
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
def test_wrong_arguments_fail_before_spark_starts(
    arguments: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """Here it cannot start."""
    status, lines = told(*arguments, path=without_java(tmp_path))
    assert status == 1
    assert len(lines) == 1
    assert expected in lines[0]


@pytest.mark.usefixtures("_spark_is_ready")
async def test_ctrl_c_ends_a_job_without_a_trace(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic
) -> None:
    """While it waits for what it has asked of Spark."""
    source, target = await topic(1), await topic(1)
    await rows.publish(client, source.name, rows.pairs(ROWS, keys=ROWS))
    command = [
        *(
            sys.executable,
            "-m",
            "magnetar.cli.main",
            "pipeline",
            "compact",
            source.name,
            target.name,
        ),
        *("--url", service.url),
    ]
    process = await asyncio.create_subprocess_exec(
        *dying_with_its_parent(command),
        env=os.environ | spark_session.environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stdout:
            if b"Compaction" in line:
                break
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == INTERRUPTED, err.decode()
    assert "Traceback" not in err.decode(), err.decode()
    # Not the last line for sure: tasks that Spark still runs may fail after it.
    assert "ended by Ctrl-C" in err.decode()
    assert not await rows.committed(client, target.name)


async def test_jobs_run_under_spark_submit(
    service: BrokerUnderTest, topic: MakeTopic, tmp_path: Path
) -> None:
    """With the wheel and what the two files name, on executors too."""
    require(missing_java(), "pipeline", "JDK 17")
    made = await topic(2)
    python = make_bare_python(tmp_path / "bare", jobs=True)
    zipped = build_wheel(tmp_path).rename(tmp_path / "magnetar.zip")
    page = tmp_path / "page.html"
    arguments = ("audit", made.name, "--url", service.url, "--admin-url", service.admin_url)
    done = await asyncio.to_thread(
        submit,
        python,
        zipped,
        ROOT / "deploy" / "spark" / "jobs.py",
        *(*arguments, "--report", str(page)),
    )
    assert done.returncode == 0, done.stderr[-8000:]
    assert "no violation" in done.stdout
    assert "svg" in page.read_text("utf-8")
