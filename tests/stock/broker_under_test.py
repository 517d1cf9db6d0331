"""Brokers that the stock cases and the benchmark start: Magnetar, and what the peer shares.

Rules: a broker is a child process on 127.0.0.1 with ports that stay the same over `stop` or `kill`
and `start`; its log is in its directory; `start` returns when REST says that it is healthy.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 30


class BrokerUnderTest(Protocol):
    """A broker process that can be taken away and brought back with its data."""

    @property
    def url(self) -> str:
        """`pulsar://host:port`."""
        ...

    @property
    def admin_url(self) -> str:
        """`http://host:port`."""
        ...

    @property
    def pid(self) -> int:
        """Process id while it runs."""
        ...

    def spawn(self) -> None:
        """Start the process and return at once."""
        ...

    def start(self) -> None:
        """Start the process and wait until it serves."""
        ...

    def stop(self) -> None:
        """SIGTERM, and wait."""
        ...

    def kill(self) -> None:
        """SIGKILL, at once."""
        ...


class BrokerFailed(RuntimeError):
    """The broker did not come up or did not stop; the message ends with its log."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class MagnetarProcess:
    """`magnetar standalone` with its own data directory."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.port = free_port()
        self.http_port = free_port()
        self._settings = settings or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.directory / "broker.log"

    def spawn(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {f"MAGNETAR_{name.upper()}": value for name, value in self._settings.items()}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "broker.cli.main", "standalone"),
                    *("--data-dir", str(self.directory / "data")),
                    *("--port", str(self.port), "--http-port", str(self.http_port)),
                ],
                cwd=ROOT,
                env={**os.environ, "MAGNETAR_BIND_HOST": "127.0.0.1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start(self) -> None:
        self.spawn()
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._healthy():
                return
            time.sleep(0.05)
        self.kill()
        raise BrokerFailed(f"Magnetar did not come up in {START_TIMEOUT_S} s:\n{self._log_end()}")

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokerFailed(
                f"Magnetar did not stop within {STOP_TIMEOUT_S} s of SIGTERM:\n{self._log_end()}"
            ) from None
        self._process = None
        if status != 0:
            raise BrokerFailed(f"Magnetar ended with status {status}:\n{self._log_end()}")

    def kill(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"{self.admin_url}/admin/v2/brokers/health", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _log_end(self) -> str:
        return "\n".join(self.log_path.read_text("utf-8", "replace").splitlines()[-30:])
