"""Bookies that ask who is there, by SASL with user and password."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.ledger.bookkeeper.auth_plugins import open_auth_plugin
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.store import LedgerError
from tests.cluster.bookkeeper.ledger_access import Quorums, append, read_all, store_at, written
from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import BookieProcess
from tests.servers.zookeeper_part import ZooKeeperServer

pytestmark = pytest.mark.cluster

ONE: Quorums = (1, 1, 1)
ENTRIES = tuple(b"entry-%d" % number for number in range(20))
JAAS = """
Bookie {
  org.apache.zookeeper.server.auth.DigestLoginModule required
  user_bookkeeper="secret"
  user_stranger="secret";
};
"""
"""Bookies serve whoever has `bookkeeper` in the name, unless they are told otherwise."""


@pytest.fixture(scope="module")
def asking(
    zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BookieCluster]:
    """One bookie that does not serve everybody."""
    directory: Path = tmp_path_factory.mktemp("asking")
    jaas = directory / "jaas.conf"
    jaas.write_text(JAAS)
    factory = "org.apache.bookkeeper.sasl.SASLBookieAuthProviderFactory"
    options = (f"-Djava.security.auth.login.config={jaas}", "-Dzookeeper.sasl.client=false")
    started = BookieCluster(
        directory,
        OnZooKeeper(zookeeper, zookeeper.fresh_chroot()),
        1,
        {"bookieAuthProviderFactoryClass": factory},
        BookieProcess(options=options),
    )
    try:
        asyncio.run(started.start())
        yield started
    finally:
        started.kill()


async def test_a_known_user_writes_recovers_and_reads(
    asking: BookieCluster, tmp_path: Path
) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("bookkeeper:secret\n")
    by_file = open_auth_plugin("sasl", f"file:{credentials}")
    by_value = open_auth_plugin(
        "org.apache.bookkeeper.sasl.SASLClientProviderFactory", "bookkeeper:secret"
    )
    async with (
        store_at(asking.uri, ONE, auth=by_file) as store,
        store_at(asking.uri, ONE, auth=by_value) as other,
    ):
        ledger = await written(store, *ENTRIES)
        reader = await other.open(ledger.ledger_id)
        assert await read_all(reader) == list(ENTRIES)
        assert other.bookie_counters.connects == 2, "one for the recovery, one to read"
        assert other.bookie_counters.failed_connects == 0


@pytest.mark.parametrize(
    ("plugin", "parameters"),
    [
        ("sasl", "bookkeeper:wrong"),
        ("sasl", "stranger:secret"),
        ("", ""),
    ],
    ids=["wrong password", "user not allowed", "no plugin"],
)
async def test_others_are_not_served(asking: BookieCluster, plugin: str, parameters: str) -> None:
    async with store_at(asking.uri, ONE, auth=open_auth_plugin(plugin, parameters)) as store:
        ledger = await store.create(custom={})
        with pytest.raises(LedgerError):
            await append(ledger, b"refused")
        assert store.counters.adds == 0
        code = ReplyCode.DISCONNECTED if plugin else ReplyCode.UNAUTHORISED
        assert store.bookie_counters.refusals[code] > 0
