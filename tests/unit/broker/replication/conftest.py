"""Clusters of one broker each, which replicate `public/default` to each other."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.app.service import Broker
from broker.replication.replicator import Replicator
from broker.replication.topic_replication import ReplicatedTopic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.child_process import free_port
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.raw_handles import Delivery
from tests.unit.broker.admin.conftest import Rest, asking_broker

TOPIC = "persistent://public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
FROM_THE_BEGINNING = pb.CommandSubscribe(
    sub_type=pb.CommandSubscribe.Shared, initial_position=pb.CommandSubscribe.Earliest
)


class Cluster:
    """One cluster: a broker that can be stopped and started on the same data and ports."""

    def __init__(self, directory: Path, name: str, **settings: object) -> None:
        self.name = name
        self.settings = {"port": free_port(), **settings}
        """Those of the broker when it starts the next time."""
        self.broker: Broker
        self.rest: Rest
        self._directory = directory
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Begin to serve."""
        started = running(self._directory / self.name, cluster_name=self.name, **self.settings)
        self.broker = await self._running.enter_async_context(started)
        self.rest = await self._running.enter_async_context(asking_broker(self.broker))

    async def stop(self) -> None:
        """End."""
        await self._running.aclose()

    async def ask(self, method: str, path: str, body: object = None) -> None:
        """A request over REST that succeeds."""
        await self.rest.done(method, path, body)

    @property
    def record(self) -> dict[str, object]:
        """What others register."""
        return {
            "brokerServiceUrl": f"pulsar://127.0.0.1:{self.broker.port}",
            "serviceUrl": f"http://127.0.0.1:{self.rest.port}",
        }

    async def set_up(self, others: Sequence["Cluster"]) -> None:
        """Register the others, and let the namespace have all of them."""
        names = sorted([self.name, *(each.name for each in others)])
        for other in others:
            await self.ask("PUT", f"/admin/v2/clusters/{other.name}", other.record)
        await self.ask("POST", "/admin/v2/tenants/public", {"allowedClusters": names})
        await self.replicate(*names)

    async def replicate(self, *names: str) -> None:
        """Set the list of clusters of the namespace."""
        await self.ask("POST", f"{NAMESPACE}/replication", list(names))

    async def keep_messages(self) -> None:
        """Let the namespace keep all messages, whoever has read them."""
        forever = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        await self.ask("POST", f"{NAMESPACE}/retention", forever)

    async def client(self) -> RawClient:
        """A new client."""
        return await RawClient.open("127.0.0.1", self.broker.port)

    async def publish(self, *payloads: bytes, topic: str = TOPIC) -> None:
        """Store messages of a new producer."""
        client = await self.client()
        producer = await client.create_producer(topic)
        for payload in payloads:
            await producer.send(payload)
        await client.close()

    async def messages(self, count: int, topic: str = TOPIC) -> list[Delivery]:
        """The first messages of a topic since the first call, which keeps what comes later."""
        client = await self.client()
        consumer = await client.subscribe(topic, "reader", FROM_THE_BEGINNING, permits=1000)
        found = [await consumer.receive() for _ in range(count)]
        await client.close()
        return found

    async def payloads(self, count: int, topic: str = TOPIC) -> list[bytes]:
        """Of the first messages of a topic."""
        return [each.payload for each in await self.messages(count, topic)]

    async def stats(self) -> Any:  # noqa: ANN401 - JSON
        """The statistics of the topic."""
        return await self.rest.get("/admin/v2/persistent/public/default/t/stats")

    def replicators(self, topic: str = TOPIC) -> dict[str, Replicator]:
        """Those of a loaded topic."""
        loaded = self.broker.topics.loaded().get(str(parse_topic_name(topic)))
        if loaded is None:
            return {}
        assert isinstance(loaded.replication, ReplicatedTopic)
        return loaded.replication.replicators

    def is_done(self, topic: str = TOPIC) -> bool:
        """Whether the others have all that the topic has."""
        replicators = self.replicators(topic)
        return bool(replicators) and all(
            each.subscription.backlog == 0 for each in replicators.values()
        )


def send_at_most(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, largest: int) -> None:
    """Have senders to a cluster believe that it takes entries of so many bytes, and no larger."""
    module = "broker.replication.cluster_producer"
    headroom = largest - cluster.broker.max_message_size
    set_bound(monkeypatch, "ENTRY_HEADROOM", headroom, in_module=module)


@asynccontextmanager
async def replicating(*clusters: Cluster) -> AsyncIterator[None]:
    """Run clusters that replicate to each other."""
    for each in clusters:
        await each.start()
    for each in clusters:
        await each.set_up([other for other in clusters if other is not each])
    try:
        yield
    finally:
        for each in clusters:
            await each.stop()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """East and west."""
    east, west = Cluster(tmp_path, "east"), Cluster(tmp_path, "west")
    async with replicating(east, west):
        yield east, west
