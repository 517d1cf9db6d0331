"""A client names one broker and reaches it through another."""

import asyncio

import pytest

from broker.wire import forwarding
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.bounds import set_bound
from tests.support.child_process import HOST, free_port
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node

TOPIC = "persistent://public/default/forwarded"


async def through(near: Node, target: str) -> RawClient:
    """A connection to one broker that names another."""
    connect = pb.CommandConnect(client_version="x", proxy_to_broker_url=target)
    return await RawClient.open(HOST, near.broker.port, connect)


def named(node: Node) -> str:
    return node.placement.broker_url.removeprefix("pulsar://")


async def test_the_named_broker_answers(cluster: Cluster) -> None:
    near, far = [await cluster.add() for _ in range(2)]
    await until(lambda: len(near.placement.brokers) == 2)
    client = await through(near, named(far))
    try:
        await until(lambda: len(far.broker.connections) == 1)
        producer = await client.create_producer(TOPIC)
        big = b"x" * 3_000_000
        receipts = await asyncio.gather(*(producer.send(big) for _ in range(4)))
        assert [each.message_id.entry_id for each in receipts] == [0, 1, 2, 3]
        assert TOPIC in far.broker.topics.loaded()
        assert TOPIC not in near.broker.topics.loaded()
        consumer = await client.subscribe(
            TOPIC,
            "s",
            pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest),
            permits=9,
        )
        assert [len((await consumer.receive()).payload) for _ in range(4)] == [len(big)] * 4
    finally:
        await client.close()
    await until(lambda: not far.broker.connections)


async def test_when_the_far_broker_goes_so_does_the_connection(cluster: Cluster) -> None:
    near, far = [await cluster.add() for _ in range(2)]
    await until(lambda: len(near.placement.brokers) == 2)
    client = await through(near, named(far))
    await until(lambda: len(far.broker.connections) == 1)
    for connection in list(far.broker.connections):
        connection.abort("a test")
    await until(lambda: not near.broker.connections)
    await client.close()


async def test_connection_is_forwarded_to_live_brokers_only(cluster: Cluster) -> None:
    near = await cluster.add()
    listening = await asyncio.start_server(lambda *_: None, HOST, free_port())
    port = listening.sockets[0].getsockname()[1]
    try:
        with pytest.raises((BrokerError, ConnectionError), match=r"no live broker|closed"):
            await through(near, f"{HOST}:{port}")
    finally:
        listening.close()


class _Sides:
    """The sides towards other brokers, as they are made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ended: list[object] = []
        sides = self

        class Side(forwarding._TargetConnection):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                sides.ended.append(self)

        patch.setattr(forwarding, "_TargetConnection", Side)


async def stood_still(near: Node, far: Node) -> RawClient:
    """A client of a broker that reads nothing any more, with so much on its way that it waits."""
    await until(lambda: len(near.placement.brokers) == 2)
    client = await through(near, named(far))
    await until(lambda: len(far.broker.connections) == 1)
    (connection,) = far.broker.connections
    connection.pause_reading("stands still")
    (nearer,) = near.broker.connections
    client.write(b"x" * 32_000_000)
    await until(lambda: nearer.paused)
    return client


async def test_closing_toward_a_broker_that_stands_still_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = _Sides(monkeypatch)
    set_bound(monkeypatch, "CLOSE_FLUSH_S", 0.05, in_module="broker.wire.forwarding")
    near, far = [await cluster.add() for _ in range(2)]
    client = await stood_still(near, far)
    (nearer,) = near.broker.connections
    nearer.close("a test")
    await until(lambda: sides.ended)
    await client.close()


async def test_a_broker_that_stands_still_is_given_up_though_its_client_stays(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = _Sides(monkeypatch)
    near, far = await cluster.add(keep_alive_interval_s=0.05), await cluster.add()
    client = await stood_still(near, far)
    await until(lambda: sides.ended)
    await until(lambda: not near.broker.connections)
    await client.close()
