"""Several whole brokers in this process, on one metadata store and one ledger store that fences.

A `Node` is one process: its broker, its REST server, and its own view of the stores.  A view can be
shut: then calls do not return and watches tell nothing, as for a process that stands still or is
dead.  Its sessions can end with it knowing, or without.
"""

import asyncio
import random
from contextlib import AsyncExitStack
from typing import cast

import aiohttp

from broker.admin.app import AdminServer
from broker.app.service import Broker
from broker.app.stores import Stores
from broker.placement.load import Totals
from broker.placement.several import SeveralBrokers
from config.settings import Settings
from magnetar.protocol.names import parse_topic_name
from storage.clock import SystemClock
from storage.ledger.store import LedgerStore
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.sessions import KeptSession
from storage.metadata.store import Event, MetadataStore, Session, Watch
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.fakes import FakeLedgerStore


class ViewedWatch:
    """A watch of a process: silent while its view is shut, and while the view's watches are held.

    A spoiled one ends with its error.
    """

    def __init__(self, watch: Watch, *gates: asyncio.Event) -> None:
        self._watch = watch
        self._gates = gates
        self.spoiled_by: Exception | None = None

    def __aiter__(self) -> "ViewedWatch":
        return self

    async def __anext__(self) -> Event:
        event = await self._watch.__anext__()
        for gate in self._gates:
            await gate.wait()
        if self.spoiled_by is not None:
            raise self.spoiled_by
        return event

    def close(self) -> None:
        self._watch.close()


class View:
    """The metadata store as one process sees it."""

    def __init__(self, store: MemoryMetadataStore) -> None:
        self._store = store
        self.sessions: list[KeptSession] = []
        self._watches: list[ViewedWatch] = []
        self.open = asyncio.Event()
        self.open.set()
        self.watching = asyncio.Event()
        """Clear while watches are held back: what others write can be read, and is not told."""
        self.watching.set()

    def __getattr__(self, name: str) -> object:
        method = getattr(self._store, name)
        if name.startswith("watch_"):
            return lambda *args, **kwargs: self._viewed(method(*args, **kwargs))

        async def call(*args: object, **kwargs: object) -> object:
            await self.open.wait()
            found = await method(*args, **kwargs)
            await self.open.wait()
            return found

        return call

    def _viewed(self, watch: Watch) -> ViewedWatch:
        viewed = ViewedWatch(watch, self.open, self.watching)
        self._watches.append(viewed)
        return viewed

    def spoil_watches(self, error: Exception) -> None:
        """Have every watch that there is end with this, instead of its next event."""
        for watch in self._watches:
            watch.spoiled_by = error

    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        await self.open.wait()
        session = await self._store.open_session(timeout_ms=timeout_ms, identity=identity)
        self.sessions.append(cast("KeptSession", session))
        return session

    async def expire(self, *, quietly: bool = False) -> None:
        """Every session of the process ends in the store; unless `quietly` it is told so."""
        sessions, self.sessions = self.sessions, []
        for session in sessions:
            if quietly:
                await session._keeper.removed(session)
            else:
                await session.close()

    async def close(self) -> None:
        await self.expire()


class LedgerView:
    """The ledger store as one process sees it: closing it closes nothing."""

    def __init__(self, store: FakeLedgerStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def close(self) -> None:
        return None


class Node:
    """One broker with its REST server."""

    def __init__(self, cluster: "Cluster", settings: Settings) -> None:
        self.cluster = cluster
        self.view = View(cluster.metadata)
        stores = Stores(
            cast("MetadataStore", self.view),
            cast("LedgerStore", LedgerView(cluster.ledgers)),
            shared=True,
        )
        self.broker = Broker(
            settings, clock=SystemClock(), rng=random.Random(cluster.rng.random()), stores=stores
        )
        self.admin = AdminServer(self.broker)
        self.clients: list[RawClient] = []
        self.stopped = False

    @property
    def placement(self) -> SeveralBrokers:
        return cast("SeveralBrokers", self.broker.placement)

    @property
    def id(self) -> str:
        return self.broker.broker_id

    async def start(self) -> "Node":
        await self.broker.start()
        self.placement._totals = Totals
        await self.admin.start()
        return self

    async def stop(self) -> None:
        """A clean end without a drain, unless there was another one."""
        if self.stopped:
            return
        self.stopped = True
        self.view.open.set()
        self.view.watching.set()
        for client in self.clients:
            await client.close()
        await self.admin.stop()
        await self.broker.stop()

    async def kill(self) -> None:
        """Gone without a word; its sessions expire."""
        self.view.open.clear()
        await self.broker._server.stop()
        for connection in list(self.broker.connections):
            connection.abort("killed")
        await self.admin.stop()
        await self.view.expire(quietly=True)

    async def client(self) -> RawClient:
        client = await RawClient.open("127.0.0.1", self.broker.port)
        self.clients.append(client)
        return client

    def owns(self, topic: str) -> bool:
        return self.placement.owns(parse_topic_name(topic))

    def owner_of(self, topic: str) -> str:
        return self.placement.owner_of(parse_topic_name(topic)).broker_id


class Cluster:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.metadata = MemoryMetadataStore(SystemClock())
        self.ledgers = FakeLedgerStore(SystemClock())
        self.rng = random.Random(1)
        self.nodes: list[Node] = []
        self.http = aiohttp.ClientSession()
        self._exit = AsyncExitStack()

    async def add(self, **settings: object) -> Node:
        """One more broker, that all others know of."""
        given = {
            "port": 0,
            "http_port": 0,
            "bind_host": "127.0.0.1",
            "transaction_coordinators": 4,
            "scalable_topic_auto_scale_enabled": False,
        } | settings
        node = Node(self, Settings(**given))  # type: ignore[arg-type]
        self._exit.push_async_callback(node.stop)
        await node.start()
        self.nodes.append(node)
        await self.all_know(*(each for each in self.nodes if not each.stopped))
        return node

    async def all_know(self, *nodes: Node) -> None:
        """Return when these, and nobody else, take what nobody owns, as all of them see it."""
        wanted = tuple(sorted(node.id for node in nodes))
        await until(lambda: all(node.placement.candidates == wanted for node in nodes))

    async def close(self) -> None:
        await self.http.close()
        await self._exit.aclose()
        await self.metadata.close()

    async def rest(self, node: Node, method: str, path: str, body: object = None) -> object:
        """What REST answers, redirects followed; the status if that is an error."""
        url = node.placement.web_url + path
        async with self.http.request(method, url, json=body) as response:
            if response.status >= 400:
                return response.status
            return await response.json() if response.content_length else None

    def owners(self, topic: str) -> list[Node]:
        """Who holds it."""
        return [node for node in self.nodes if node.owns(topic)]
