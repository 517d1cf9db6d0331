"""What several brokers stand on: one ZooKeeper server and three bookies, for tests and benchmarks.

Rules: everything is in the directory given, and no process is left at the end; metadata of brokers
is in a place of its own for each set of them, beside that of the bookies.  With `Security` all
servers have TLS too, for clients that ask for it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.bookie_part import SMALL, BookieProcess
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.certificates import Certificate
from tests.support.security import Security


@dataclass(frozen=True)
class Ground:
    """A ZooKeeper server and three bookies; whoever breaks them mends them."""

    zookeeper: ZooKeeperServer
    bookies: BookieCluster
    security: Security | None = None

    def metadata_store(self) -> str:
        """URL of an empty place for the metadata of brokers."""
        return f"zk:{self.zookeeper.address}{self.zookeeper.fresh_chroot()}"

    def mend(self) -> None:
        """Everything runs again."""
        asyncio.run(self._mend())

    async def _mend(self) -> None:
        if not self.zookeeper.running:
            await self.zookeeper.start()
        await self.bookies.mend()


@contextmanager
def new_ground(
    directory: Path,
    settings: Mapping[str, object] | None = None,
    process: BookieProcess = SMALL,
    security: Security | None = None,
) -> Iterator[Ground]:
    """Servers that run; `settings` and `process` are those of the bookies."""
    zookeeper = ZooKeeperServer(directory / "zookeeper", security=security)
    if security is not None:
        settings = {**tls_of_bookies(security), **(settings or {})}
    bookies: BookieCluster | None = None
    try:
        asyncio.run(zookeeper.start())
        root = OnZooKeeper(zookeeper, zookeeper.fresh_chroot())
        bookies = BookieCluster(directory / "bookies", root, 3, settings, process)
        asyncio.run(bookies.start())
        yield Ground(zookeeper, bookies, security)
    finally:
        if bookies is not None:
            bookies.kill()
        zookeeper.kill()


def tls_to_stores(own: Certificate, trust: Path) -> Mapping[str, object]:
    """Settings by which a broker trusts its stores, and shows them its certificate."""
    return {
        f"{store}_tls_{name}_file": path
        for store in ("metadata_store", "bookkeeper")
        for name, path in (("trust_certs", trust), ("certificate", own.chain), ("key", own.key))
    }


def tls_of_bookies(security: Security) -> Mapping[str, object]:
    """Settings of bookies: START_TLS with certificates of both sides, and no duty to use it."""
    own = security.authority.issue("bookie")
    return {
        "tlsProvider": "JDK",
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": own.key,
        "tlsCertificatePath": own.chain,
        "tlsClientAuthentication": "true",
        "tlsTrustStoreType": "PEM",
        "tlsTrustStore": security.authority.chain,
    }
