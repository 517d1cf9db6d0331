"""The broker that is attacked, and what an attack is."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import aiohttp

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import connect_as
from tests.support.security import ROOT_ROLE

REFUSALS = (OSError, BrokerError, TimeoutError, aiohttp.ClientError)
"""Errors of requests that the broker refuses, and of connections that it closes."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Target:
    """A broker on `HOST`: its ports and its process.

    `directory` has the files of its security, and is empty for a broker without; with them both
    ports have TLS only.  `share` is the part of an attack that is wanted, from 0 to 1; `round` is 1
    in a second round.
    """

    port: int
    http_port: int
    pid: int
    directory: str = ""
    share: float = 1.0
    round: int = 0

    @property
    def words(self) -> str:
        """The argument from which the process of an attack makes it again."""
        return json.dumps(asdict(self))

    def count(self, whole: int) -> int:
        """How many of so many requests are wanted."""
        return max(1, round(whole * self.share))

    @property
    def files(self) -> Path:
        """The directory with the files of its security."""
        return Path(self.directory)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The context of clients, None without TLS."""
        if not self.directory:
            return None
        return ssl.create_default_context(cafile=str(self.files / "authority.pem"))

    def url(self, path: str) -> str:
        """A URL of its REST interface."""
        return f"http{'s' if self.directory else ''}://{HOST}:{self.http_port}{path}"

    def connect_as(self, role: str) -> pb.CommandConnect | None:
        """CONNECT with a token of the role, None without authentication."""
        return connect_as(role) if self.directory else None

    @asynccontextmanager
    async def client(self, role: str = ROOT_ROLE) -> AsyncIterator[RawClient]:
        """A connection that has shaken hands, and is logged in where that is asked for."""
        client = await RawClient.open(
            HOST, self.port, self.connect_as(role), timeout_s=TIMEOUT_S, tls=self.tls
        )
        try:
            yield client
        finally:
            await client.close()


Step = Callable[[Target], Coroutine[object, object, Sequence[str] | None]]
"""A part of an attack.  It returns a sentence for each wrong that the broker has done."""

Beside = Callable[[Target, asyncio.Event], Coroutine[object, object, Sequence[str]]]
"""It runs beside an attack until the event is set, and returns sentences as a `Step` does."""


async def nothing(_: Target) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Attack:
    """`prepare` runs before memory is measured.  `requests` is the number of hostile ones.

    `secured`: the broker has TLS, tokens, passwords and authorization.  `beside` runs beside the
    attack until the event, in the process of the probe.  With `twice` memory is measured after a
    first round: what that leaves is free memory that Python or glibc keeps, so the second round
    must not add to it.
    """

    what: str
    requests: int
    run: Step
    prepare: Step = nothing
    settings: Mapping[str, object] = field(default_factory=dict)
    secured: bool = False
    beside: Beside | None = None
    twice: bool = False
