"""What the client's behaviour tests stand on: a broker, a client of it, scalable topics.

Rules: they run on Magnetar and on Apache Pulsar (`--peer`), save those marked
`magnetar_only("why")`, where the peer lacks something or fails at it. All tests of a run share one
broker; each has a client of its own and makes topics of its own.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import pytest

import magnetar
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.fixtures import RunningPeer

Service = BrokerUnderTest | RunningPeer
NAMESPACE = "public/default"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "magnetar_only(why): not on Apache Pulsar")


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest, on_peer: bool) -> Service:
    """The broker of all tests: has `url`, `admin_url`. It has transactions."""
    # The broker of the stock cases asks for Java, which these tests need on the peer only.
    service: Service = request.getfixturevalue("broker" if on_peer else "embedded_broker")
    return service


@pytest.fixture(autouse=True)
def _only_on_magnetar(request: pytest.FixtureRequest, on_peer: bool) -> None:
    marker = request.node.get_closest_marker("magnetar_only")
    if marker is not None:
        assert marker.args, 'say why: @pytest.mark.magnetar_only("...")'
        if on_peer:
            pytest.skip(f"not on Apache Pulsar: {marker.args[0]}")


@pytest.fixture
async def client(service: Service) -> AsyncIterator[magnetar.Client]:
    """A client of the broker; what the test leaves open is closed with it."""
    async with magnetar.connect(service.url) as client:
        yield client


async def rest(
    service: Service, method: str, path: str, *, body: object = None, **query: str | int
) -> tuple[int, object]:
    """One REST request below /admin/v2: status and body (JSON where it is)."""
    url = f"{service.admin_url}/admin/v2{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, params=query, json=body) as answer,
    ):
        text = await answer.text()
        if answer.content_type == "application/json" and text:
            return answer.status, await answer.json()
        return answer.status, text


@dataclass(frozen=True)
class Topic:
    """A scalable topic that a test has made."""

    service: Service
    local_name: str

    @property
    def name(self) -> str:
        """`topic://public/default/...`."""
        return f"topic://{NAMESPACE}/{self.local_name}"

    def __str__(self) -> str:
        return self.name

    async def split(self, segment_id: int) -> None:
        """Cut a segment in two; returns when the new layout is stored."""
        await self._ask("POST", f"/split/{segment_id}")

    async def merge(self, first_id: int, second_id: int) -> None:
        """Make two neighbours one; returns when the new layout is stored."""
        await self._ask("POST", f"/merge/{first_id}/{second_id}")

    async def rebucket(self, segment_id: int, buckets: int) -> None:
        """Replace a segment by one with so many entry buckets; returns when that is stored."""
        await self._ask("POST", f"/rebucket/{segment_id}", bucketCount=buckets)

    async def delete(self) -> None:
        """With whatever is attached to it."""
        await self._ask("DELETE", "", force="true")

    async def segments(self) -> dict[int, bool]:
        """The ids of all segments, and whether each is active."""
        record = await self._ask("GET", "")
        assert isinstance(record, dict)
        return {int(key): each["state"] == "ACTIVE" for key, each in record["segments"].items()}

    async def active(self) -> list[int]:
        """The ids of the active segments, in the order in which they were made."""
        return sorted(key for key, active in (await self.segments()).items() if active)

    async def active_by_range(self) -> list[int]:
        """The ids of the active segments, neighbours beside each other."""
        record = await self._ask("GET", "")
        assert isinstance(record, dict)
        active = [each for each in record["segments"].values() if each["state"] == "ACTIVE"]
        active.sort(key=lambda each: int(each["hashRange"]["start"]))
        return [int(each["segmentId"]) for each in active]

    async def _ask(self, method: str, path: str, **query: str | int) -> object:
        full = f"/scalable/{NAMESPACE}/{self.local_name}{path}"
        status, answer = await rest(self.service, method, full, **query)
        assert status in (200, 204), (method, full, status, answer)
        return answer


MakeTopic = Callable[..., Awaitable[Topic]]


@pytest.fixture
def topic(service: Service, request: pytest.FixtureRequest) -> MakeTopic:
    """Makes a scalable topic: `await topic(segments=1, properties=None, name=None)`."""

    async def make(
        segments: int = 1, *, properties: dict[str, str] | None = None, name: str | None = None
    ) -> Topic:
        prefix = request.node.originalname.removeprefix("test_").replace("_", "-")[:40]
        local_name = name or f"{prefix}-{uuid.uuid4().hex[:8]}"
        path = f"/scalable/{NAMESPACE}/{local_name}"
        body = properties or {}
        status, answer = await rest(service, "PUT", path, body=body, numInitialSegments=segments)
        assert status == 204, answer
        return Topic(service, local_name)

    return make
