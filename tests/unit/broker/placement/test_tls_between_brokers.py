"""Brokers of a cluster reach each other over TLS: channel, relay, forwarding, redirects."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import magnetar
from broker.placement.members import BROKERS
from broker.placement.peer_failed import PeerFailed
from broker.wire.listening import PortSetting
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.authority import HOST, Authority, server_settings
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.relaying import brokers, group
from tests.unit.broker.scalable.several import NAME, take_lead

REGULAR = "persistent://public/default/t"
Settings = Callable[..., dict[str, object]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def secured(authority: Authority) -> Settings:
    """The settings of a broker with TLS ports that trusts the others' authority."""

    def make(**more: object) -> dict[str, object]:
        return {
            **server_settings(authority.issue("broker")),
            "tls_trust_certs_file": authority.chain,
            "plaintext_ports": False,
            **more,
        }

    return make


async def client_of(node: Node, authority: Authority, target: str = "") -> RawClient:
    port = node.broker.port_tls
    assert port is not None
    connect = pb.CommandConnect(client_version="x")
    if target:
        connect.proxy_to_broker_url = target
    client = await RawClient.open(HOST, port, connect, tls=authority.client_context())
    node.clients.append(client)
    return client


def clients_of(node: Node) -> list[bool]:
    """Whether each connection of a broker came over TLS."""
    return [each.tls for each in node.broker.connections]


def binary_address(node: Node) -> str:
    url = node.placement.me.url_tls
    assert url is not None
    return url.removeprefix("pulsar+ssl://")


async def test_records_of_brokers_have_their_addresses(cluster: Cluster, secured: Settings) -> None:
    both, only = await cluster.add(**secured(plaintext_ports=True)), await cluster.add(**secured())
    for node, plain in ((both, True), (only, False)):
        record = await cluster.metadata.get(f"{BROKERS}/{node.id}")
        assert record is not None
        found, me = json.loads(record.value), node.placement.me
        assert found["pulsarServiceUrlTls"] == me.url_tls
        assert found["webServiceUrlTls"] == me.web_url_tls
        assert found["pulsarServiceUrl"] == (me.url if plain else None)
        assert found["webServiceUrl"] == (me.web_url if plain else None)
    assert both.placement.brokers[only.id] == only.placement.me
    assert only.placement.brokers[both.id] == both.placement.me
    await until(lambda: both.placement.leader == only.placement.leader is not None)


@pytest.mark.parametrize("plaintext", [True, False])
async def test_requests_over_the_channel_use_tls(
    cluster: Cluster, secured: Settings, authority: Authority, plaintext: bool
) -> None:
    near, far = [await cluster.add(**secured(plaintext_ports=plaintext)) for _ in range(2)]
    await (await client_of(far, authority)).create_producer(REGULAR)
    await until(lambda: near.owner_of(REGULAR) == far.id)
    over_tls = far.broker.handshakes[PortSetting.HTTP_PORT_TLS]
    before = over_tls.completed
    await near.broker.topics.cluster.unload(parse_topic_name(REGULAR), "")
    assert over_tls.completed == before + 1
    assert REGULAR not in far.broker.topics.loaded()


