"""Clusters that the stock cases run on instead of one embedded broker.

Rules: each has an empty metadata store, but for the given Oxia, whose namespace `default` is to be
empty before the run; the bookies are those that all tests share.  The Oxia
server that the tests build does not survive two writers on a shard, and the end of a session is a
writer: after a SIGKILL the next broker starts when the sessions of the killed one have expired.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.servers.bookie_cluster import BookieCluster
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.broker_cluster import BrokerCluster

DESCRIBED: Final[Mapping[str, str]] = {
    "oxia": "one broker, metadata on an Oxia server of 4 shards, bookies on ZooKeeper",
    "zookeeper": "three brokers, metadata and bookies on ZooKeeper",
    "oxia-several": "three brokers on the Oxia server that MAGNETAR_TEST_OXIA names",
}
KINDS: Final = tuple(DESCRIBED)
OXIA_GIVEN: Final = "MAGNETAR_TEST_OXIA"
SESSION_TIMEOUT_MS: Final = 5_000
EXPIRY_MARGIN_S: Final = 1.0
"""A session's end is written this long after it is due, at most."""


class OneBrokerOnOxia(BrokerCluster):
    """Starts again only when nothing of the killed process is left to expire."""

    _killed_at: float | None = None

    def kill(self) -> None:
        if self.brokers[0].running:
            self._killed_at = time.monotonic()
        super().kill()

    def start(self) -> None:
        if self._killed_at is not None:
            expired_at = self._killed_at + SESSION_TIMEOUT_MS / 1000 + EXPIRY_MARGIN_S
            time.sleep(max(0.0, expired_at - time.monotonic()))
            self._killed_at = None
        super().start()


@contextmanager
def cluster_of(
    kind: str, request: pytest.FixtureRequest, directory: Path, settings: dict[str, object]
) -> Iterator[BrokerCluster]:
    """Brokers of one of the `KINDS`, not started yet, on an empty metadata store."""
    bookies: BookieCluster = request.getfixturevalue("bookies")
    given = settings | {
        "bookkeeper_metadata_service_uri": bookies.uri,
        "metadata_store_session_timeout_ms": SESSION_TIMEOUT_MS,
        "ledger_ensemble_size": 3,
    }
    if kind == "zookeeper":
        zookeeper: ZooKeeperServer = request.getfixturevalue("zookeeper")
        url = f"zk:{zookeeper.address}{zookeeper.fresh_chroot()}"
        yield BrokerCluster(directory, given | {"metadata_store_url": url}, count=3)
    elif kind == "oxia-several":
        address = os.environ.get(OXIA_GIVEN)
        if not address:
            pytest.skip(f"{OXIA_GIVEN} names no Oxia server (0.14.4 or newer)")
        url = f"oxia://{address}/default"
        yield BrokerCluster(directory, given | {"metadata_store_url": url}, count=3)
    else:
        request.getfixturevalue("oxia_binary")
        oxia = OxiaServer(directory / "oxia")
        try:
            asyncio.run(oxia.start())
            url = f"oxia://{oxia.address}/default"
            yield OneBrokerOnOxia(directory, given | {"metadata_store_url": url}, count=1)
        finally:
            oxia.kill()
