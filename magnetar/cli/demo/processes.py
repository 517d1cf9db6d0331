"""The processes of the demo: a broker and workers, each in a process group of its own."""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import urllib.request
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from magnetar.bounds import DEMO_POLL_S, DEMO_STEP_S
from magnetar.errors import ClientError

HOST: Final = "127.0.0.1"
_PORTS: Final = range(20_000, 32_000)
"""Ports below those of outgoing connections.  Otherwise a client that tries to connect while the
broker is down could get the broker's port for its own end, and connect to itself."""


class DemoFailed(ClientError):
    """A step of the demo did not happen."""


def magnetar_command() -> list[str]:
    """The words that run the `magnetar` command with this Python.  Raises `DemoFailed`."""
    for script in entry_points(group="console_scripts", name="magnetar"):
        return [sys.executable, "-m", script.module]
    raise DemoFailed("The `magnetar` command is not installed: install the project with pip.")


def free_port(rng: random.Random) -> int:
    """A port of 127.0.0.1 on which no process listens now."""
    while True:
        port = rng.choice(_PORTS)
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return port


class _Process:
    """A process of the demo, which can be started again after it was killed.

    Its output is in `log_path`.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def _spawn(self, arguments: list[str], *, talks: bool) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAGNETAR_")}
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *magnetar_command(),
                *arguments,
                stdin=pipe if talks else asyncio.subprocess.DEVNULL,
                stdout=pipe if talks else log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return self._process

    @property
    def pid(self) -> int:
        """The id of the process that runs.  Raises `DemoFailed` if none does."""
        return self._running.pid

    @property
    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise DemoFailed(f"No {self.name} runs.")
        return self._process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, if it still exists."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    async def kill(self) -> None:
        """Kill the process group by SIGKILL and wait for its end, if a process runs."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            self._process = None

    async def wait_for_exit(self) -> int:
        """Wait for the end; returns the exit status.  Raises `DemoFailed`."""
        try:
            async with asyncio.timeout(DEMO_STEP_S):
                return await self._running.wait()
        except TimeoutError:
            raise self.failure(f"{self.name} did not end in time.") from None

    def failure(self, what: str) -> DemoFailed:
        """An error with the end of the log."""
        tail = self.log_path.read_text("utf-8", "replace")[-2000:].strip()
        return DemoFailed(f"{what} Its log ends so:\n{tail or '(empty)'}")


class DemoBroker(_Process):
    """`magnetar standalone` on one data directory and the same ports at every start."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        super().__init__("broker", directory)
        self._data = directory / "data"
        self._port = free_port(rng)
        self._http_port = free_port(rng)

    @property
    def url(self) -> str:
        """The service URL for clients."""
        return f"pulsar://{HOST}:{self._port}"

    @property
    def admin_url(self) -> str:
        """The URL of the admin REST API."""
        return f"http://{HOST}:{self._http_port}"

    async def start(self) -> None:
        """Start the broker and wait until it serves.  Raises `DemoFailed`."""
        process = await self._spawn(
            [
                *("standalone", "--data-dir", str(self._data), "--bind-host", HOST),
                *("--port", str(self._port), "--http-port", str(self._http_port)),
            ],
            talks=False,
        )
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + DEMO_STEP_S
        while not await self._is_well():
            if process.returncode is not None or loop.time() > deadline_s:
                raise self.failure("The broker does not serve.")
            await asyncio.sleep(DEMO_POLL_S)

    async def rest(self, method: str, path: str) -> None:
        """Send one request below /admin/v2/scalable/public/default.  Raises `DemoFailed`."""
        url = f"{self.admin_url}/admin/v2/scalable/public/default/{path}"
        try:
            await asyncio.to_thread(_request, method, url)
        except (OSError, ValueError) as error:
            raise DemoFailed(f"The broker refused {method} {path}: {error}.") from error

    async def _is_well(self) -> bool:
        try:
            await asyncio.to_thread(_request, "GET", f"{self.admin_url}/admin/v2/brokers/health")
        except (OSError, ValueError):
            return False
        return True


class DemoWorker(_Process):
    """A worker process, which reports events and takes commands (`magnetar.cli.demo.worker`)."""

    def __init__(self, name: str, directory: Path, arguments: list[str]) -> None:
        super().__init__(name, directory)
        self._arguments = arguments

    async def start(self) -> None:
        """Start the worker, which reports the event `ready` once it works."""
        # It ends by itself if the demo dies: its input is a pipe, which ends then.
        await self._spawn(["demo-worker", *self._arguments], talks=True)

    async def wait_for_event(self, event: str) -> Mapping[str, object]:
        """Read the worker's events up to this one, which is returned.  Raises `DemoFailed`."""
        stdout = self._running.stdout
        if stdout is None:
            raise DemoFailed(f"{self.name} has no output.")
        try:
            async with asyncio.timeout(DEMO_STEP_S):
                while line := await stdout.readline():
                    with self.log_path.open("ab") as log:
                        log.write(line)
                    report: Mapping[str, object] = json.loads(line)
                    if report["event"] == event:
                        return report
        except TimeoutError:
            raise self.failure(f"{self.name} did not report {event!r} in time.") from None
        raise self.failure(f"{self.name} ended before it reported {event!r}.")

    def send_command(self, command: str) -> None:
        """Send `hold` (wait before the next commit) or `go` (go on from there)."""
        stdin = self._running.stdin
        if stdin is not None:
            stdin.write(f"{command}\n".encode())


def _request(method: str, url: str) -> None:
    """Send one HTTP request.  Raises OSError, also for an answer with an error status."""
    request = urllib.request.Request(url, method=method, data=b"" if method != "GET" else None)
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with straight.open(request, timeout=DEMO_STEP_S) as answer:
        answer.read()
