"""The loop of the client for threads and of commands, with uvloop and without."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

from magnetar.event_loop import call_at_interrupt

ROOT: Final = Path(__file__).resolve().parents[3]
SCRIPT: Final = """
import asyncio, json, sys
if sys.argv[1] == "without":
    sys.modules["uvloop"] = None  # As where it is not installed.
import broker.cli.serving, magnetar.cli.perf, magnetar.sync.bridge
from magnetar.sync.bridge import Bridge
bridge = Bridge()
async def package():
    return type(asyncio.get_running_loop()).__module__.split(".")[0]
print(json.dumps(bridge.run(package)))
bridge.close()
"""


@pytest.mark.parametrize(("uvloop", "package"), [("with", "uvloop"), ("without", "asyncio")])
def test_loop_is_of_asyncio_where_uvloop_is_not_installed(uvloop: str, package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, uvloop],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == package


@pytest.mark.parametrize(
    ("environment", "needed"),
    [
        ({"sys_platform": "linux", "platform_python_implementation": "CPython"}, True),
        ({"sys_platform": "darwin", "platform_python_implementation": "CPython"}, True),
        ({"sys_platform": "win32", "platform_python_implementation": "CPython"}, False),
        ({"sys_platform": "linux", "platform_python_implementation": "PyPy"}, False),
    ],
)
def test_uvloop_is_required_only_where_it_exists(environment: dict[str, str], needed: bool) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = (ROOT / "deploy/spark/requirements.txt").read_text("utf-8").splitlines()
    for texts in (project["dependencies"], listed):
        (text,) = [each for each in texts if each.startswith("uvloop")]
        marker = Requirement(text).marker
        assert marker is not None
        assert marker.evaluate(environment) is needed


async def test_interrupt_is_noticed_by_loops_without_signal_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add_signal_handler(*_args: object) -> None:
        raise NotImplementedError

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "add_signal_handler", add_signal_handler)
    interrupted = asyncio.Event()
    before = signal.getsignal(signal.SIGINT)
    try:
        call_at_interrupt(interrupted.set)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(interrupted.wait(), 5)
    finally:
        signal.signal(signal.SIGINT, before)
