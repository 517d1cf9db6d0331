"""An Oxia namespace without records, for tests that share one server."""

import asyncio
from collections.abc import Sequence

from grpc.aio import AioRpcError

from storage.metadata.access import StoreAccess
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed, Connections
from storage.metadata.oxia.records import OWN_PREFIX
from storage.metadata.oxia.routing import Shard, parse_assignments

PATIENCE_S = 30
PAUSE_S = 0.1
NAMESPACE = "default"
USERS = ("/", "!/")
"""Every key that begins with a slash, in the servers' order of slashes; none of their own."""
RANGES = (
    USERS,
    (OWN_PREFIX, f"{OWN_PREFIX}/"),
    (f"{OWN_PREFIX}sequences/", f"{OWN_PREFIX}sequences//"),
)


async def empty_oxia(address: str) -> None:
    """Remove all records, on whichever servers they are.  Nobody else may be writing."""
    async with asyncio.timeout(PATIENCE_S):
        # gRPC shares connections to one address: a client of this process that is just being closed
        # may take a new one with it.
        while not await _is_emptied(address):
            await asyncio.sleep(PAUSE_S)


async def _is_emptied(address: str) -> bool:
    """Whether all records could be removed."""
    connections = Connections(NAMESPACE, StoreAccess())
    try:
        for shard in await _shards(connections, address):
            await _empty(connections, shard)
    except (CallFailed, AioRpcError):
        return False
    finally:
        await connections.close()
    return True


async def _empty(connections: Connections, shard: Shard) -> None:
    stream = connections.peer(shard.leader).open_writes(shard.shard_id)
    deletes = [pb.DeleteRangeRequest(start_inclusive=lo, end_exclusive=hi) for lo, hi in RANGES]
    await stream.write(pb.WriteRequest(shard=shard.shard_id, delete_ranges=deletes))
    response = await stream.read()
    assert isinstance(response, pb.WriteResponse), response
    stream.cancel()


async def _shards(connections: Connections, address: str) -> Sequence[Shard]:
    guide = await connections.guide(address)
    async for assignments in guide.assignments():
        return parse_assignments(assignments, NAMESPACE).shards
    raise AssertionError(f"{address} told no shards")
