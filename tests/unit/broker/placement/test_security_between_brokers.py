"""A cluster with TLS, authentication and authorization: brokers among themselves, and clients."""

from collections.abc import Callable
from pathlib import Path

import pytest

import magnetar
from broker.placement.peer_failed import PeerFailed
from config.settings import ConfigurationError
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName, parse_topic_name
from magnetar.protocol.txn_id import TxnId
from security.secret_files import write_secret
from tests.support.authority import HOST, Authority, server_settings
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import RawProducer
from tests.support.roles import TOKENS, connect_as, token_of
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.relaying import brokers, group
from tests.unit.broker.scalable.several import NAME, take_lead

REGULAR = "persistent://public/default/t"
NAMESPACE = NamespaceName("public", "default")
Settings = Callable[..., dict[str, object]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def secured(authority: Authority, tmp_path: Path) -> Settings:
    """The settings of a broker with everything on; `role` is its own."""

    def make(role: str = "broker", **more: object) -> dict[str, object]:
        token = tmp_path / f"{role}.token"
        if not token.exists():
            write_secret(token, token_of(role).encode())
        return {
            **server_settings(authority.issue("broker")),
            **TOKENS,
            "tls_trust_certs_file": authority.chain,
            "tls_client_certificates": "wanted",
            "plaintext_ports": False,
            "authentication_providers": ("token", "tls"),
            "authorization": "on",
            "superuser_roles": ("broker", "root"),
            "broker_client_token_file": token,
            **more,
        }

    return make


async def client_of(
    node: Node, authority: Authority, connect: pb.CommandConnect, role: str = ""
) -> RawClient:
    """A client over TLS; with `role` it shows a certificate of that role."""
    port = node.broker.port_tls
    assert port is not None
    own = authority.issue(role) if role else None
    client = await RawClient.open(HOST, port, connect, tls=authority.client_context(own))
    node.clients.append(client)
    return client


async def grant(node: Node, **actions: list[str]) -> None:
    await node.broker.namespaces.change(
        NAMESPACE, lambda record: record.update(auth_policies={"namespace_auth": dict(actions)})
    )


def address(node: Node) -> str:
    url = node.placement.me.url_tls
    assert url is not None
    return url.removeprefix("pulsar+ssl://")


async def test_brokers_make_requests_of_each_other(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    near, far = [await cluster.add(**secured()) for _ in range(2)]
    await (await client_of(far, authority, connect_as("root"))).create_producer(REGULAR)
    await until(lambda: near.owner_of(REGULAR) == far.id)
    await near.broker.topics.cluster.unload(parse_topic_name(REGULAR), "")
    assert REGULAR not in far.broker.topics.loaded()


async def test_a_broker_whose_role_others_would_refuse_does_not_start(
    cluster: Cluster, secured: Settings
) -> None:
    with pytest.raises(ConfigurationError, match="not in superuser_roles"):
        await cluster.add(**secured("stranger"))
    with pytest.raises(ConfigurationError, match="broker_client_token_file"):
        await cluster.add(**secured(broker_client_token_file=None))


async def test_the_channel_is_for_brokers_alone(
    cluster: Cluster, secured: Settings, tmp_path: Path
) -> None:
    near, far = [await cluster.add(**secured()) for _ in range(2)]
    # What a client would have: a valid token, of a role that is no superuser.
    (tmp_path / "broker.token").write_text(token_of("user"))
    with pytest.raises(PeerFailed, match="refuses the credentials of this one"):
        await near.placement.connect(near.placement.brokers[far.id])


async def test_an_ordered_consumer_is_relayed_by_its_own_rights(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    near, far = await brokers(cluster, 2, **secured())
    await take_lead(far)
    await until(lambda: near.owner_of(NAME) == far.id)
    stranger = await client_of(near, authority, connect_as("stranger"))
    with pytest.raises(BrokerError) as refused:
        await stranger.subscribe_scalable(NAME, "s", "x")
    assert refused.value.code == pb.AuthorizationError
    await grant(near, reader=["consume"])
    reader = await client_of(near, authority, connect_as("reader"))
    _, assignment = await reader.subscribe_scalable(NAME, "s", "r")
    assert [each.segment_id for each in assignment.segments] == [0]
    assert group(far).group.registered() == ["r"]


@pytest.mark.parametrize("method", ["token", "certificate"])
async def test_a_forwarded_client_keeps_its_role(
    cluster: Cluster, secured: Settings, authority: Authority, method: str
) -> None:
    near, far = [await cluster.add(**secured()) for _ in range(2)]
    await grant(near, writer=["produce"])
    connect = connect_as("writer")
    if method == "certificate":
        connect = pb.CommandConnect(auth_method_name="tls")
    connect.proxy_to_broker_url = address(far)
    client = await client_of(near, authority, connect, "writer" if method != "token" else "")
    (connection,) = far.broker.connections
    assert connection.owner == "writer"
    producer = await client.create_producer(REGULAR)
    await producer.send(b"x")
    with pytest.raises(BrokerError) as refused:
        await client.subscribe(REGULAR, "s")
    assert refused.value.code == pb.AuthorizationError

    # The broker that owns the topic does not lead the coordinator of these transactions.
    coordinators = near.broker.transactions.coordinators
    await until(lambda: bool(coordinators.led()))
    number = coordinators.led()[0].coordinator_id
    own, foreign = [await coordinators.begin(number, 60_000, role) for role in ("writer", "root")]
    await send_in(producer, own)
    with pytest.raises(BrokerError, match="There is no transaction"):
        await send_in(producer, foreign)


async def send_in(producer: RawProducer, txn: TxnId) -> None:
    await producer.send(
        b"x",
        send=pb.CommandSend(txnid_most_bits=txn.most, txnid_least_bits=txn.least),
        metadata=pb.MessageMetadata(txnid_most_bits=txn.most, txnid_least_bits=txn.least),
    )


async def test_a_client_that_is_not_logged_in_is_not_forwarded(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    near, far = [await cluster.add(**secured()) for _ in range(2)]
    connect = pb.CommandConnect(client_version="x", proxy_to_broker_url=address(far))
    with pytest.raises(BrokerError) as refused:
        await client_of(near, authority, connect)
    assert refused.value.code == pb.AuthenticationError
    assert not far.broker.connections


async def test_the_client_uses_a_cluster_with_everything_on(
    cluster: Cluster, secured: Settings, authority: Authority
) -> None:
    nodes = [await cluster.add(**secured()) for _ in range(3)]
    await grant(nodes[0], app=["produce", "consume"])
    urls = ",".join(map(address, nodes))
    async with (
        magnetar.connect(
            f"pulsar+ssl://{urls}", tls_trust_file=authority.chain, token=token_of("app")
        ) as client,
        client.producer(NAME, schema=str) as producer,
        client.stream_consumer(NAME, "sub", schema=str) as consumer,
    ):
        async with client.transaction() as transaction:
            await producer.send("hello", transaction=transaction)
        assert (await consumer.receive(20)).value == "hello"
