"""Opening stores, and looking at a server past them."""

import random

from storage.clock import SystemClock
from storage.metadata.access import StoreAccess
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import Connections
from storage.metadata.oxia.store import OxiaMetadataStore

PATIENCE_S = 60


async def open_store(address: str) -> OxiaMetadataStore:
    return await OxiaMetadataStore.open(f"oxia://{address}", SystemClock(), random.Random())


async def look(address: str, key: str, shards: int = 4) -> list[pb.GetResponse]:
    """What the server has of a key, on each shard."""
    connections = Connections("default", StoreAccess())
    try:
        peer = connections.peer(address)
        return [(await peer.read(shard, [key], PATIENCE_S))[0] for shard in range(shards)]
    finally:
        await connections.close()


async def is_there(address: str, key: str) -> bool:
    """Whether any shard has the key."""
    return any(answer.status == pb.OK for answer in await look(address, key))
