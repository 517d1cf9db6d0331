"""How a store is found by its URL: nothing is imported before, and one store is used twice."""

import random
import subprocess
import sys
from pathlib import Path

from storage.clock import SystemClock
from storage.ledger.bookkeeper.open import _ledger_metadata
from storage.metadata.access import StoreAccess
from storage.metadata.oxia.store import OxiaMetadataStore
from tests.support.fake_oxia import FakeOxia, World

ROOT = Path(__file__).resolve().parents[5]


def test_grpc_is_imported_when_it_is_used() -> None:
    """An embedded broker must not wait for it."""
    code = "import sys, storage.metadata.open; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


async def test_ledgers_beside_metadata_use_the_same_store() -> None:
    """A second stream to a shard would be a second writer."""
    world = World()
    server = FakeOxia(world)
    await server.start()
    world.lead(server.address)
    clock, rng, access = SystemClock(), random.Random(1), StoreAccess()
    store = await OxiaMetadataStore.open(f"oxia://{server.address}/default", clock, rng)
    uri = f"metadata-store:oxia://{server.address}"
    ledgers = await _ledger_metadata(uri, clock, rng, access, store)
    assert server.calls.count("GetShardAssignments") == 1
    await ledgers.close()
    await store.put("/a", b"")
    await store.close()
    await server.stop()
