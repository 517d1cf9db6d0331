"""`magnetar demo` tells its story to the end, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from tests.support.child_process import dying_with_its_parent
from tests.support.waiting import until

pytestmark = pytest.mark.magnetar_only("the demo starts a Magnetar of its own")
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60
VERDICT = (
    r"\d+  500 orders, 500 bills: 0 lost, 0 doubled, 0 out of order: "
    r"nothing lost, nothing doubled \([\d.]+ s\)\."
)
STEPS = (
    "A broker starts on an empty directory",
    "SIGKILL to the broker",
    "The broker is back on its data",
    "is split in two meanwhile",
    "SIGKILL to the worker",
    "It opens the pipeline's transaction key",
    "300 orders, 300 bills: 0 lost, 0 doubled, 0 out of order",
    "the paused one is a zombie now",
    "It is refused: TransactionKeyFenced",
)


def started(directory: Path, out: int | IO[bytes] = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "magnetar.cli.main", "demo", "--orders", "300"]
    return subprocess.Popen(
        dying_with_its_parent(command),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(directory)},
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_on(directory: Path) -> list[str]:
    """Command lines of processes whose standard error is a file in the directory."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if os.readlink(process / "fd/2").startswith(str(directory)):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_the_demo_proves_that_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    with started(tmp_path) as demo:
        out, err = demo.communicate(timeout=PATIENCE_S)
    assert (demo.returncode, err) == (0, ""), out
    lines = out.splitlines()
    assert re.fullmatch(VERDICT, lines[-1].strip())
    told = iter(lines)
    for step in STEPS:
        assert any(step in line for line in told), f"{step!r} is not told in its turn:\n{out}"
    assert list(tmp_path.iterdir()) == []
    assert processes_on(tmp_path) == []


def test_a_demo_that_cannot_tell_its_story_says_so_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    with Path("/dev/full").open("wb") as full, started(tmp_path, full) as demo:
        _, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1
    assert err.startswith("magnetar: The output cannot be written (No space left on device); ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    assert processes_on(tmp_path) == []


async def test_a_demo_that_is_told_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path) as demo:
        await until(lambda: any("standalone" in line for line in processes_on(tmp_path)))
        demo.send_signal(signal.SIGTERM)
        _, err = demo.communicate(timeout=PATIENCE_S)
    assert demo.returncode == 1
    assert err == "magnetar: A signal ended the demo before its last step.\n"
    assert list(tmp_path.iterdir()) == []
    assert processes_on(tmp_path) == []
