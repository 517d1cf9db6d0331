"""Stores on an Oxia server that a test may break."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from storage.metadata.oxia.store import OxiaMetadataStore
from tests.cluster.oxia.half_proxy import HalfProxy
from tests.cluster.oxia.stores import open_store
from tests.servers.oxia_part import OxiaServer


@pytest.fixture
async def store(fresh_oxia: OxiaServer) -> AsyncIterator[OxiaMetadataStore]:
    """A store on a server of its own."""
    opened = await open_store(fresh_oxia.address)
    yield opened
    await opened.close()


@pytest.fixture
async def proxy(fresh_oxia: OxiaServer) -> AsyncIterator[HalfProxy]:
    """A proxy before the server."""
    made = HalfProxy(fresh_oxia.address)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def far_store(proxy: HalfProxy) -> AsyncIterator[OxiaMetadataStore]:
    """A store that reaches its server through the proxy, with a stream to every shard."""
    opened = await open_store(proxy.address)
    await asyncio.gather(*(opened.put(f"/warm/{n}", b"") for n in range(64)))
    yield opened
    await opened.close()
