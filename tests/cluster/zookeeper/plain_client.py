"""A client of ZooKeeper beside the store, which sees and changes what is stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kazoo.client import KazooClient

from tests.servers.zookeeper_part import ZooKeeperServer


@asynccontextmanager
async def plain_client(server: ZooKeeperServer) -> AsyncIterator[KazooClient]:
    client = KazooClient(server.address)
    await asyncio.to_thread(client.start)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.stop)
        client.close()
