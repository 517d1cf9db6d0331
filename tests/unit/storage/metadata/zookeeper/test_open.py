"""The `zk:` URL, and what it costs those who do not use it."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from storage.clock import SystemClock
from storage.metadata.access import StoreAccess
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper.address import InvalidZooKeeperAddress
from tests.support.authority import Authority
from tests.support.bounds import set_bound


async def test_impossible_addresses_are_refused() -> None:
    with pytest.raises(InvalidZooKeeperAddress):
        await open_metadata_store("zk:a:port/x", SystemClock())


async def test_missing_server_fails_the_opening_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_CONNECT_S", 0.1)
    with pytest.raises(MetadataError, match="No ZooKeeper"):
        await open_metadata_store("zk:127.0.0.1:1/x", SystemClock())


@pytest.mark.parametrize("wrong", ["name", "authority", "nothing"])
async def test_a_server_with_a_wrong_certificate_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_CONNECT_S", 0.5)
    authority = Authority(tmp_path / "authority")
    issuer = Authority(tmp_path / "stranger") if wrong == "authority" else authority
    address = "192.0.2.1" if wrong == "name" else "127.0.0.1"
    shown = issuer.issue("server", addresses=(address,))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(shown.chain, shown.key)
    received: list[bytes] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1 << 16))
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    access = StoreAccess(trust_certs_file=authority.chain)
    with pytest.raises(MetadataError, match="No ZooKeeper"):
        await open_metadata_store(f"zk:127.0.0.1:{port}/x", SystemClock(), access=access)
    assert bool(b"".join(received)) is (wrong == "nothing")
    server.close()
    await server.wait_closed()


def test_the_library_is_imported_only_with_such_a_store() -> None:
    code = "import sys, storage.metadata.open; sys.exit('kazoo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
