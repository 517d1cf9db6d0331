"""The scripts in examples/ run as they are written, on the broker of the tests."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import quick_spark, spark_session
from tests.support.broker_process import ROOT
from tests.support.child_process import dying_with_its_parent

EXAMPLES: Final = ROOT / "examples"
PATIENCE_S: Final = 600
SHOWN: Final = {
    "examples/wordcount.py": "words were counted, each once.",
    "examples/orders/run.py": "All 1000 orders were enriched once, and the totals are right.",
}
"""What each says last."""


def test_all_that_the_page_names_are_tried() -> None:
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert set(re.findall(r"`python (examples/[\w/.]+)`", page)) == set(SHOWN)


@pytest.mark.usefixtures("_spark_is_ready")
@pytest.mark.parametrize("script", SHOWN)
async def test_an_example_runs_as_written(
    service: BrokerUnderTest, script: str, tmp_path: Path
) -> None:
    command = [sys.executable, str(ROOT / script), "--url", service.url]
    if script == "examples/wordcount.py":
        command += ["--admin-url", service.admin_url]
    quick = {"JDK_JAVA_OPTIONS": " ".join(quick_spark.java_options())}
    environment = os.environ | spark_session.environment() | quick
    process = await asyncio.create_subprocess_exec(
        *dying_with_its_parent(command),
        cwd=tmp_path,
        env=environment | {"TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-8000:]
    assert SHOWN[script] in out.decode().splitlines()[-1]
