"""A broker in this process whose ports speak TLS, with its REST server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from broker.admin.app import AdminServer
from broker.app.service import Broker
from tests.support.authority import HOST, Authority, server_settings
from tests.support.certificates import Certificate
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient


@dataclass(frozen=True)
class Served:
    """A broker with TLS and its REST server."""

    broker: Broker
    admin: AdminServer
    authority: Authority
    certificate: Certificate

    @property
    def url(self) -> str:
        url = self.broker.placement.me.url_tls
        assert url is not None
        return url

    async def raw(self, certificate: Certificate | None = None) -> RawClient:
        """A client of the bare protocol over TLS."""
        tls = self.authority.client_context(certificate)
        assert self.broker.port_tls is not None
        return await RawClient.open(HOST, self.broker.port_tls, tls=tls)

    async def get(self, path: str, **given: object) -> aiohttp.ClientResponse:
        """Ask REST over TLS; redirects are not followed."""
        tls = self.authority.client_context()
        async with (
            aiohttp.ClientSession(f"https://{HOST}:{self.admin.port_tls}") as session,
            session.get(path, ssl=tls, allow_redirects=False, **given) as answer,  # type: ignore[arg-type]
        ):
            await answer.read()
            return answer


@asynccontextmanager
async def serving(directory: Path, authority: Authority, **more: object) -> AsyncIterator[Served]:
    certificate = authority.issue("broker")
    given = server_settings(certificate) | more
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(running(directory / "data", **given))
        admin = AdminServer(broker)
        stack.push_async_callback(admin.stop)
        await admin.start()
        yield Served(broker, admin, authority, certificate)
