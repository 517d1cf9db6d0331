"""What README.md and docs/client.md show in Python runs as it is written, but for the port.

The blocks of README.md are programs, and run in processes of their own; those of docs/client.md go
on from one another.  Both count on topics being made when they are used, which Apache Pulsar's
first milestone does not do.
"""

import ast
import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import Service
from tests.support.child_process import dying_with_its_parent

pytestmark = pytest.mark.magnetar_only("5.0.0-M1 makes no topics when they are used")
ROOT = Path(__file__).resolve().parents[2]
WRITTEN_URL = "pulsar://127.0.0.1:6650"
PATIENCE_S = 30
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = {0: "customer-7 one coffee\n", 1: ""}
"""Output of the blocks of README.md."""


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


async def outcome(code: str) -> tuple[int | None, str, str]:
    """Of a program: status, output, errors."""
    process = await asyncio.create_subprocess_exec(
        *dying_with_its_parent([sys.executable, "-W", "error", "-c", code]),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def test_readme_begins_with_python() -> None:
    assert len(blocks("README.md")) == len(SHOWN)
    first = [line for line in blocks("README.md")[0].splitlines() if line.strip()]
    assert len(first) <= 15, "the first page shows what is typed first, not more"


@pytest.mark.parametrize("number", SHOWN)
async def test_readme_runs_as_written(service: Service, number: int) -> None:
    code = blocks("README.md")[number]
    assert WRITTEN_URL in code
    assert await outcome(code.replace(WRITTEN_URL, service.url)) == (0, SHOWN[number], "")


async def test_the_clients_page_runs_as_written(service: Service) -> None:
    """All blocks share their names, as in `python -m asyncio`."""
    page = ROOT / "docs/client.md"
    names: dict[str, Any] = {}
    for match in BLOCK.finditer(page.read_text("utf-8")):
        line = page.read_text("utf-8")[: match.start(1)].count("\n")
        code = "\n" * line + match[1].replace(WRITTEN_URL, service.url)
        compiled = compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        async with asyncio.timeout(PATIENCE_S):
            running = eval(compiled, names)
            if running is not None:
                await running
    assert str(names["where"]).startswith("0:")
    assert names["second"].value == "tea 0"
