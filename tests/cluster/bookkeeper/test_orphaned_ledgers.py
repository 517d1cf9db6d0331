"""Ledgers on real bookies that a dead broker left: found and deleted, and nobody else's."""

import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.store import LedgerStore, NoSuchLedger
from storage.managed_ledger.core import COMPONENT, INSTANCE, MANAGED_LEDGER, STREAM
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.types import Limits
from storage.metadata.instance import instance_of
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataStore
from tests.cluster.bookkeeper.ledger_access import store_at
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.unit.storage.managed_ledger.fakes import contents, publish_each

pytestmark = pytest.mark.cluster

SHARED = Limits(ledger_max_entries=5, ledger_min_age_ms=0, cursor_flush_ms=1, claim_on_open=True)
NAME = "public/default/persistent/orders"


class LaterClock:
    """The machine's clock, some time ahead."""

    def __init__(self, ahead_ms: int) -> None:
        self.ahead_ms = ahead_ms

    def now_ms(self) -> int:
        return SystemClock().now_ms() + self.ahead_ms


@asynccontextmanager
async def metadata_at(url: str) -> AsyncIterator[MetadataStore]:
    store = await open_metadata_store(url, SystemClock(), random.Random())
    try:
        yield store
    finally:
        await store.close()


async def leave(ledgers: LedgerStore, instance: bytes) -> LedgerId:
    """A ledger as a broker leaves it that dies before it has named it."""
    custom = {COMPONENT: MANAGED_LEDGER, STREAM: NAME.encode(), INSTANCE: instance}
    return (await ledgers.create(custom=custom)).ledger_id


async def test_ledgers_that_no_record_names_are_deleted_a_day_later_and_no_others(
    bookies: BookieCluster, zookeeper: ZooKeeperServer
) -> None:
    ours, theirs = (f"zk:{zookeeper.address}/t{uuid.uuid4().hex[:12]}" for _ in range(2))
    async with (
        store_at(bookies.uri) as ledgers,
        metadata_at(ours) as metadata,
        metadata_at(theirs) as other,
    ):
        factory = ManagedLedgerFactory(metadata, ledgers, SystemClock(), SHARED)
        topic = await factory.open(NAME)
        await publish_each(topic, 12)
        named = {info.ledger_id for info in topic.ledgers}
        assert len(named) > 1
        left = await leave(ledgers, await instance_of(metadata))
        of_another_cluster = await leave(ledgers, await instance_of(other))
        assert await factory.delete_orphaned_ledgers() == [], "somebody may still name it"
        later = LaterClock(bounds.ORPHANED_LEDGER_AGE_MS)
        tomorrow = ManagedLedgerFactory(metadata, ledgers, later, SHARED)
        (found,) = await tomorrow.orphaned_ledgers()
        assert (found.ledger_id, found.stream, found.cursor) == (left, NAME, "")
        assert await tomorrow.delete_orphaned_ledgers() == [found]
        with pytest.raises(NoSuchLedger):
            await ledgers.open(left)
        assert {*named, of_another_cluster} <= set(await ledgers.list_ledgers())
        assert len(await contents(topic)) == 12
        await ledgers.delete(of_another_cluster)
        await factory.close()
