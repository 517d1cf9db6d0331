"""Leaders that vanish, and leads that flap, while ordered consumers are relayed or registered."""

import asyncio

import pytest

from broker.placement import BrokerAddress
from broker.scalable import relay
from broker.scalable.controller import TopicController
from broker.scalable.relay_exchange import Effect, PassOn, RelayExchange
from broker.scalable.topic_leadership import NotController
from config.bounds import REGISTRATION_TRIES_S, RELAY_ANSWER_S, RELAY_CONNECT_S
from magnetar.background_tasks import OwnerStopped
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import TopicName
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.raw_client import Session
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.relaying import (
    CONSUMERS,
    Held,
    brokers,
    group,
    hurry,
    led,
    refusal,
    relayed,
    takes,
)
from tests.unit.broker.scalable.several import NAME, TOPIC, take_lead

# A leader that is not heard any more


async def test_leader_that_stops_sending_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose machine, or the way to it, is gone: no end of the connection is ever seen."""
    set_bound(monkeypatch, "RELAY_KEEP_ALIVE_S", 0.05)
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    (connection,) = far.broker.connections
    (only,) = near.broker.scalable.relays._open
    connection.pause_reading("nothing comes through")
    await client.wait_closed()
    assert near.broker.scalable.relays.open == 0
    assert only._timer is not None
    assert only._timer.cancelled()


async def test_a_leader_that_has_nothing_to_say_is_asked_and_kept(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    pongs = asyncio.Semaphore(0)
    received = RelayExchange.received

    def counted(exchange: RelayExchange, command: pb.BaseCommand) -> object:
        if command.type == pb.BaseCommand.PONG:
            pongs.release()
        return received(exchange, command)

    monkeypatch.setattr(RelayExchange, "received", counted)
    (only,) = near.broker.scalable.relays._open
    only._keep_alive()  # it has been heard: the first assignment
    for _ in range(3):
        only._keep_alive()
        async with asyncio.timeout(TIMEOUT_S):
            await pongs.acquire()
        only._keep_alive()
    await far.broker.scalable.split(TOPIC, 0)
    update = (await session.next()).scalable_topic_assignment_update
    assert [s.segment_id for s in update.assignment.segments] == [1, 2]


@pytest.mark.parametrize("url", ["pulsar://h:99999999", "pulsar://[h:6650"])
async def test_a_leader_with_an_address_that_is_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    hurry(monkeypatch)
    near, *_ = await brokers(cluster)
    takes(monkeypatch, near, BrokerAddress(url, broker_id="a stand-in"))
    refused = await refusal(await near.client())
    assert refused.code == pb.ServiceNotReady
    assert "cannot be reached" in refused.message
    assert near.broker.scalable.relays.open == 0


def test_a_leader_that_is_silent_is_asked_again_before_the_client_gives_up() -> None:
    patience_s = 30
    assert REGISTRATION_TRIES_S / RELAY_ANSWER_S > 3
    assert patience_s > REGISTRATION_TRIES_S + RELAY_ANSWER_S
    assert 2 * RELAY_CONNECT_S < RELAY_ANSWER_S


async def test_connecting_is_tried_again_before_the_time_of_an_answer_is_over(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets to a machine that is gone are lost, so nothing ever comes of connecting to it."""
    set_bound(monkeypatch, "RELAY_CONNECT_S", 0.05)
    set_bound(monkeypatch, "RELAY_ANSWER_S", 3600)
    near, far, client = await led(cluster)
    loop = asyncio.get_running_loop()
    connect = loop.create_connection
    lost: list[object] = []

    async def connect_late(factory: object, *to: object, **options: object) -> object:
        if far.broker.port in to and len(lost) < 2:
            lost.append(factory)
            await asyncio.Event().wait()
        return await connect(factory, *to, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(loop, "create_connection", connect_late)
    await relayed(near, far, client)
    assert len(lost) == 2


Subscribing = asyncio.Task[tuple[Session, pb.ScalableConsumerAssignment]]


# A metadata store that does not answer


async def test_a_store_that_fails_is_not_needed_where_the_leader_is_known(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)

    async def fail(*_: object) -> None:
        raise MetadataError("The store is slow: try again.")

    monkeypatch.setattr(near.placement._ownership._metadata, "get", fail)
    await relayed(near, far, client)


@pytest.mark.parametrize(
    ("part", "name", "error"),
    [
        ("_leads", "take", MetadataError("The store is slow: try again.")),
        ("_topics", "get", MetadataError("The store is slow: try again.")),
        ("_follower", "follow", OwnerStopped("This broker stops: ask another one.")),
    ],
)
async def test_subscribe_that_fails_without_a_leader_is_retried(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, part: str, name: str, error: Exception
) -> None:
    near, _ = await brokers(cluster)
    owner = getattr(near.broker.scalable, part)
    call = getattr(owner, name)
    failed: list[object] = []

    async def fail_first(*args: object) -> object:
        if not failed:
            failed.append(args)
            raise error
        return await call(*args)

    client = await near.client()
    monkeypatch.setattr(owner, name, fail_first)
    _, assignment = await client.subscribe_scalable(NAME, "s", "r")
    assert [s.segment_id for s in assignment.segments] == [0]
    assert failed


async def test_where_nobody_is_there_to_ask_a_store_that_fails_refuses(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    near, _ = await brokers(cluster)

    async def fail(*_: object) -> None:
        raise MetadataError("The store is slow: try again.")

    monkeypatch.setattr(near.broker.scalable._leads, "take", fail)
    refused = await refusal(await near.client())
    assert (refused.code, refused.message) == (pb.MetadataError, "The store is slow: try again.")


# Many relays


async def test_relays_hear_of_owners_together(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of topics may change hands in one turn: that must not cost each relay a look."""
    near, far, client = await led(cluster)
    placement, relays = near.placement, near.broker.scalable.relays
    listeners = len(placement._owner_listeners), len(placement._broker_listeners)
    looked: list[TopicName] = []
    for subscription in ("s", "t", "u"):
        await client.subscribe_scalable(NAME, subscription, "r")
    assert relays.open == 3
    assert (len(placement._owner_listeners), len(placement._broker_listeners)) == listeners
    known_owner = placement.known_owner

    def look(name: TopicName) -> BrokerAddress | None:
        looked.append(name)
        return known_owner(name)

    monkeypatch.setattr(placement, "known_owner", look)
    placement._owner_changed("topic://public/default/another")
    assert TOPIC not in looked
    placement._owner_changed(NAME)
    assert TOPIC in looked
    await client.ping()
    read: list[TopicName] = []
    is_there = relays._is_there

    async def count(name: TopicName) -> bool:
        read.append(name)
        return await is_there(name)

    monkeypatch.setattr(relays, "_is_there", count)
    await far.broker.scalable._leads.give_up(TOPIC)
    await client.wait_closed()
    assert relays.open == 0
    assert read == [TOPIC], "one look for all"


async def test_waiting_for_an_owner_change_adds_no_listener(cluster: Cluster) -> None:
    near, _ = await brokers(cluster)
    placement, relays = near.placement, near.broker.scalable.relays
    listeners = len(placement._owner_listeners), len(placement._broker_listeners)
    waiting = [asyncio.create_task(relays.wait_for_change(TOPIC, 3600)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (len(placement._owner_listeners), len(placement._broker_listeners)) == listeners
    placement._owner_changed("topic://public/default/another")
    assert not any(changed.is_set() for changed in relays._waiting[TOPIC])
    placement._owner_changed(NAME)
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*waiting)
    assert not relays._waiting
    third = asyncio.create_task(relays.wait_for_change(TOPIC, 3600))
    await asyncio.sleep(0)
    placement._candidates = ()
    placement._brokers_changed()
    async with asyncio.timeout(TIMEOUT_S):
        await third


# In the same turn, and at the end


async def test_unsubscribe_in_the_turn_of_the_first_assignment(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)
    (connection,) = near.broker.connections
    leaving: list[asyncio.Task[list[str]]] = []
    effect = relay.Relay._effect

    async def leave() -> list[str]:
        await near.broker.scalable.controllers.unsubscribe(connection, 7)
        return group(far).group.registered()

    def left_at_once(self: relay.Relay, what: Effect) -> None:
        if isinstance(what, PassOn) and what.first:
            leaving.append(asyncio.create_task(leave()))
        effect(self, what)

    monkeypatch.setattr(relay.Relay, "_effect", left_at_once)
    await client.subscribe_scalable(NAME, "s", "r", consumer_id=7)
    assert await leaving[0] == [], "the leader is waited for"
    assert near.broker.scalable.relays.open == 0


async def test_a_broker_that_stops_waits_for_no_registration_for_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "CONTROLLER_CLOSE_S", 0.05)
    a, b = await brokers(cluster)
    held = Held(monkeypatch, b.broker.scalable._store, "put_consumer")
    client = await b.client()
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    await b.placement.begin_drain()
    async with asyncio.timeout(TIMEOUT_S):
        await b.broker.scalable.stop()
    assert not subscribing.done()
    held.go_on.set()
    await subscribing
    assert list(group(a).members) == ["r"]


# A lead that flaps


async def being_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, read: str
) -> tuple[
    Node, Held, asyncio.Task[tuple[Session, pb.ScalableConsumerAssignment]], TopicController
]:
    """A broker whose controller takes in a stored consumer, held at this call of its store."""
    (only,) = await brokers(cluster, 1)
    first = await only.client()
    await first.subscribe_scalable(NAME, "s", "r")
    await only.broker.scalable._leads.give_up(TOPIC)
    await first.wait_closed()
    await until(lambda: only.placement.known_owner(TOPIC) is None)
    held = Held(monkeypatch, only.broker.scalable._store, read)
    client = await only.client()
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    unfinished = only.broker.scalable.controllers.of(TOPIC)
    assert unfinished is not None
    return only, held, subscribing, unfinished


async def test_a_controller_that_was_being_made_while_the_lead_flapped_does_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take what is stored for consumers that never came back, and remove them."""
    only, held, subscribing, unfinished = await being_made(cluster, monkeypatch, "subscriptions")
    scalable = only.broker.scalable
    session = only.placement._session
    await only.view.expire()
    await until(lambda: scalable.controllers.of(TOPIC) is None)
    await until(lambda: only.placement._session not in (None, session))
    await take_lead(only)
    held.go_on.set()
    await subscribing
    assert scalable.controllers.of(TOPIC) is not unfinished
    assert not unfinished.groups
    assert list(group(only).members) == ["r"]
    assert await cluster.metadata.children(CONSUMERS) == ["r"]


async def test_controller_that_ends_while_it_loads_leaves_no_timers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    only, held, subscribing, unfinished = await being_made(cluster, monkeypatch, "consumers")
    scalable = only.broker.scalable
    scalable.controllers.lead_ended(TOPIC)
    held.go_on.set()
    await subscribing
    assert not unfinished.groups


async def test_a_controller_of_a_lost_lead_is_not_handed_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = await brokers(cluster, 1)
    scalable = only.broker.scalable
    held = Held(monkeypatch, scalable._store, "subscriptions")
    making = asyncio.create_task(scalable.controllers._lead(await scalable._topics.get(TOPIC)))
    await held.reached.wait()
    scalable.controllers.lead_ended(TOPIC)
    held.go_on.set()
    with pytest.raises(NotController):
        await making
