"""Kinds of trouble for a cluster under load, each of which ends with everything running again.

Rules: who is hit has the role now, by the records in the metadata store; a paused owner sleeps for
longer than its session, so others have taken over when it wakes up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import pytest

from broker.placement.ownership import owner_key
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import CoordinatorId
from storage.clock import SystemClock
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.managed_ledger.records import decode_stream, ledger_key
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataStore
from tests.cluster.bookkeeper.ledger_access import members, store_at
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess
from tests.support.child_process import HOST, once_it_is
from tests.support.raw_client import BrokerError
from txn.records import leader_key

FOUND_TIMEOUT_S: Final = 30
CUT_OFF: Final = "cut-owner-off"
"""The fault that needs relays before the metadata store."""


@dataclass(frozen=True)
class Site:
    """A cluster, the scalable topic that the load writes to, and one whose controller is hit."""

    ground: Ground
    brokers: BrokerCluster
    topic: str
    led: str

    def holder(self, key: str) -> int:
        """The number of the broker that an ephemeral record names; waits until one is named."""
        found: list[int | None] = []

        async def is_held(store: MetadataStore) -> bool:
            found[:] = [await self._named_by(store, key)]
            return found[0] is not None

        async def look() -> None:
            async with self._records() as store:
                await once_it_is(lambda: is_held(store), f"{key} names a broker", FOUND_TIMEOUT_S)

        asyncio.run(look())
        assert found[0] is not None
        return found[0]

    async def _named_by(self, store: MetadataStore, key: str) -> int | None:
        record = await store.get(key)
        if record is None:
            return None
        named = json.loads(record.value)
        broker_id = named if isinstance(named, str) else named["brokerId"]
        numbers = {f"{HOST}:{each.http_port}": n for n, each in enumerate(self.brokers.brokers)}
        return numbers[broker_id]

    @asynccontextmanager
    async def _records(self) -> AsyncIterator[MetadataStore]:
        store = await open_metadata_store(self.brokers.metadata_store_url, SystemClock())
        try:
            yield store
        finally:
            await store.close()

    async def leader(self) -> int | None:
        """The number of the broker that leads the topic `led`, if one does."""
        async with self._records() as store:
            return await self._named_by(store, owner_key(self.led))

    def segment(self) -> str:
        """The topic's first active segment."""
        low, high, segment_id = self.active_ranges()[0]
        return f"segment://{self._local}/{low:04x}-{high:04x}-{segment_id}"

    @property
    def _local(self) -> str:
        return self.topic.partition("://")[2]

    def active_ranges(self) -> list[tuple[int, int, int]]:
        """Of each active segment of the topic: first and last hash, and its id; in this order."""
        return asyncio.run(self._active_ranges())

    async def _active_ranges(self) -> list[tuple[int, int, int]]:
        broker = next(each for each in self.brokers.brokers if each.running)
        status, layout = await broker.rest("GET", f"/scalable/{self._local}")
        assert status == 200, layout
        assert isinstance(layout, dict)
        segments = layout["segments"].values()
        return sorted(
            (each["hashRange"]["start"], each["hashRange"]["end"], each["segmentId"])
            for each in segments
            if each["state"] == "ACTIVE"
        )

    def reshape(self, what: str) -> None:
        """Change the topic's layout; waits until it has a controller."""
        asyncio.run(self._reshape(f"/scalable/{self._local}/{what}"))

    async def _reshape(self, path: str) -> None:
        broker = next(each for each in self.brokers.brokers if each.running)

        async def is_done() -> bool:
            status, answer = await broker.rest("POST", path)
            assert status in (204, 503), answer
            return status == 204

        await once_it_is(is_done, f"{path} is done", FOUND_TIMEOUT_S)

    def owner(self, segment: str) -> int:
        """The broker that owns a segment; waits until one does."""
        return self.holder(owner_key(segment))

    def owner_now(self, segment: str) -> int | None:
        """The broker that owns a segment, if one does."""

        async def look() -> int | None:
            async with self._records() as store:
                return await self._named_by(store, owner_key(segment))

        return asyncio.run(look())

    def bookie(self) -> BookieId:
        """The first of the ensemble that the first segment's last ledger is written to."""
        return asyncio.run(self._bookie(parse_topic_name(self.segment()).ledger_path))

    async def _bookie(self, managed_ledger: str) -> BookieId:
        async with self._records() as store:
            key = ledger_key(managed_ledger)
            record = await store.get(key)
            assert record is not None, key
        async with store_at(self.ground.bookies.uri) as ledgers:
            return (await members(ledgers, decode_stream(key, record.value).ledgers[-1].ledger_id))[
                0
            ]

    def use(self, segment: str, number: int) -> None:
        """Attach a producer to a segment at a broker, as soon as it owns it or may take it."""
        asyncio.run(self._use(segment, self.brokers.brokers[number]))

    async def _use(self, segment: str, broker: BrokerProcess) -> None:
        client = await broker.connect()

        async def is_attached() -> bool:
            try:
                await client.create_producer(segment)
            except BrokerError as error:
                if error.code != pb.ServiceNotReady:
                    raise
                return False
            return True

        try:
            await once_it_is(is_attached, f"{segment} is served", FOUND_TIMEOUT_S)
        finally:
            await client.close()

    def controller(self) -> int:
        """Who leads the topic `led`, be it without ordered consumers: its splits need one too."""
        return self.holder(owner_key(self.led))

    def coordinator(self) -> int:
        """Of the first transaction coordinator."""
        return self.holder(leader_key(CoordinatorId(0)))


