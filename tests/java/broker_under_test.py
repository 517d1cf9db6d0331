"""What the stock cases and the benchmark ask of a broker process, and Magnetar as such a one.

Rules: a broker is a child process on 127.0.0.1 with ports that stay the same over `stop` or `kill`
and `start`; `start` returns when it serves; a Magnetar that logged a fault of its own has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tests.support.broker_process import BrokerFailed, BrokerProcess, Code
from tests.support.child_process import HOST


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

    def faults(self) -> str:
        """The log, if it tells of a fault of the broker's own; else nothing."""
        ...


class MagnetarProcess:
    """`magnetar standalone` in the shape of `BrokerUnderTest`."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        code: Code | None = None,
    ) -> None:
        self._broker = BrokerProcess(directory, settings, code)

    @property
    def url(self) -> str:
        return f"pulsar://{HOST}:{self._broker.port}"

    @property
    def admin_url(self) -> str:
        return f"http://{HOST}:{self._broker.http_port}"

    @property
    def pid(self) -> int:
        return self._broker.pid

    def spawn(self) -> None:
        self._broker.spawn()

    def start(self) -> None:
        asyncio.run(self._broker.start())

    def stop(self) -> None:
        if not self._broker.running:
            return
        status = asyncio.run(self._broker.terminate())
        if status != 0:
            log = self._broker.log(this_run=True)[-4000:]
            raise BrokerFailed(f"Magnetar ended with status {status}:\n{log}")

    def kill(self) -> None:
        self._broker.kill()

    def faults(self) -> str:
        return self._broker.log()[-20_000:] if self._broker.faults() else ""
