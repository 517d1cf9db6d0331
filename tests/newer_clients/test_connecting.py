"""Handshake, keep-alive and lookups as clients after 5.0.0-M1 do them."""

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.newer_clients.conftest import Connect, cpp_client, java_client
from tests.support.raw_client import BrokerError

TOPIC = "topic://public/default/orders"
AS_REGULAR = "persistent://public/default/orders"
OFF = pytest.mark.parametrize("settings", [{"scalable_topics_enabled": False}])
NO_TRANSACTIONS = pytest.mark.parametrize("settings", [{"transactions_enabled": False}])
NO_CREATION = pytest.mark.parametrize(
    "settings", [{"auto_topic_creation": False, "scalable_topic_auto_create": False}]
)


@pytest.mark.parametrize("greeting", [java_client, cpp_client])
async def test_the_handshake_of_each_client(connect: Connect, greeting: object) -> None:
    assert callable(greeting)
    connected = (await connect(greeting())).connected
    assert connected.protocol_version == 21
    assert connected.max_message_size == 5 * 1024 * 1024
    assert connected.feature_flags.supports_scalable_topics


async def test_an_empty_proxy_url_is_a_direct_connection(connect: Connect) -> None:
    """The connection on which clients watch namespaces and coordinators says so."""
    greeting = java_client()
    greeting.proxy_to_broker_url = ""
    assert greeting.HasField("proxy_to_broker_url")
    client = await connect(greeting)
    watch = await client.watch_namespace("public/default")
    assert (await watch.next()).watch_scalable_topics_update.HasField("snapshot")


async def test_a_ping_is_answered_whatever_else_goes_on(connect: Connect) -> None:
    client = await connect()
    await client.ping()
    await client.watch_dag(TOPIC)
    producer = await client.create_producer(AS_REGULAR + "-regular")
    for _ in range(3):
        await producer.send(b"x")
        await client.ping()


@NO_CREATION
async def test_lookup_of_the_regular_name_of_a_scalable_topic(
    broker: Broker, connect: Connect
) -> None:
    """C++ looks `persistent://t/n/x` up on behalf of `topic://t/n/x`, then asks for the layout."""
    await broker.scalable.create(parse_topic_name(TOPIC), segments=2, properties={})
    client = await connect(cpp_client())
    for name in (AS_REGULAR, TOPIC, "orders"):
        answer = await client.lookup(name)
        assert answer.response == pb.CommandLookupTopicResponse.Connect
        assert answer.broker_service_url == f"pulsar://127.0.0.1:{broker.port}"
        assert answer.authoritative
    _, update = await client.watch_dag(TOPIC)
    assert len(update.dag.segments) == 2
    assert AS_REGULAR not in broker.topics.loaded()


@NO_CREATION
async def test_lookup_of_a_regular_name_that_is_nothing_is_answered_too(connect: Connect) -> None:
    """The session connection comes before anybody knows what the name is."""
    client = await connect(cpp_client())
    answer = await client.lookup(AS_REGULAR)
    assert answer.response == pb.CommandLookupTopicResponse.Connect


@OFF
async def test_switched_off_is_said_in_the_handshake(connect: Connect) -> None:
    flags = (await connect()).connected.feature_flags
    assert not flags.supports_scalable_topics
    assert flags.supports_tc_metadata_discovery


@NO_TRANSACTIONS
async def test_no_transactions_is_said_in_the_handshake(connect: Connect) -> None:
    flags = (await connect()).connected.feature_flags
    assert flags.supports_scalable_topics
    assert not flags.supports_tc_metadata_discovery


@OFF
async def test_switched_off_requests_are_not_allowed(connect: Connect) -> None:
    """Each in its own response; what has none, and 82, with ERROR."""
    client = await connect()
    session, update = await client.watch_dag(TOPIC)
    assert update.error == pb.NotAllowedError
    with pytest.raises(BrokerError) as refused:
        await client.subscribe_scalable(TOPIC, "s", "c")
    assert refused.value.code == pb.NotAllowedError
    watch = await client.watch_namespace("public/default")
    answer = (await watch.next()).watch_scalable_topics_update
    assert answer.error == pb.NotAllowedError
    with pytest.raises(BrokerError) as refused:
        await client.unsubscribe_scalable(session)
    assert refused.value.code == pb.NotAllowedError
    client.close_dag(session)
    error = (await client.wait(client.events.get())).error
    assert error.error == pb.NotAllowedError


@OFF
@pytest.mark.parametrize("name", [TOPIC, "segment://public/default/orders/0000-ffff-0"])
async def test_switched_off_names_are_invalid(connect: Connect, name: str) -> None:
    client = await connect()
    partitions = pb.CommandPartitionedTopicMetadata(topic=name)
    for request in (
        client.lookup(name),
        client.request(pb.BaseCommand.PARTITIONED_METADATA, partitions),
        client.create_producer(name),
        client.subscribe(name, "s"),
    ):
        with pytest.raises(BrokerError) as refused:
            await request
        assert refused.value.code == pb.InvalidTopicName