async def test_ordered_consumer_is_relayed_over_tls(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    near, far = await brokers(cluster, 2, **secured())
    await take_lead(far)
    await until(lambda: near.owner_of(NAME) == far.id)
    client = await client_of(near, authority)
    _, assignment = await client.subscribe_scalable(NAME, "s", "r")
    assert [each.segment_id for each in assignment.segments] == [0]
    assert near.broker.scalable.relays.open == 1
    assert group(far).group.registered() == ["r"]
    assert clients_of(far) == [True]


@pytest.mark.parametrize("over_tls", [True, False], ids=["from TLS", "from plain"])
async def test_connection_is_forwarded_over_tls(
    cluster: Cluster, secured: Settings, authority: Authority, over_tls: bool
) -> None:
    near, far = [await cluster.add(**secured(plaintext_ports=not over_tls)) for _ in range(2)]
    if over_tls:
        client = await client_of(near, authority, binary_address(far))
    else:
        named = far.placement.broker_url.removeprefix("pulsar://")
        connect = pb.CommandConnect(proxy_to_broker_url=named)
        client = await RawClient.open(HOST, near.broker.port, connect)
    producer = await client.create_producer(REGULAR)
    await asyncio.gather(*(producer.send(b"x" * 3_000_000) for _ in range(4)))
    assert REGULAR in far.broker.topics.loaded()
    assert clients_of(far) == [True]
    await client.close()


async def test_own_address_with_tls_is_not_forwarded(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    node = await cluster.add(**secured())
    client = await client_of(node, authority, binary_address(node))
    await client.ping()
    assert clients_of(node) == [True]


@pytest.mark.parametrize("wrong", ["name", "authority"])
async def test_cve_2022_33682_33683_33684_a_broker_with_a_wrong_certificate_gets_no_bytes(
    cluster: Cluster, secured: Settings, authority: Authority, tmp_path: Path, wrong: str
) -> None:
    issuer = authority if wrong == "name" else Authority(tmp_path / "stranger")
    addresses = ("192.0.2.1",) if wrong == "name" else (HOST,)
    near = await cluster.add(**secured())
    wrongly = server_settings(issuer.issue("far", addresses=addresses))
    far = await cluster.add(**secured(**wrongly))
    with pytest.raises((BrokerError, ConnectionError), match=r"cannot be reached|closed"):
        await client_of(near, authority, binary_address(far))
    assert not far.broker.connections
    with pytest.raises(PeerFailed, match="certificate verify failed"):
        await near.placement.connect(near.placement.brokers[far.id])
    assert len(far.admin.connections) == 0


async def test_plain_address_is_used_without_an_authority(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    """Nobody is told whom to trust, so TLS would fail: present clusters go on as before."""
    settings = secured(plaintext_ports=True, tls_trust_certs_file=None)
    near, far = [await cluster.add(**settings) for _ in range(2)]
    connect = pb.CommandConnect(
        proxy_to_broker_url=far.placement.broker_url.removeprefix("pulsar://")
    )
    client = await RawClient.open(HOST, near.broker.port, connect)
    assert clients_of(far) == [False]
    await client.close()


async def test_mutual_tls_between_brokers(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    own = authority.issue("broker-role")
    settings = secured(
        tls_client_certificates="required",
        broker_client_certificate_file=own.chain,
        broker_client_key_file=own.key,
    )
    near, far = [await cluster.add(**settings) for _ in range(2)]
    connection = await near.placement.connect(near.placement.brokers[far.id])
    assert far.broker.handshakes[PortSetting.HTTP_PORT_TLS].completed == 1
    await connection.close()


@pytest.mark.parametrize("over_tls", [True, False])
async def test_redirects_keep_the_scheme(
    cluster: Cluster, secured: Settings, authority: Authority, over_tls: bool
) -> None:
    near, far = [await cluster.add(**secured(plaintext_ports=True)) for _ in range(2)]
    await (await client_of(far, authority)).create_producer(REGULAR)
    await until(lambda: near.owner_of(REGULAR) == far.id)
    await until(lambda: len(led_by(near)) == len(led_by(far)) == 2)
    me, other = near.placement.me, far.placement.me
    wanted = other.web_url_for(over_tls)
    for path in (
        "/admin/v2/persistent/public/default/t/stats",
        f"/admin/v3/transactions/coordinatorStats?coordinatorId={led_by(far)[0]}",
    ):
        async with cluster.http.get(
            me.web_url_for(over_tls) + path, allow_redirects=False, ssl=authority.client_context()
        ) as answer:
            assert answer.status == 307
            assert answer.headers["Location"].startswith(f"{wanted}/admin/v")


def led_by(node: Node) -> list[int]:
    leaders = node.broker.transactions.coordinators.assignments()
    return [number for number, each in leaders.items() if each.broker_id == node.id]


async def test_client_uses_a_cluster_without_plain_ports(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    nodes = [await cluster.add(**secured()) for _ in range(3)]
    urls = ",".join(binary_address(each) for each in nodes)
    with capture_logs() as logged:
        async with (
            magnetar.connect(f"pulsar+ssl://{urls}", tls_trust_file=authority.chain) as client,
            client.producer(NAME, schema=str) as producer,
            client.stream_consumer(NAME, "sub", schema=str) as consumer,
        ):
            async with client.transaction() as transaction:
                await producer.send("hello", transaction=transaction)
            assert (await consumer.receive(20)).value == "hello"
    assert not [each for each in logged if each["log_level"] == "error"]
    assert all(all(clients_of(each)) for each in nodes)