def _kill_and_replace(site: Site, number: int) -> None:
    site.brokers.kill_one(number)
    site.brokers.start_one(number)


def kill_owner(site: Site) -> None:
    """SIGKILL of the broker that owns the first segment."""
    _kill_and_replace(site, site.owner(site.segment()))


def kill_controller(site: Site) -> None:
    """SIGKILL of the broker that assigns the topic's segments."""
    _kill_and_replace(site, site.controller())


def kill_coordinator(site: Site) -> None:
    """SIGKILL of the broker that leads the first coordinator."""
    _kill_and_replace(site, site.coordinator())


def pause_owner(site: Site) -> None:
    """SIGSTOP of an owner until another broker serves its segment, then SIGCONT."""
    segment = site.segment()
    number = site.owner(segment)
    site.brokers.pause(number)
    try:
        site.use(segment, (number + 1) % len(site.brokers.brokers))
    finally:
        site.brokers.resume(number)


def cut_owner_off(site: Site) -> None:
    """Let no byte pass between an owner and the metadata store until another broker serves.

    Its clients and the bookies still reach it.
    """
    segment = site.segment()
    number = site.owner(segment)
    site.brokers.relays[number].stall()
    try:
        site.use(segment, (number + 1) % len(site.brokers.brokers))
    finally:
        site.brokers.relays[number].resume()


def kill_bookie(site: Site) -> None:
    """SIGKILL of a bookie that the first segment is written to; it comes back."""
    (bookie,) = (each for each in site.ground.bookies.bookies if each.bookie_id == site.bookie())
    bookie.kill()
    site.ground.mend()


def kill_two_bookies(site: Site) -> None:
    """SIGKILL of two bookies of three: nothing can be written until they are back."""
    for bookie in site.ground.bookies.bookies[1:]:
        bookie.kill()
    site.ground.mend()


def on_zookeeper(metadata_store_url: str) -> bool:
    """Whether the metadata store is the ZooKeeper server of the tests."""
    return metadata_store_url.startswith("zk:")


def is_possible(fault: str, brokers: BrokerCluster) -> bool:
    """Whether it breaks nothing but servers of the tests' own, and there is what it needs."""
    if fault == CUT_OFF:
        return bool(brokers.relays) and on_zookeeper(brokers.metadata_store_url)
    return fault != "restart-metadata-store" or on_zookeeper(brokers.metadata_store_url)


def require_possible(fault: str, brokers: BrokerCluster) -> None:
    """Skip what would break a server that is not the tests' own."""
    if not is_possible(fault, brokers):
        pytest.skip("a given Oxia server is not killed")


def restart_metadata_store(site: Site) -> None:
    """SIGKILL of the one ZooKeeper server, and a start on its data."""
    site.ground.zookeeper.kill()
    site.ground.mend()


def rolling_restart(site: Site) -> None:
    """SIGTERM to each broker in turn, the next when the one before serves again."""
    for number in range(len(site.brokers.brokers)):
        site.brokers.stop_one(number)
        site.brokers.start_one(number)


FAULTS: Final[Mapping[str, Callable[[Site], None]]] = {
    "kill-owner": kill_owner,
    "kill-controller": kill_controller,
    "kill-coordinator": kill_coordinator,
    "pause-owner": pause_owner,
    CUT_OFF: cut_owner_off,
    "kill-bookie": kill_bookie,
    "kill-two-bookies": kill_two_bookies,
    "restart-metadata-store": restart_metadata_store,
    "rolling-restart": rolling_restart,
}


def split(site: Site) -> None:
    """The topic's widest segment becomes two."""
    ranges = site.active_ranges()
    widest = max(ranges, key=lambda each: each[1] - each[0])
    site.reshape(f"split/{widest[2]}")


def merge(site: Site) -> None:
    """The topic's two lowest segments become one."""
    (_, _, first), (_, _, second), *_ = site.active_ranges()
    site.reshape(f"merge/{first}/{second}")


RESHAPES: Final[Mapping[str, Callable[[Site], None]]] = {"split": split, "merge": merge}
"""Changes of the layout: no faults, but those under load find them beside faults."""
