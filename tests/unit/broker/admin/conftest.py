"""A broker with its REST port, and who asks it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from broker.admin.app import AdminServer
from broker.app.service import Broker
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.roles import bearer, token_of

TOPIC = "persistent://public/default/t"
TOPIC_PATH = "/admin/v2/persistent/public/default/t"


class Rest:
    """Calls one broker; answers are (status, decoded body)."""

    def __init__(self, session: aiohttp.ClientSession, port: int, binary_port: int) -> None:
        self._session = session
        self.base = f"http://127.0.0.1:{port}"
        self.port = port
        self.binary_port = binary_port
        self.role: str | None = None
        """The role whose token every request has; None: requests have no credentials."""

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        json = {} if body is None else {"json": body}
        headers = {} if self.role is None else bearer(token_of(self.role))
        async with self._session.request(
            method,
            self.base + path,
            headers=headers,
            **json,  # type: ignore[arg-type]
        ) as answer:
            text = await answer.text()
            if "application/json" in answer.headers.get("Content-Type", ""):
                return answer.status, await answer.json()
            return answer.status, text

    async def send(self, method: str, path: str, text: str, content_type: str) -> tuple[int, str]:
        """A body as a tool writes it, under its own content type."""
        return await self.raw(method, path, text, {"Content-Type": content_type})

    async def raw(
        self, method: str, path: str, text: str, headers: dict[str, str]
    ) -> tuple[int, str]:
        """A body under these headers, and no content type but theirs."""
        url, body = self.base + path, text.encode() or None
        async with self._session.request(
            method, url, data=body, headers=headers, skip_auto_headers=("Content-Type",)
        ) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> object:
        status, body = await self.call("GET", path)
        assert status == 200, (path, body)
        return body

    async def done(self, method: str, path: str, body: object = None) -> None:
        status, answer = await self.call(method, path, body)
        assert status == 204, (method, path, answer)

    async def refused(self, status: int, method: str, path: str, body: object = None) -> str:
        """The reason of a refusal with the expected status."""
        got, answer = await self.call(method, path, body)
        assert got == status, (method, path, answer)
        assert isinstance(answer, dict)
        assert list(answer) == ["reason"]
        return str(answer["reason"])


@asynccontextmanager
async def asking_broker(broker: Broker) -> AsyncIterator[Rest]:
    """A broker that runs already."""
    admin = AdminServer(broker)
    await admin.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Rest(session, admin.port, broker.port)
    finally:
        await admin.stop()


@asynccontextmanager
async def asking(data: Path, **settings: object) -> AsyncIterator[Rest]:
    """A broker of its own with these settings."""
    async with running(data, **settings) as broker, asking_broker(broker) as rest:
        yield rest


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[Rest]:
    async with asking(tmp_path, auto_topic_creation=False) as rest:
        yield rest


@pytest.fixture
async def creating(tmp_path: Path) -> AsyncIterator[Rest]:
    """Of a broker that makes topics when they are first used."""
    async with asking(tmp_path, auto_topic_creation=True) as rest:
        yield rest


@pytest.fixture
async def client(rest: Rest) -> AsyncIterator[RawClient]:
    """A client of the broker of `rest`."""
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    yield client
    await client.close()


class Served:
    """A broker with the topic `TOPIC`, its REST port, and a client."""

    def __init__(self, broker: Broker, rest: Rest, client: RawClient) -> None:
        self.broker = broker
        self.rest = rest
        self.client = client

    async def stats(self, path: str = TOPIC_PATH) -> dict[str, object]:
        stats = await self.rest.get(f"{path}/stats")
        assert isinstance(stats, dict)
        return stats


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with running(tmp_path) as broker, asking_broker(broker) as rest:
        client = await RawClient.open("127.0.0.1", broker.port)
        await rest.done("PUT", TOPIC_PATH)
        yield Served(broker, rest, client)
        await client.close()
