"""Brokers that relay ordered consumers to who leads their topic, and what is done to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from broker.placement import BrokerAddress
from broker.scalable.group_controller import GroupController
from broker.scalable.topic_leadership import NotController
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from magnetar.protocol.names import TopicName
from tests.support.bounds import set_bound
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, RawClient, Session
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.node import group_of
from tests.unit.broker.scalable.several import NAME, TOPIC, take_lead

CONSUMERS = "/topics/public/default/t/subscriptions/s/consumers"


async def brokers(cluster: Cluster, count: int = 2, **settings: object) -> list[Node]:
    """So many, and a topic."""
    given = {"scalable_consumer_grace_period_s": 30} | settings
    nodes = [await cluster.add(**given) for _ in range(count)]
    await nodes[0].broker.scalable.create(TOPIC, segments=1, properties={})
    await nodes[0].broker.scalable._leads.give_up(TOPIC)
    await until(lambda: all(node.placement.known_owner(TOPIC) is None for node in nodes))
    return nodes


async def led(cluster: Cluster, count: int = 2) -> tuple[Node, Node, RawClient]:
    """A broker that does not lead the topic, the one that does, and a client of the first."""
    near, far, *_ = nodes = await brokers(cluster, count)
    await take_lead(far)
    await until(lambda: all(far.id == node.owner_of(NAME) for node in nodes))
    return near, far, await near.client()


async def relayed(near: Node, far: Node, client: RawClient) -> Session:
    """An ordered consumer that is served through a relay."""
    session, assignment = await client.subscribe_scalable(NAME, "s", "r")
    assert [s.segment_id for s in assignment.segments] == [0]
    assert near.broker.scalable.relays.open == 1
    assert group(far).group.registered() == ["r"]
    return session


def group(node: Node) -> GroupController:
    return group_of(node.broker.scalable)


async def refusal(client: RawClient, **how: object) -> BrokerError:
    with pytest.raises(BrokerError) as refused:
        await client.subscribe_scalable(NAME, "s", "r", **how)  # type: ignore[arg-type]
    return refused.value


class Held:
    """A call that goes no further than this until it is let go on."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        call = getattr(owner, name)

        async def held(*args: object) -> object:
            self.reached.set()
            await self.go_on.wait()
            return await call(*args)

        patch.setattr(owner, name, held)


def takes(patch: pytest.MonkeyPatch, node: Node, other: BrokerAddress) -> None:
    """Have a broker take another one for the leader, for good."""

    async def refuse(name: TopicName) -> None:
        raise NotController(f"{name} is led by another one.")

    patch.setattr(node.broker.scalable._leads, "take", refuse)
    patch.setattr(node.placement, "controller_of", lambda _: other)


@asynccontextmanager
async def stand_in(*answers: pb.BaseCommand) -> AsyncIterator[BrokerAddress]:
    """A broker that says this and nothing else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(encode_command(each) for each in answers))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield BrokerAddress(f"pulsar://{HOST}:{port}", broker_id="a stand-in")
    finally:
        server.close()


def hurry(patch: pytest.MonkeyPatch) -> None:
    """Give up soon."""
    set_bound(patch, "REGISTRATION_TRIES_S", 0.1)
    set_bound(patch, "RELAY_ANSWER_S", 0.05)
