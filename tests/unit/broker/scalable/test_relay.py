"""Ordered consumers that ask a broker which does not lead their topic, over real sockets."""

import asyncio
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from broker.placement import BrokerAddress
from broker.scalable import relay
from broker.scalable.group import SessionState
from broker.scalable.relay_exchange import RELAY_CLIENT, ExchangeState
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import encode_command
from storage.metadata.store import Session as MetadataSession
from tests.support.bounds import set_bound
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, Session
from tests.support.waiting import end, until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.relay_answers import CONNECTED, response
from tests.unit.broker.scalable.relaying import (
    CONSUMERS,
    Held,
    brokers,
    group,
    hurry,
    led,
    refusal,
    relayed,
    stand_in,
    takes,
)
from tests.unit.broker.scalable.several import NAME, TOPIC, OrderedReader, Writer, take_lead

FIRST_ASSIGNMENT = pb.ScalableConsumerAssignment(layout_epoch=0)


# Served through a relay


async def test_broker_that_does_not_lead_relays_assignments(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    (member,) = group(far).members.values()
    assert member.connection.client_version.startswith(RELAY_CLIENT)
    await far.broker.scalable.split(TOPIC, 0)
    update = (await session.next()).scalable_topic_assignment_update
    assert update.consumer_id == session.session_id
    assert [s.segment_id for s in update.assignment.segments] == [1, 2]
    assert not near.placement.owns(TOPIC)


async def test_consumers_of_several_brokers_share(cluster: Cluster) -> None:
    near, far, client = await led(cluster, 3)
    third = cluster.nodes[2]
    await far.broker.scalable.split(TOPIC, 0)
    first, _ = await client.subscribe_scalable(NAME, "s", "a")
    await (await third.client()).subscribe_scalable(NAME, "s", "b")
    update = (await first.next()).scalable_topic_assignment_update
    assert len(update.assignment.segments) == 1
    assert [n.broker.scalable.relays.open for n in (near, far, third)] == [1, 0, 1]


class AsksAnybody(OrderedReader):
    """As a client behind a proxy: it knows of no controller."""

    async def _stay_registered(self) -> None:
        broker = await self.anywhere()
        updates, first = await broker.subscribe_scalable(NAME, self.subscription, self.name)
        self.registrations += 1
        await self._assign(first)
        while True:
            update = await broker.wait(updates.updates.get(), 3600)
            await self._assign(update.scalable_topic_assignment_update.assignment)


async def test_everything_is_read_in_order_through_relays(cluster: Cluster) -> None:
    near, far, _ = await led(cluster)
    wrote, read = Writer(cluster, keys=4), AsksAnybody(cluster, "r")
    try:
        await until(lambda: len(read.attached) == 1 and sum(wrote.sent.values()) > 10)
        assert near.broker.scalable.relays.open == 1
        await far.broker.scalable.split(TOPIC, 0)
        await until(lambda: read.assigned == [1, 2])
        await far.broker.scalable._leads.give_up(TOPIC)
        await until(lambda: read.registrations > 1 and len(read.attached) == 2)
        await wrote.stop()
        await until(lambda: all(set(range(n)) <= set(read.got[k]) for k, n in wrote.sent.items()))
        for key, count in wrote.sent.items():
            # The end of its connection lost acknowledgements too, so some come again.
            assert list(dict.fromkeys(read.got[key])) == list(range(count)), read.got[key]
    finally:
        await read.close()
        await wrote.close()


async def test_when_the_lead_moves_the_client_is_sent_away(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    await far.broker.scalable._leads.give_up(TOPIC)
    await client.wait_closed()
    assert near.broker.scalable.relays.open == 0


async def test_a_leader_that_stands_still_serves_until_its_session_ends(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    far.view.open.clear()
    await far.view.expire(quietly=True)
    await client.wait_closed()
    assert near.broker.scalable.relays.open == 0
    assert far.broker.scalable.controllers.of(TOPIC) is not None, "it knows nothing of this"


async def test_deletion_of_a_topic_ends_relays_without_a_message_to_consumers(
    cluster: Cluster,
) -> None:
    """Sent away, their clients would make the topic again."""
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    await far.broker.scalable.delete(TOPIC, force=True)
    await until(lambda: near.broker.scalable.relays.open == 0)
    await client.ping()
    assert not client.closed.done()


async def test_topic_that_is_made_again_sends_consumers_of_the_earlier_one_away(
    cluster: Cluster,
) -> None:
    """They register again then; nobody would assign them segments of the new one."""
    near, far, client = await led(cluster, 3)
    await relayed(near, far, client)
    direct = await far.client()
    await direct.subscribe_scalable(NAME, "s", "d")
    await far.broker.scalable.delete(TOPIC, force=True)
    await until(lambda: not near.broker.scalable.relays.open)
    assert not client.closed.done()
    assert not direct.closed.done()
    await cluster.nodes[2].broker.scalable.create(TOPIC, segments=1, properties={})
    await until(lambda: client.closed.done() and direct.closed.done())


async def test_when_the_leader_closes_the_client_is_sent_away(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    for connection in list(far.broker.connections):
        connection.abort("a test")
    await client.wait_closed()


async def test_when_the_client_goes_the_leader_misses_it(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    await client.close()
    await until(lambda: not group(far).members)
    assert group(far).group.sessions["r"].state is SessionState.DISCONNECTED
    assert near.broker.scalable.relays.open == 0
    await until(lambda: not far.broker.connections)


async def test_unsubscribe_goes_through(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    await client.unsubscribe_scalable(session)
    assert group(far).group.registered() == []
    assert await cluster.metadata.children(CONSUMERS) == []
    assert near.broker.scalable.relays.open == 0
    await until(lambda: not far.broker.connections)
    await relayed(near, far, client)


async def test_unsubscribe_waits_for_no_leader_that_stands_still(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "RELAY_LEAVE_S", 0.05)
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    (connection,) = far.broker.connections
    connection.pause_reading("stands still")
    await client.unsubscribe_scalable(session)
    assert near.broker.scalable.relays.open == 0
    assert not client.closed.done()


async def test_consumer_that_registers_twice_has_one_relay(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    await client.subscribe_scalable(NAME, "s", "r", consumer_id=session.session_id)
    assert near.broker.scalable.relays.open == 1
    await until(lambda: len(far.broker.connections) == 1)
    assert list(group(far).members) == ["r"]


async def test_the_end_of_a_broker_ends_its_relays(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await relayed(near, far, client)
    await near.broker.scalable.close()
    assert near.broker.scalable.relays.open == 0
    await until(lambda: not far.broker.connections)


# While the registration is under way


async def test_the_lead_moves_while_a_consumer_is_relayed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)
    held = Held(monkeypatch, far.broker.scalable._store, "put_consumer")
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    await far.broker.scalable._leads.give_up(TOPIC)
    _, assignment = await subscribing
    assert [s.segment_id for s in assignment.segments] == [0]
    assert near.placement.owns(TOPIC)
    held.go_on.set()


async def test_the_lead_moves_while_a_consumer_is_stored(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An assignment of a leader that leads no more would be the last one."""
    other, leader, _ = await led(cluster)
    held = Held(monkeypatch, leader.broker.scalable._store, "put_consumer")
    client = await leader.client()
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    await leader.broker.scalable._leads.give_up(TOPIC)
    await take_lead(other)
    held.go_on.set()
    await subscribing
    assert list(group(other).members) == ["r"]


async def test_a_leader_that_dies_before_its_answer_is_followed_by_another(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)
    held = Held(monkeypatch, far.broker.scalable._store, "put_consumer")
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    await far.kill()
    _, assignment = await subscribing
    assert [s.segment_id for s in assignment.segments] == [0]
    assert list(group(near).members) == ["r"]


@pytest.mark.parametrize("moment", ["at the leader", "between tries"])
async def test_unsubscribe_while_it_is_under_way(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    near, far, client = await led(cluster)
    if moment == "at the leader":
        held = Held(monkeypatch, far.broker.scalable._store, "put_consumer")
    else:
        takes(monkeypatch, near, near.placement.me)
        held = Held(monkeypatch, near.broker.scalable.relays, "wait_for_change")
    subscribing = asyncio.create_task(refusal(client, consumer_id=9))
    await held.reached.wait()
    await client.unsubscribe_scalable(Session(client, 9))
    held.go_on.set()
    assert (await subscribing).code == pb.ConsumerNotFound
    assert near.broker.scalable.relays.open == 0
    if moment == "at the leader":
        await until(lambda: not far.broker.connections)
        await until(lambda: group(far).group.registered() == [])


async def test_a_client_that_goes_is_not_tried_for_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, client = await led(cluster)
    held = Held(monkeypatch, near.broker.scalable.relays, "wait_for_change")
    with monkeypatch.context() as patch:
        takes(patch, near, near.placement.me)
        subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
        await held.reached.wait()
    await far.broker.scalable._leads.give_up(TOPIC)
    await until(lambda: near.placement.known_owner(TOPIC) is None)
    await client.close()
    await until(lambda: not near.broker.connections)
    held.go_on.set()
    await until(lambda: not near.broker.scalable.controllers._work.busy)
    await end(subscribing)
    assert not near.placement.owns(TOPIC)


async def test_a_session_that_is_lost_while_the_lead_is_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, leader, _ = await led(cluster)
    live_session = leader.placement.live_session

    async def lost_at_once() -> MetadataSession:
        monkeypatch.setattr(leader.placement, "live_session", live_session)
        session = await live_session()
        await leader.view.expire()
        return session

    monkeypatch.setattr(leader.placement, "live_session", lost_at_once)
    _, assignment = await (await leader.client()).subscribe_scalable(NAME, "s", "r")
    assert [s.segment_id for s in assignment.segments] == [0]


# Brokers that end


async def test_a_draining_broker_relays(cluster: Cluster) -> None:
    a, b, *_ = await brokers(cluster)
    await b.placement.begin_drain()
    await relayed(b, a, await b.client())
    assert a.placement.owns(TOPIC)


async def test_subscribe_interrupted_by_a_drain_succeeds_at_another_broker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, *_ = await brokers(cluster)
    held = Held(monkeypatch, b.broker.scalable._store, "subscriptions")
    client = await b.client()
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    await held.reached.wait()
    await b.placement.begin_drain()
    await b.broker.scalable.stop()
    _, assignment = await subscribing
    assert [s.segment_id for s in assignment.segments] == [0]
    assert list(group(a).members) == ["r"]


async def test_consumers_that_have_closed_down_are_relayed_no_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The official client says nothing to the controller when a consumer of it is closed."""
    set_bound(monkeypatch, "RELAYED_CONSUMERS", 1)
    set_bound(monkeypatch, "TAKE_UP_WAIT_S", 0.1)
    near, far, client = await led(cluster)
    for name in ("a", "b"):
        await client.subscribe_scalable(NAME, "s", name)
        options = pb.CommandSubscribe(consumer_name=f"{name}-seg-0")
        segment = await (await far.client()).subscribe(
            "segment://public/default/t/0000-ffff-0", "s", options
        )
        await until(lambda name=name: group(far).group.was_seen(name))  # type: ignore[misc]
        await segment.close()
        await until(lambda: not near.broker.scalable.relays.open)
    assert not client.closed.done()
    assert group(far).idle


# Refusals


async def test_a_refusal_of_the_leader_is_passed_on(cluster: Cluster) -> None:
    near, far, client = await led(cluster)
    await (await far.client()).subscribe_scalable(NAME, "s", "q", kind=pb.CHECKPOINT)
    direct = await refusal(await far.client())
    through = await refusal(client)
    assert (through.code, through.message) == (pb.NotAllowedError, direct.message)
    assert near.broker.scalable.relays.open == 0
    assert not client.closed.done()


async def test_a_broker_relays_so_many(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "RELAYED_CONSUMERS", 1)
    near, far, client = await led(cluster)
    session = await relayed(near, far, client)
    refused = await refusal(client)
    assert refused.code == pb.TooManyRequests
    await client.unsubscribe_scalable(session)
    await relayed(near, far, client)


async def test_a_topic_that_is_not_there_is_refused_at_once(cluster: Cluster) -> None:
    _, _, client = await led(cluster)
    with pytest.raises(BrokerError) as refused:
        await client.subscribe_scalable(f"{NAME}2", "s", "r")
    assert refused.value.code == pb.TopicNotFound


async def test_brokers_that_take_each_other_for_the_leader_refuse(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    a, b, *_ = await brokers(cluster)
    takes(monkeypatch, a, b.placement.me)
    takes(monkeypatch, b, a.placement.me)
    begun: list[Node] = []
    for node in (a, b):
        counted(monkeypatch, node, begun.append)
    refused = await refusal(await a.client())
    assert refused.code == pb.ServiceNotReady
    assert "is led by" in refused.message
    assert set(map(id, begun)) == {id(a)}, "the other one asks nobody"


def counted(patch: pytest.MonkeyPatch, node: Node, count: Callable[[Node], None]) -> None:
    """Tell of each relay that a broker begins."""

    class Counted(relay.Relay):
        async def register(self) -> None:
            count(node)
            await super().register()

    relays = node.broker.scalable.relays
    begin = relays.begin

    def begun(*args: object) -> relay.Relay | None:
        patch.setattr(relay, "Relay", Counted)
        return begin(*args)  # type: ignore[arg-type]

    patch.setattr(relays, "begin", begun)


async def test_a_leader_that_never_answers_is_given_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    near, *_ = await brokers(cluster)
    async with stand_in() as silent:
        takes(monkeypatch, near, silent)
        refused = await refusal(await near.client())
    assert refused.code == pb.ServiceNotReady
    assert "no answer within" in refused.message
    assert near.broker.scalable.relays.open == 0


async def test_an_answer_of_the_last_moment_counts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is passed on as it comes, so nothing else may be said to the client."""
    hurry(monkeypatch)
    set_bound(monkeypatch, "RELAY_ANSWER_S", 0.3)
    near, *_ = await brokers(cluster)
    writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    server = await asyncio.start_server(lambda _, writer: writers.put_nowait(writer), HOST, 0)
    port = server.sockets[0].getsockname()[1]
    takes(monkeypatch, near, BrokerAddress(f"pulsar://{HOST}:{port}", broker_id="a stand-in"))
    client = await near.client()
    subscribing = asyncio.create_task(client.subscribe_scalable(NAME, "s", "r"))
    writer = await writers.get()
    writer.write(encode_command(CONNECTED))
    (only,) = near.broker.scalable.relays._open
    await until(lambda: only._exchange.state is ExchangeState.REGISTERING)
    first = response(only._exchange._request.request_id, assignment=FIRST_ASSIGNMENT)
    writer.write(encode_command(first))
    # Nobody is heard meanwhile, so the answer and the end of its time come together.
    time.sleep(0.3)
    assert (await subscribing)[1] == FIRST_ASSIGNMENT
    await client.ping()
    assert client.events.empty(), "one answer"
    assert near.broker.scalable.relays.open == 1
    writer.close()
    server.close()
    await client.wait_closed()


async def test_a_leader_that_cannot_be_reached(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    near, *_ = await brokers(cluster)
    async with stand_in() as gone:
        pass
    takes(monkeypatch, near, gone)
    refused = await refusal(await near.client())
    assert refused.code == pb.ServiceNotReady
    assert "cannot be reached" in refused.message


async def test_a_leader_that_says_what_it_must_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    near, *_ = await brokers(cluster)
    odd = pb.BaseCommand(type=pb.BaseCommand.SUCCESS, success=pb.CommandSuccess(request_id=1))
    async with stand_in(odd) as strange:
        takes(monkeypatch, near, strange)
        with capture_logs() as logs:
            refused = await refusal(await near.client())
    assert refused.code == pb.ServiceNotReady
    assert any(line["event"] == "relay_broken" for line in logs)
