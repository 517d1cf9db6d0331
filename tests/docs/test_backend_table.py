"""The table of contract suites and backends in docs/testing.md: it says what is collected."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
ROW: Final = re.compile(
    r"^\| ([\w-]+) \| [\w ]+, `tests/contract/(\w+)` \| (\d+) \|",
    re.MULTILINE,
)
COLLECTED: Final = re.compile(r"^(\w+) on (.+): (\d+) collected", re.MULTILINE)
COLLECT: Final = ("tests/contract", "-m", "cluster or not cluster", "--collect-only", "-qq")


@pytest.mark.timeout(300)
def test_the_table_says_what_is_collected() -> None:
    """Of every backend, also of those whose real parts are not here."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *COLLECT, "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    collected = {(suite, backend): int(n) for suite, backend, n in COLLECTED.findall(run.stdout)}
    page = (ROOT / "docs/testing.md").read_text("utf-8")
    written = {(suite, backend): int(n) for backend, suite, n in ROW.findall(page)}
    assert collected
    assert written == collected, "docs/testing.md is not up to date: write these numbers"
