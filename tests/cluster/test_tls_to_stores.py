"""A broker reaches its stores over TLS, and shows them a certificate.

ZooKeeper and bookies speak TLS themselves; Oxia has no TLS of its own, so a relay ends it.
"""

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.cluster.oxia.half_proxy import HalfProxy
from tests.servers.bookie_cluster import BookieCluster, OnZooKeeper
from tests.servers.ground import tls_of_bookies, tls_to_stores
from tests.servers.oxia_part import OxiaServer
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.authority import Authority
from tests.support.broker_process import BrokerFailed, BrokerProcess
from tests.support.security import Security
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

TOPIC = "persistent://public/default/over-tls"
VALUES = [b"%d" % number for number in range(20)]
QUORUM_OF_ONE: Mapping[str, object] = {
    f"ledger_{each}": 1 for each in ("ensemble_size", "write_quorum", "ack_quorum")
}
Settings = Mapping[str, object]


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return Security(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def authority(security: Security) -> Authority:
    return security.authority


@pytest.fixture(scope="module")
def on_zookeeper(
    java_parts: Path, security: Security, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Settings]:
    """The addresses of ZooKeeper and a bookie, as settings of a broker."""
    directory = tmp_path_factory.mktemp("on-zookeeper")
    zookeeper = ZooKeeperServer(directory / "zookeeper", security=security)
    bookies: BookieCluster | None = None
    try:
        asyncio.run(zookeeper.start())
        chroot, place = zookeeper.fresh_chroot(), zookeeper.fresh_chroot()
        bookies = BookieCluster(
            directory,
            OnZooKeeper(zookeeper, chroot),
            1,
            tls_of_bookies(security),
        )
        asyncio.run(bookies.start())
        address = zookeeper.address_tls
        yield {
            "metadata_store_url": f"zk:{address}{place}",
            "bookkeeper_metadata_service_uri": f"zk+hierarchical://{address}{chroot}/ledgers",
            **QUORUM_OF_ONE,
        }
    finally:
        if bookies is not None:
            bookies.kill()
        zookeeper.kill()


async def served(broker: BrokerProcess, expected: list[bytes]) -> None:
    """Everything that is expected is read, and more of the same is published."""
    client = await broker.connect()
    earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await client.subscribe(TOPIC, "s", earliest, permits=len(VALUES))
    assert [(await consumer.receive()).payload for _ in expected] == expected
    producer = await client.create_producer(TOPIC)
    for value in VALUES:
        await producer.send(value)
    await client.close()


async def test_broker_on_zookeeper_and_bookies(
    on_zookeeper: Settings, authority: Authority, tmp_path: Path
) -> None:
    own = tls_to_stores(authority.issue("broker"), authority.chain)
    broker = BrokerProcess(tmp_path, {**on_zookeeper, **own})
    try:
        await broker.start()
        await served(broker, [])
        broker.kill()
        await broker.start()
        await served(broker, VALUES)
    finally:
        broker.kill()
    assert not broker.faults(), broker.faults()


async def test_zookeeper_of_an_unknown_authority_is_not_used(
    on_zookeeper: Settings, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    own = tls_to_stores(authority.issue("broker"), authority.chain)
    trust = {"metadata_store_tls_trust_certs_file": other.chain}
    broker = BrokerProcess(tmp_path, {**on_zookeeper, **own, **trust})
    try:
        with pytest.raises(BrokerFailed, match="certificate"):
            await broker.start()
    finally:
        broker.kill()


async def test_bookie_of_an_unknown_authority_is_not_used(
    on_zookeeper: Settings, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    own = tls_to_stores(authority.issue("broker"), authority.chain)
    trust = {"bookkeeper_tls_trust_certs_file": other.chain}
    broker = BrokerProcess(tmp_path, {**on_zookeeper, **own, **trust})
    try:
        await broker.start()
        client = await broker.connect()
        producer = await client.create_producer(f"{TOPIC}-refused")
        sending = asyncio.ensure_future(producer.send(b"x"))
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in broker.log())
        assert "bookie_not_connected" in broker.log()
        assert not sending.done()
        sending.cancel()
        await client.close()
    finally:
        broker.kill()


async def test_broker_on_oxia_behind_a_relay(
    on_zookeeper: Settings, fresh_oxia: OxiaServer, authority: Authority, tmp_path: Path
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.chain))
    server = authority.issue("oxia")
    context.load_cert_chain(server.chain, server.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    relay = HalfProxy(fresh_oxia.address, context)
    await relay.start()
    own = tls_to_stores(authority.issue("broker"), authority.chain)
    on_oxia = {"metadata_store_url": f"oxia://{relay.address}/default"}
    broker = BrokerProcess(tmp_path, {**on_zookeeper, **own, **on_oxia})
    try:
        await broker.start()
        await served(broker, [])
        assert not broker.faults(), broker.faults()
    finally:
        broker.kill()
        await relay.close()
