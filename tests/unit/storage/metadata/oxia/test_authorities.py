"""Servers that answer only to names they know, as Oxia's do after 0.17.1: how they are called."""

import random
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from config import bounds
from storage.clock import SystemClock
from storage.metadata.access import StoreAccess
from storage.metadata.oxia.store import OxiaMetadataStore
from storage.metadata.store import MetadataError
from tests.support.authority_proxy import AuthorityProxy
from tests.support.certificates import make_certificate
from tests.support.child_process import HOST
from tests.support.fake_oxia import FakeOxia, World
from tests.support.waiting import until


@asynccontextmanager
async def strict_servers(
    world: World, count: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Sequence[AuthorityProxy]]:
    """What clients reach them by.  No name is known yet, and nobody leads."""
    servers = [FakeOxia(world) for _ in range(count)]
    proxies: list[AuthorityProxy] = []
    for server in servers:
        await server.start()
        proxy = AuthorityProxy(server.address, tls)
        await proxy.start()
        server.authority_of = proxy.authority_of
        server.address = proxy.address
        proxies.append(proxy)
    try:
        yield proxies
    finally:
        for server, proxy in zip(servers, proxies, strict=True):
            await server.stop()
            await proxy.close()


def called_by(proxy: AuthorityProxy) -> set[str]:
    """All names that clients have called."""
    return set(proxy.names.values())


async def open_store(servers: str, access: StoreAccess | None = None) -> OxiaMetadataStore:
    return await OxiaMetadataStore.open(
        f"oxia://{servers}", SystemClock(), random.Random(1), access
    )


async def use(store: OxiaMetadataStore) -> None:
    """Every kind of call."""
    session = await store.open_session(timeout_ms=bounds.OXIA_SESSION_TIMEOUT_MIN_MS, identity="a")
    await store.put("/a/b", b"1", session=session)
    assert await store.children("/a") == ["b"]
    assert len(await store.scan("/a/", "/a//", fresh=True)) == 1
    await session.close()
    assert await store.get("/a/b") is None


async def test_servers_are_called_by_the_names_that_were_given_and_those_of_the_map() -> None:
    world = World()
    async with strict_servers(world, 2) as (first, second):
        world.lead(second.address, second.address)
        port = first.address.rpartition(":")[2]
        given = f"localhost:{port}"
        world.authorities = [given, second.address]
        store = await open_store(given)
        await use(store)
        await store.close()
        assert called_by(first) == {given}
        assert called_by(second) == {second.address}


async def test_servers_are_called_by_the_name_in_their_certificate_and_the_port(
    tmp_path: Path,
) -> None:
    """Where another one than the host's was configured; without a port it is no name to them."""
    made = make_certificate(tmp_path, HOST, common_name="oxia.example")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made.chain, made.key)
    tls.set_alpn_protocols(["h2"])
    access = StoreAccess(trust_certs_file=made.chain, server_name=HOST)
    world = World()
    async with strict_servers(world, 1, tls) as (proxy,):
        port = proxy.address.rpartition(":")[2]
        world.lead(proxy.address)
        world.authorities = [f"{HOST}:{port}"]
        store = await open_store(f"localhost:{port}", access)
        await use(store)
        await store.close()
        assert called_by(proxy) == {f"{HOST}:{port}"}


@pytest.mark.parametrize("servers", [1, 2])
async def test_authority_that_no_server_accepts_fails_the_opening_with_advice(servers: int) -> None:
    world = World(authorities=["oxia-0.example:6648"])
    async with strict_servers(world, servers) as proxies:
        world.lead(proxies[0].address)
        with pytest.raises(MetadataError) as raised:
            await open_store(",".join(proxy.address for proxy in proxies))
        told = str(raised.value)
        assert any(f'unexpected authority "{proxy.address}"' in told for proxy in proxies)
        assert "allowExtraAuthorities" in told


async def test_a_server_that_knows_its_name_is_found_behind_one_that_does_not() -> None:
    """The first one may be the name of a service, and the other one that of a server."""
    world = World()
    async with strict_servers(world, 2) as (service, server):
        world.lead(server.address)
        world.authorities = [server.address]
        store = await open_store(f"{service.address},{server.address}")
        await use(store)
        await store.close()


async def test_leader_that_refuses_its_authority_raises_an_error_with_advice() -> None:
    """The map names it, and it is called so: another server may know more than it does."""
    world = World()
    async with strict_servers(world, 2) as (guide, leader):
        world.lead(guide.address)
        world.authorities = [guide.address]
        store = await open_store(guide.address)
        await use(store)
        world.lead(leader.address)
        await until(lambda: store._shards.table.leader(0) == leader.address)
        with pytest.raises(MetadataError, match="allowExtraAuthorities"):
            await store.put("/a", b"")
        world.authorities.append(leader.address)
        await use(store)
        await store.close()
