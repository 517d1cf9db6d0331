"""Clusters of broker processes, which replicate `public/default` to each other.

Rules: those of `replicating` have one broker each, and reach each other through a `Link`, a relay
that the test can cut, tear and hold; REST goes straight.  Brokers deduplicate, so that each message
is to be in each cluster once.  Every process is gone and every link closed at the end.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST
from tests.support.frame_relay import CutByRelay, FrameRelay, serving
from tests.support.waiting import until_awaited

NAMESPACE: Final = "/namespaces/public/default"
REPLICATED_S: Final = 60
"""How long the last messages may take to all clusters, on a machine that has much else to do."""


@dataclass
class Link(FrameRelay):
    """The way from one cluster to the broker of another one."""

    entries: int = 0
    """Entries that went to the broker."""
    _down: bool = False
    _torn: bool = False
    _passing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """All passes."""
        self._passing.set()

    def cut(self) -> None:
        """End all connections, and let none through until `mend`."""
        self._down = True
        self._passing.set()
        self.reset()

    def mend(self) -> None:
        """Let everything through again, what was held too."""
        self._down = False
        self._passing.set()

    def hold(self) -> None:
        """Let no byte through, and end no connection, until `mend`."""
        self._passing.clear()

    def tear(self) -> None:
        """Send half of the next entry, and end its connection."""
        self._torn = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As `FrameRelay.serve`."""
        if self._down:
            writer.transport.abort()
            return
        await super().serve(reader, writer)

    async def send_on(
        self, frame: bytes, command: pb.BaseCommand | None, writer: asyncio.StreamWriter
    ) -> None:
        """As `FrameRelay.send_on`."""
        await self._passing.wait()
        if command is None:
            if self._torn:
                self._torn = False
                writer.write(frame[: len(frame) // 2])
                writer.close()
                await writer.wait_closed()
                raise CutByRelay
            self.entries += 1
        writer.write(frame)

    async def hand_back(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        """As `FrameRelay.hand_back`."""
        await self._passing.wait()
        writer.write(frame)

    async def close(self) -> None:
        """As `FrameRelay.close`."""
        self._passing.set()
        await super().close()


class Cluster:
    """A cluster, and the other ones that it knows."""

    def __init__(self, name: str, brokers: Sequence[BrokerProcess]) -> None:
        self.name = name
        self.brokers = brokers
        self.others: set[str] = set()
        self.links: dict[str, Link] = {}
        """To those of the other clusters that are reached through one."""

    @property
    def broker(self) -> BrokerProcess:
        """The broker, or the first one that runs."""
        return next((each for each in self.brokers if each.running), self.brokers[0])

    @property
    def url(self) -> str:
        """`pulsar://` and all brokers."""
        return "pulsar://" + ",".join(f"{HOST}:{each.port}" for each in self.brokers)

    async def ask(self, method: str, path: str, body: object = None) -> object:
        """A REST request below /admin/v2 that succeeds; its answer."""
        status, answer = await self.broker.rest(method, path, body=body)
        assert status < 300, (self.name, method, path, status, answer)
        return answer

    async def register(self, other: "Cluster", link: Link | None = None) -> None:
        """Make the other cluster known here, which is reached by the link if there is one."""
        self.others.add(other.name)
        if link is not None:
            self.links[other.name] = link
        data = {
            "brokerServiceUrl": other.url if link is None else link.url,
            "serviceUrl": other.broker.web_url,
        }
        await self.ask("PUT", f"/clusters/{other.name}", data)
        await self.ask("POST", "/tenants/public", {"allowedClusters": self.all_names})

    @property
    def all_names(self) -> list[str]:
        """Its own name and those that it knows."""
        return sorted({self.name, *self.others})

    async def replicate(self, names: Iterable[str]) -> None:
        """Set the list of clusters of the namespace."""
        await self.ask("POST", f"{NAMESPACE}/replication", sorted(names))

    async def backlogs(self, topic: str) -> dict[str, int]:
        """The number of entries that each other cluster lacks of a topic, or of a partition."""
        answer = await self.ask("GET", f"/{topic.replace('://', '/')}/stats")
        assert isinstance(answer, dict)
        shown = answer["replication"]
        return {name: shown[name]["replicationBacklog"] for name in shown}

    async def has_sent(self, topics: Iterable[str]) -> bool:
        """Whether all other clusters have all of these topics."""
        for topic in topics:
            backlogs = await self.backlogs(topic)
            if set(backlogs) != self.others or any(backlogs.values()):
                return False
        return True


def settings_of(name: str, more: Mapping[str, object]) -> Mapping[str, object]:
    """Those of each broker of a cluster."""
    return {"cluster_name": name, "deduplication": True, **more}


@asynccontextmanager
async def replicating(
    directory: Path,
    names: Sequence[str],
    settings: Mapping[str, object] | None = None,
    process: type[BrokerProcess] = BrokerProcess,
) -> AsyncIterator[list[Cluster]]:
    """Clusters that serve and know each other; the namespace's list has all of them."""
    clusters = [
        Cluster(name, [process(directory / name, settings_of(name, settings or {}))])
        for name in names
    ]
    async with AsyncExitStack() as stack:
        for each in clusters:
            stack.callback(each.broker.kill)
            each.broker.spawn()
        for each in clusters:
            await each.broker.until_serving()
        for each in clusters:
            for other in clusters:
                if other is not each:
                    link = await stack.enter_async_context(serving(Link(other.broker.port)))
                    await each.register(other, link)
            await each.replicate(names)
        yield clusters


async def until_replicated(
    clusters: Sequence[Cluster], topics: Sequence[str], timeout_s: float = REPLICATED_S
) -> None:
    """Return when each cluster has sent all that it has of these topics to all others."""
    for each in clusters:
        try:
            await until_awaited(lambda: each.has_sent(topics), timeout_s)  # noqa: B023
        except TimeoutError:
            shown = {topic: await each.backlogs(topic) for topic in topics}
            raise AssertionError(f"{each.name} has not sent all: {shown}") from None
