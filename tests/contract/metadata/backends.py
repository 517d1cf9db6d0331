"""The backends that the contract suite runs on, and what tests need beside the interface.

To add one: append a `Backend` to `BACKENDS`; one on a real server names the fixture that starts it,
and `on_part` makes it of that.
"""

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from config import bounds
from storage.clock import SystemClock
from storage.metadata.open import open_metadata_store
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.recent_changes import RecentChanges
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import Event, EventKind, MetadataStore, Watch
from storage.metadata.zookeeper.store import ZooKeeperMetadataStore
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.empty_oxia import empty_oxia
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import TIMEOUT_S

"""How long a test waits for what must come."""


@dataclass(frozen=True)
class Backend:
    """A kind of store, opened empty in a directory of its own."""

    name: str
    open: Callable[[Path], Awaitable[MetadataStore]]
    shortest_session_ms: int
    part: str | None = None
    """The fixture that starts the real server, for backends that need one."""
    join: Callable[[MetadataStore], Awaitable[MetadataStore]] | None = None
    """Opens another client of a store's records, which writes too; None: one process has them."""
    model_examples: int = 25
    """How many random histories are compared with the model."""


async def open_memory(_directory: Path) -> MetadataStore:
    return await open_metadata_store("memory:", SystemClock())


async def open_sqlite(directory: Path) -> MetadataStore:
    return await open_metadata_store(f"sqlite:{directory / 'metadata.db'}", SystemClock())


async def open_sqlite_without_memory(directory: Path) -> MetadataStore:
    """So that every read is one of the file."""
    store = await SqliteMetadataStore.open(directory / "metadata.db", SystemClock())
    store._recent = RecentChanges(max_keys=0)
    return store


def on_zookeeper(server: ZooKeeperServer) -> Backend:
    """Each store on an empty node of its own.  The server's ticks bound how short sessions are."""

    async def open_zookeeper(_directory: Path) -> MetadataStore:
        url = f"zk:{server.address}/t{uuid.uuid4().hex[:12]}/below"
        return await open_metadata_store(url, SystemClock(), random.Random())

    async def join_zookeeper(store: MetadataStore) -> MetadataStore:
        assert isinstance(store, ZooKeeperMetadataStore)
        return await ZooKeeperMetadataStore.open(store._address, SystemClock(), random.Random())

    return Backend("zookeeper", open_zookeeper, 2 * server.tick_ms, join=join_zookeeper)


def on_oxia(server: OxiaServer) -> Backend:
    """Each store on the server's one namespace, emptied before."""

    async def open_oxia(_directory: Path) -> MetadataStore:
        await empty_oxia(server.address)
        return await open_metadata_store(f"oxia://{server.address}", SystemClock(), random.Random())

    shortest_ms = bounds.OXIA_SESSION_TIMEOUT_MIN_MS
    return Backend("oxia", open_oxia, shortest_session_ms=shortest_ms)


class SimulatedOxiaStore(OxiaMetadataStore):
    """The first client of a cluster that runs as long as it is open."""

    servers: tuple[FakeOxia, ...] = ()

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            for server in self.servers:
                await server.stop()


async def open_simulated_oxia(_directory: Path) -> MetadataStore:
    """On three servers, which lead four shards."""
    world = World()
    servers = tuple(FakeOxia(world) for _ in range(3))
    for server in servers:
        await server.start()
    addresses = [server.address for server in servers]
    world.lead(*addresses, addresses[0])
    url = f"oxia://{','.join(addresses)}"
    store = await SimulatedOxiaStore.open(url, SystemClock(), random.Random())
    assert isinstance(store, SimulatedOxiaStore)
    store.servers = servers
    return store


async def join_simulated_oxia(store: MetadataStore) -> MetadataStore:
    assert isinstance(store, SimulatedOxiaStore)
    url = f"oxia://{','.join(server.address for server in store.servers)}"
    return await open_metadata_store(url, SystemClock(), random.Random())


async def open_no_server(_directory: Path) -> MetadataStore:
    raise AssertionError("the fixture `backend` gives the server")


BACKENDS = (
    Backend("memory", open_memory, shortest_session_ms=60),
    Backend("sqlite", open_sqlite, shortest_session_ms=60),
    Backend("sqlite-file", open_sqlite_without_memory, shortest_session_ms=60),
    Backend(
        "oxia-simulated",
        open_simulated_oxia,
        shortest_session_ms=bounds.OXIA_SESSION_TIMEOUT_MIN_MS,
        join=join_simulated_oxia,
        model_examples=8,
    ),
    Backend("zookeeper", open_no_server, shortest_session_ms=1000, part="zookeeper"),
    Backend("oxia", open_no_server, shortest_session_ms=2000, part="oxia"),
)


def on_part(backend: Backend, part: object) -> Backend:
    """The backend on its server."""
    match part:
        case ZooKeeperServer():
            return on_zookeeper(part)
        case OxiaServer():
            return on_oxia(part)
    return backend


async def next_event(watch: Watch) -> Event:
    """The next event, or a failed test if none comes."""
    return await asyncio.wait_for(anext(watch), TIMEOUT_S)


async def events_until(watch: Watch, last: Callable[[Event], bool]) -> list[Event]:
    """Events up to and with the first one that fits."""
    events = [await next_event(watch)]
    while not last(events[-1]):
        events.append(await next_event(watch))
    return events


def brief(event: Event) -> tuple[EventKind, str, bytes | None]:
    """An event as tests compare it."""
    return event.kind, event.key, None if event.record is None else event.record.value
