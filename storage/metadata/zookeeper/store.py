"""The metadata store on ZooKeeper 3.6 or newer.

docs/decisions/zookeeper-fallbacks.md has what ZooKeeper does otherwise than the other stores.
"""

import asyncio
import os
import platform
from collections.abc import Sequence
from random import Random
from typing import cast

from config import bounds
from storage.clock import Clock
from storage.metadata import operations
from storage.metadata.access import StoreAccess
from storage.metadata.checked_store import CheckedStore
from storage.metadata.group import check_partition_of
from storage.metadata.keys import level_under
from storage.metadata.store import (
    CLOCK_KEY,
    IndexHit,
    MetadataError,
    Record,
    Session,
)
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.address import ZooKeeperAddress
from storage.metadata.zookeeper.client import (
    Connection,
    NodeChange,
    RequestFailed,
    ZooKeeperClient,
)
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.pipeline import WritePipeline
from storage.metadata.zookeeper.plan import Write
from storage.metadata.zookeeper.record_reader import RecordReader
from storage.metadata.zookeeper.requests import Failure
from storage.metadata.zookeeper.sessions import ZooKeeperSession
from storage.metadata.zookeeper.watches import NodeWatches


class ZooKeeperMetadataStore(CheckedStore[ZooKeeperSession]):
    """`MetadataStore` on ZooKeeper 3.6 or newer. Made by `open`."""

    def __init__(
        self,
        address: ZooKeeperAddress,
        clock: Clock,
        rng: Random,
        identity: str,
        access: StoreAccess | None,
    ) -> None:
        """Use `open`.  Made on the running loop."""
        super().__init__(clock)
        self._address = address
        self._rng = rng
        self._access = access
        self._layout = Layout(address.root)
        self._client = ZooKeeperClient(
            address.servers,
            session_timeout_ms=bounds.ZOOKEEPER_SESSION_MS,
            on_state=self._state_changed,
            on_change=self._node_changed,
            access=access,
        )
        self._reader = RecordReader(self._client, self._layout)
        self._writes = WritePipeline(self._client, self._layout, rng, identity)
        self._hub: NodeWatches = NodeWatches(self._layout, self._client.submit, self._reader.find)
        self._sessions: set[ZooKeeperSession] = set()
        self._connections = 0
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        address: ZooKeeperAddress,
        clock: Clock,
        rng: Random,
        *,
        identity: str | None = None,
        access: StoreAccess | None = None,
    ) -> "ZooKeeperMetadataStore":
        """Connect and make the missing nodes of the tree.

        `identity` names this process for operators who inspect the tree: host and process if it is
        left out.  Raises `MetadataError`.
        """
        identity = identity or f"{platform.node()}:{os.getpid()}"
        store = cls(address, clock, rng, identity, access)
        try:
            await store._client.connect()
            await store._make_tree()
            await store._writes.open()
        except BaseException:
            await asyncio.shield(store.close())
            raise
        return store

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        """See `MetadataStore.get`."""
        self._check_keys((key,), partition)
        return await self._reader.get(key, partition, fresh=fresh)

    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        """See `MetadataStore.get_many`."""
        self._check_keys(keys, partition)
        return await self._reader.get_many(keys, partition)

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore.children`."""
        operations.check_level(key)
        self._check_open()
        return await self._reader.children(level_under(key))

    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        """See `MetadataStore.scan`."""
        operations.check_scan(lo, hi)
        operations.check_partition(partition)
        self._check_open()
        records = await self._reader.scan(lo, hi, fresh=fresh)
        if partition is not None:
            for record in records:
                check_partition_of(record.key, record.partition, partition)
        return records

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        """See `MetadataStore.scan_index`."""
        operations.check_index_range(index, lo, hi)
        operations.check_partition(partition)
        self._check_open()
        return await self._reader.scan_index(
            index, lo, hi, partition=partition, fresh=fresh, limit=limit, max_bytes=max_bytes
        )

    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        """See `MetadataStore.open_session`.  The server bounds the timeout to 2 to 20 ticks."""
        operations.checked_session(identity, timeout_ms, self._clock.now_ms())
        self._check_open()
        session = ZooKeeperSession(
            self._address.servers,
            self._layout,
            timeout_ms=timeout_ms,
            access=self._access,
            settled=self._catch_up,
            ended=self._session_ended,
            changed=self._writes.connection_changed,
        )
        self._sessions.add(session)
        await session.open(identity, self._rng)
        return session

    async def close(self) -> None:
        """See `MetadataStore.close`.  Idempotent."""
        self._closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._writes.close()
            await asyncio.gather(*(session.close() for session in self._sessions))
        finally:
            try:
                await self._client.close()
            finally:
                self._hub.close()

    async def server_time_ms(self) -> int | None:
        """See `MetadataStore.server_time_ms`."""
        await self.put(CLOCK_KEY, b"")
        return await self._reader.written_ms(CLOCK_KEY)

    async def _make_tree(self) -> None:
        for path in self._layout.fixed_nodes():
            try:
                await self._client.call_again(requests.create(path))
            except RequestFailed as error:
                if error.failure is not Failure.NODE_EXISTS:
                    raise MetadataError(
                        f"ZooKeeper refused to make {path} ({error.failure.name}): look at the "
                        "access rights above it."
                    ) from error

    async def _session_ended(self, session: ZooKeeperSession) -> None:
        self._sessions.discard(session)
        self._writes.connection_changed()
        # Its ephemerals are gone at one server: the one that reads use may be behind.
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Wait until all requests are answered, and later reads are not older than now."""
        if not self._client.connected:
            return  # reads wait for the next connection
        try:
            await self._client.call(requests.sync(self._layout.records))
        except (RequestFailed, MetadataError):
            return

    def _state_changed(self, state: Connection) -> None:
        if state is Connection.CONNECTED:
            self._connections += 1
            if self._connections > 1:
                self._hub.ask_again()
                self._writes.connection_changed()

    def _node_changed(self, change: NodeChange) -> None:
        self._hub.changed(change)

    def _submit(self, operation: Write, owner: ZooKeeperSession | None) -> "asyncio.Future[object]":
        self._check_open()
        return cast("asyncio.Future[object]", self._writes.submit(operation, owner))

    def _own(self, session: Session) -> ZooKeeperSession | None:
        if isinstance(session, ZooKeeperSession) and session.layout is self._layout:
            return session
        return None

    def _session_id(self, owner: ZooKeeperSession) -> int:
        return owner.session_id
