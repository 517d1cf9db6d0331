"""A real broker process for tests: started, killed, terminated and started again on its data.

Rules: the process listens on 127.0.0.1 only, on ports that stay the same over restarts; its data
and its log are in the directory given; `start` returns when the banner says that it serves; what
does not come up raises `BrokerFailed` with the end of the log; `running` leaves no process behind.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp

from protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient

ROOT: Final = Path(__file__).resolve().parents[2]
HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 30
STOP_TIMEOUT_S: Final = 30
POLL_S: Final = 0.01
READY: Final = "Magnetar is ready"
PORTS: Final = range(20_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections: a client that tries again and
again while the broker is down must not be given the broker's port, and so reach itself."""

LOUD: Final = ("ERROR ", "CRITICAL ", "Traceback ", "Exception ignored")
"""How lines begin that Python itself writes about a fault."""


class BrokerFailed(AssertionError):
    """The broker did not come up, or did not end; the message has the end of its log."""


def free_port() -> int:
    """A port that nobody listens on now."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            return port


class BrokerProcess:
    """`magnetar standalone` on one directory.  `settings` are names and values of `Settings`.

    `run` counts the processes started.
    """

    def __init__(self, directory: Path, settings: Mapping[str, object] | None = None) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.log_path = directory / "broker.log"
        self.port = free_port()
        self.http_port = free_port()
        self.run = 0
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    # Life

    def spawn(self) -> None:
        """Start the process and return at once."""
        assert self._process is None, "the broker runs already"
        self.run += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MAGNETAR_")}
        environment |= {f"MAGNETAR_{k.upper()}": str(v) for k, v in self._settings.items()}
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "broker.cli.main", "standalone"),
                    *("--data-dir", str(self.data_dir), "--bind-host", HOST),
                    *("--port", str(self.port), "--http-port", str(self.http_port)),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    async def start(self) -> None:
        """Start the process and wait until it serves."""
        self.spawn()
        await self.until_serving()

    async def until_serving(self) -> None:
        """Wait for the banner of the process that runs."""
        assert self._process is not None
        for _ in range(int(START_TIMEOUT_S / POLL_S)):
            ended = self._process.poll() is not None
            if READY in self.log(this_run=True):
                return
            if ended:
                break
            await asyncio.sleep(POLL_S)
        self.kill()
        raise BrokerFailed(f"The broker does not serve:\n{self.log(this_run=True)[-4000:]}")

    def kill(self) -> None:
        """SIGKILL, and wait for the end.  Nothing happens if no process runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        return await self.signalled(signal.SIGTERM)

    async def signalled(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(number)
        return await self.ended()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, and wait for nothing."""
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process; returns the exit status."""
        assert self._process is not None
        for _ in range(int(STOP_TIMEOUT_S / POLL_S)):
            status = self._process.poll()
            if status is not None:
                self._process = None
                return status
            await asyncio.sleep(POLL_S)
        raise BrokerFailed(f"The broker does not end:\n{self.log(this_run=True)[-4000:]}")

    # What is asked about it

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    def log(self, *, this_run: bool = False) -> str:
        """What the process wrote, of this run or of all."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start if this_run else 0)
            return log.read().decode("utf-8", "replace")

    def faults(self) -> list[str]:
        """Log lines of all runs that tell of a fault of the broker's own."""
        found: list[str] = []
        for line in self.log().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                if line.startswith(LOUD) or "was never" in line:
                    found.append(line)
                continue
            if record.get("level") in ("error", "critical") or "exception" in record:
                found.append(line)
        return found

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """The most memory that the process ever had in RAM."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def sockets(self) -> int:
        """Sockets of the process, listening ones included."""
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += os.readlink(link).startswith("socket:")
        return count

    # Talking to it

    async def connect(self, connect: pb.CommandConnect | None = None) -> RawClient:
        """A connection that has shaken hands."""
        return await RawClient.open(HOST, self.port, connect)

    async def rest(
        self, method: str, path: str, *, body: object = None, **query: str | int
    ) -> tuple[int, object]:
        """One REST request below /admin/v2: status, and body (JSON where it is)."""
        return await self._request(method, f"/admin/v2{path}", body, query)

    async def transactions(self, method: str, path: str, **query: str | int) -> tuple[int, object]:
        """One REST request below /admin/v3/transactions: status, and body."""
        return await self._request(method, f"/admin/v3/transactions{path}", None, query)

    async def _request(
        self, method: str, path: str, body: object, query: Mapping[str, str | int]
    ) -> tuple[int, object]:
        url = f"http://{HOST}:{self.http_port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, params=query, json=body) as answer,
        ):
            text = await answer.text()
            return answer.status, _json_or(text)

    async def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        url = f"http://{HOST}:{self.http_port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[{{ ]", line))

    async def create_scalable(self, topic: str, segments: int) -> None:
        """Create `topic://public/default/<topic>`."""
        path = f"/scalable/public/default/{topic}"
        status, answer = await self.rest("PUT", path, numInitialSegments=segments)
        assert status == 204, answer


def _json_or(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


@asynccontextmanager
async def running(
    directory: Path, settings: Mapping[str, object] | None = None
) -> AsyncIterator[BrokerProcess]:
    """A broker that serves, and whose process is gone afterwards, whatever happens."""
    broker = BrokerProcess(directory, settings)
    try:
        await broker.start()
        yield broker
    finally:
        broker.kill()
