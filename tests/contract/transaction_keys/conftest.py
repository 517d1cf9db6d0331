"""The backends of the metadata store, and on each of them what keeps transaction keys."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from magnetar.protocol.txn_id import CoordinatorId
from storage.clock import SystemClock
from storage.metadata.store import MetadataStore
from tests.contract.metadata.conftest import backend, store
from txn.coordinator import Coordinator
from txn.counters import TransactionCounters
from txn.deadlines import Deadlines
from txn.decisions import Decisions
from txn.key_store import TransactionKeyStore
from txn.parts import TransactionParts
from txn.store import TransactionStore

__all__ = ["backend", "store"]

COORDINATOR = CoordinatorId(3)


@pytest.fixture
def keys(store: MetadataStore) -> TransactionKeyStore:
    """The keys of one coordinator."""
    return TransactionKeyStore(store, COORDINATOR)


@asynccontextmanager
async def leading(store: MetadataStore) -> AsyncIterator[Coordinator]:
    """A process that leads the coordinator, or believes so."""
    clock = SystemClock()
    transactions = TransactionStore(store, counters := TransactionCounters())
    parts = TransactionParts(transactions, Decisions(transactions), counters, clock, "here", False)
    deadlines = Deadlines(clock, lambda txns: None)
    made = Coordinator(COORDINATOR, parts, deadlines, max_open=0)
    try:
        yield made
    finally:
        await made.close()
        deadlines.close()
        await parts.decisions.stop()


@pytest.fixture
async def leaders(store: MetadataStore) -> AsyncIterator[tuple[Coordinator, Coordinator]]:
    """Two at once: one of them was deposed, and does not know it."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(leading(store))
        yield first, await stack.enter_async_context(leading(store))
