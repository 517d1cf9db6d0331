"""A real broker process for tests: started, killed, terminated and started again on its data.

Rules: the process listens on 127.0.0.1 only, on ports that stay the same over restarts; its data
and its log are in the directory given; `start` returns when the banner says that it serves; what
does not come up raises `BrokerFailed` with the end of the log; `running` leaves no process behind.
It is the broker of this tree unless other `Code` is given.  With `Security` its ports have TLS
alone, and the requests made here are those of a superuser.
"""

import json
import os
import re
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.child_process import HOST, ChildFailed, ChildProcess, free_port
from tests.support.raw_client import RawClient
from tests.support.security import Security

ROOT: Final = Path(__file__).resolve().parents[2]
READY: Final = "Magnetar is ready"
LOUD: Final = ("ERROR ", "CRITICAL ", "Traceback ", "Exception ignored")
"""How lines begin that Python itself writes about a fault."""

BrokerFailed = ChildFailed


@dataclass(frozen=True)
class Code:
    """Whose broker is run: a checkout, and the interpreter that has what it needs."""

    checkout: Path = ROOT
    python: Path = Path(sys.executable)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, beside those of whoever starts it."""
    main: str = "magnetar.cli.main"
    """The module that is the `magnetar` command."""


class BrokerProcess(ChildProcess):
    """A broker with its log in one directory.  `settings` are names and values of `Settings`.

    It is `magnetar broker` if they name a metadata store, else `magnetar standalone` with its data
    in that directory.  Topics are not scaled by themselves unless the settings say so.
    """

    start_timeout_s = 30

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        code: Code | None = None,
        security: Security | None = None,
    ) -> None:
        super().__init__("broker", directory)
        self.data_dir = directory / "data"
        self.port = free_port()
        self.http_port = free_port()
        self._settings = {"scalable_topic_auto_scale_enabled": False, **(settings or {})}
        self._code = code or Code()
        self.security = security
        if security is not None:
            ports = {"port_tls": self.port, "http_port_tls": self.http_port}
            self._settings = {**security.settings, **ports, **self._settings}

    # Life

    def command(self) -> list[str]:
        return [
            *(str(self._code.python), "-m", self._code.main, *self._command()),
            *("--bind-host", HOST),
            *(() if self.security else ("--port", str(self.port))),
            *(() if self.security else ("--http-port", str(self.http_port))),
        ]

    def environment(self) -> Mapping[str, str]:
        outer = {k: v for k, v in os.environ.items() if not k.startswith("MAGNETAR_")}
        settings = {f"MAGNETAR_{k.upper()}": str(v) for k, v in self._settings.items()}
        return outer | dict(self._code.variables) | settings

    @property
    def working_directory(self) -> Path:
        return self._code.checkout

    async def is_serving(self) -> bool:
        return READY in self.log(this_run=True)

    def _command(self) -> list[str]:
        if "metadata_store_url" in self._settings:
            return ["broker"]
        return ["standalone", "--data-dir", str(self.data_dir)]

    # What is asked about it

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

    # Talking to it

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of its clients, None without TLS."""
        return None if self.security is None else self.security.context

    @property
    def web_url(self) -> str:
        """`http://host:port`, or with https."""
        return f"http{'s' if self.security else ''}://{HOST}:{self.http_port}"

    async def connect(self, connect: pb.CommandConnect | None = None) -> RawClient:
        """A connection that has shaken hands."""
        if connect is None and self.security is not None:
            connect = self.security.connect()
        return await RawClient.open(HOST, self.port, connect, tls=self.tls)

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
        async with (
            self._session() as session,
            session.request(method, path, params=query, json=body, ssl=self.tls or True) as answer,
        ):
            text = await answer.text()
            return answer.status, _json_or(text)

    def _session(self) -> aiohttp.ClientSession:
        headers = {} if self.security is None else self.security.headers()
        return aiohttp.ClientSession(self.web_url, headers=headers)

    async def metric(self, name: str) -> float:
        """The sum of a metric over all its labels."""
        async with (
            self._session() as session,
            session.get("/metrics", ssl=self.tls or True) as answer,
        ):
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
    directory: Path,
    settings: Mapping[str, object] | None = None,
    security: Security | None = None,
) -> AsyncIterator[BrokerProcess]:
    """A broker that serves, and whose process is gone afterwards, whatever happens."""
    broker = BrokerProcess(directory, settings, security=security)
    try:
        await broker.start()
        yield broker
    finally:
        broker.kill()
