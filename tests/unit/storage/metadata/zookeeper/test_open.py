"""The `zk:` URL, and what it costs those who do not use it."""

import subprocess
import sys

import pytest

from storage.clock import SystemClock
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper.address import InvalidZooKeeperAddress
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


def test_the_library_is_imported_only_with_such_a_store() -> None:
    code = "import sys, storage.metadata.open; sys.exit('kazoo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
