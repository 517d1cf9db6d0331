"""Several brokers: where lookups lead, who gets what, and what happens when a broker goes."""

import asyncio
import random

import pytest
from structlog.testing import capture_logs

from broker.placement.members import BROKERS, member_key
from broker.placement.ownership import owner_key
from broker.placement.placement import SupersededProcess
from magnetar.background_tasks import BackgroundTasks, EndsForGood
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node

TOPIC = "persistent://public/default/t"
TOPICS = [f"{TOPIC}{number}" for number in range(30)]
Answer = pb.CommandLookupTopicResponse
Kind = pb.BaseCommand


async def lookup(node: Node, topic: str, *, authoritative: bool = False) -> Answer:
    request = pb.CommandLookupTopic(topic=topic, authoritative=authoritative)
    client = await node.client()
    return (await client.request(Kind.LOOKUP, request)).lookup_response


async def found_by(cluster: Cluster, node: Node, topic: str) -> Node:
    """Where a client ends that follows redirects, as clients do."""
    answer = await lookup(node, topic)
    for _ in cluster.nodes:
        (node,) = [
            each for each in cluster.nodes if each.placement.broker_url == answer.broker_service_url
        ]
        if answer.response == Answer.Connect:
            return node
        assert answer.response == Answer.Redirect
        answer = await lookup(node, topic, authoritative=answer.authoritative)
    raise AssertionError("sent around in a circle")


async def producer_on(cluster: Cluster, asked: Node, topic: str = TOPIC) -> RawProducer:
    """A producer where lookups lead, however often that takes."""
    while True:
        node = await found_by(cluster, asked, topic)
        try:
            return await (await node.client()).create_producer(topic)
        except BrokerError as error:
            if error.code != pb.ServiceNotReady:
                raise
            await asyncio.sleep(0.005)


async def messages(client: RawClient, topic: str, count: int) -> list[bytes]:
    earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await client.subscribe(topic, "reader", earliest, permits=1000)
    return [(await consumer.receive()).payload for _ in range(count)]


async def closed(producer: RawProducer) -> None:
    """Wait for CLOSE_PRODUCER."""
    while True:
        command = await producer.client.wait(producer.events.get())
        if command.type == Kind.CLOSE_PRODUCER:
            return


# Lookups


async def test_asked_broker_serves_an_unowned_topic_and_others_redirect_to_it(
    cluster: Cluster,
) -> None:
    first, second = await cluster.add(), await cluster.add()
    producer = await (await first.client()).create_producer(TOPIC)
    await producer.send(b"m")
    assert cluster.owners(TOPIC) == [first]
    await until(lambda: second.owner_of(TOPIC) == first.id)
    found = await lookup(second, TOPIC)
    assert found.response == Answer.Connect
    assert found.broker_service_url == first.placement.broker_url
    with pytest.raises(BrokerError) as refused:
        await (await second.client()).create_producer(TOPIC)
    assert refused.value.code == pb.ServiceNotReady
    assert cluster.owners(TOPIC) == [first]


async def test_lookup_of_an_unowned_topic_names_the_broker_that_then_owns_it(
    cluster: Cluster,
) -> None:
    nodes = [await cluster.add() for _ in range(3)]
    for topic in TOPICS:
        ends = {(await found_by(cluster, node, topic)).id for node in nodes[:1]}
        assert len(ends) == 1
        assert not cluster.owners(topic)
        await producer_on(cluster, nodes[0], topic)
        (owner,) = cluster.owners(topic)
        assert {owner.id} == ends
    shares = [sum(node.owns(topic) for topic in TOPICS) for node in nodes]
    assert max(shares) - min(shares) <= 1, shares


async def test_a_lookup_that_another_broker_sent_is_answered_here(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    for topic in TOPICS[:5]:
        for node in nodes:
            answer = await lookup(node, topic, authoritative=True)
            assert answer.response == Answer.Connect
            assert answer.broker_service_url == node.placement.broker_url
            assert answer.authoritative


async def test_every_broker_tells_the_layouts_of_scalable_topics(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    for node in nodes:
        answer = await lookup(node, "topic://public/default/s")
        assert answer.response == Answer.Connect
        assert answer.broker_service_url == node.placement.broker_url


async def test_many_names_asked_for_together_are_spread(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(3)]
    for topic in TOPICS[:10]:
        await (await nodes[0].client()).create_producer(topic)
    chosen = [(await found_by(cluster, nodes[1], topic)).id for topic in TOPICS[10:]]
    assert chosen.count(nodes[0].id) <= 1
    assert abs(chosen.count(nodes[1].id) - chosen.count(nodes[2].id)) <= 1


async def test_of_two_that_take_it_at_once_one_serves(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(2)]
    for topic in TOPICS[:10]:
        clients = [await node.client() for node in nodes]
        random.Random(topic).shuffle(clients)
        done = await asyncio.gather(
            *(client.create_producer(topic) for client in clients), return_exceptions=True
        )
        refused = [each for each in done if isinstance(each, BrokerError)]
        assert [error.code for error in refused] == [pb.ServiceNotReady]
        assert len(cluster.owners(topic)) == 1


# Going


async def test_after_a_crash_the_others_take_over_what_it_owned(cluster: Cluster) -> None:
    nodes = [await cluster.add() for _ in range(3)]
    first = nodes[0]
    producers = [await (await first.client()).create_producer(topic) for topic in TOPICS[:6]]
    for producer in producers:
        await producer.send(b"before")
    await first.kill()
    await cluster.all_know(*nodes[1:])
    for topic in TOPICS[:6]:
        producer = await producer_on(cluster, nodes[1], topic)
        await producer.send(b"after")
        assert await messages(producer.client, topic, 2) == [b"before", b"after"]
    assert sorted(len(node.placement.owned) for node in nodes[1:]) == [3, 3]
    assert sum(node.placement.counters.taken_over for node in nodes[1:]) == 6


async def test_a_paused_owner_that_wakes_up_acknowledges_nothing(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    late = await (await first.client()).create_producer(TOPIC)
    await late.send(b"before")
    first.view.open.clear()
    await first.view.expire(quietly=True)
    await cluster.all_know(second)
    assert first.owns(TOPIC), "it has not heard of anything"
    producer = await producer_on(cluster, second)
    await producer.send(b"after")
    sending = asyncio.ensure_future(late.send(b"never"))
    await asyncio.sleep(0)
    await late.client.ping()
    first.view.open.set()
    await until(lambda: not first.owns(TOPIC) and TOPIC not in first.broker.topics.loaded())
    assert not sending.done() or sending.exception() is not None
    sending.cancel()
    assert await messages(producer.client, TOPIC, 2) == [b"before", b"after"]
    await producer.send(b"more")
    assert (await found_by(cluster, first, TOPIC)) is second


async def test_with_its_session_a_broker_loses_everything_and_comes_back(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    producer = await (await first.client()).create_producer(TOPIC)
    consumer = await (await first.client()).subscribe(TOPIC, "s", permits=10)
    await producer.send(b"m")
    await consumer.receive()
    await first.view.expire()
    await closed(producer)
    command = await consumer.client.wait(consumer.events.get())
    assert command.type == Kind.CLOSE_CONSUMER
    await cluster.all_know(first, second)
    assert first.placement.counters.sessions_lost == 1
    again = await producer_on(cluster, second)
    await again.send(b"n")
    assert await messages(again.client, TOPIC, 2) == [b"m", b"n"]
    assert len(cluster.owners(TOPIC)) == 1


async def test_a_draining_broker_hands_over_and_takes_nothing(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    producers = [await (await first.client()).create_producer(topic) for topic in TOPICS[:5]]
    for producer in producers:
        await producer.send(b"before")
    asked = await first.client()
    hold = asyncio.Event()
    unload = first.broker.topics._unload_alone

    async def held_back(key: str) -> None:
        await unload(key)
        await hold.wait()

    first.broker.topics._unload_alone = held_back  # type: ignore[method-assign]
    draining = asyncio.ensure_future(first.broker.drain())
    await closed(producers[0])
    await until(lambda: second.placement.candidates == (second.id,))
    request = pb.CommandLookupTopic(topic=TOPICS[9], authoritative=True)
    answer = (await asked.request(Kind.LOOKUP, request)).lookup_response
    assert answer.response == Answer.Redirect
    assert answer.broker_service_url == second.placement.broker_url
    with pytest.raises(BrokerError) as refused:
        await asked.create_producer(TOPICS[9])
    assert refused.value.code == pb.ServiceNotReady
    await (await producer_on(cluster, second, TOPICS[0])).send(b"after")
    hold.set()
    await draining
    await first.stop()
    await until(lambda: not second.placement.counters.taken_over)
    for topic in TOPICS[:5]:
        producer = await producer_on(cluster, second, topic)
        await producer.send(b"last")
    assert await messages(producer.client, TOPICS[0], 3) == [b"before", b"after", b"last"]
    assert second.placement.counters.taken_over == 0, "nothing had to be taken"


# The same broker again


async def test_a_restarted_broker_takes_over_what_its_former_self_had(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    producer = await (await first.client()).create_producer(TOPIC)
    await producer.send(b"before")
    port, http_port = first.broker.port, first.admin.port
    first.view.open.clear()
    await first.broker._server.stop()
    for connection in list(first.broker.connections):
        connection.abort("killed")
    await first.admin.stop()
    cluster.nodes.remove(first)
    again = await cluster.add(port=port, http_port=http_port)
    assert again.id == first.id
    await until(lambda: second.owner_of(TOPIC) == again.id)
    producer = await producer_on(cluster, second)
    await producer.send(b"after")
    assert cluster.owners(TOPIC) == [again]
    await first.view.expire(quietly=True)
    assert again.owns(TOPIC), "the record hangs on the new session"
    assert await cluster.metadata.get(owner_key(TOPIC)) is not None
    assert await cluster.metadata.get(member_key(again.id)) is not None
    assert await messages(producer.client, TOPIC, 2) == [b"before", b"after"]


async def test_one_whose_id_a_later_process_has_gives_everything_up(cluster: Cluster) -> None:
    first = await cluster.add()
    await (await first.client()).create_producer(TOPIC)
    record = await cluster.metadata.get(member_key(first.id))
    assert record is not None
    later = record.value.replace(first.placement._incarnation.encode(), b"later")
    await cluster.metadata.put(member_key(first.id), later)
    await until(lambda: not first.broker.topics.loaded())
    assert first.placement.draining
    assert not first.placement.owned
    with pytest.raises(BrokerError) as refused:
        await (await first.client()).create_producer(TOPIC)
    assert refused.value.code == pb.ServiceNotReady
    assert await cluster.metadata.get(owner_key(TOPIC)) is None
    assert (await cluster.metadata.children(BROKERS)) == [first.id]


async def put_later_process(cluster: Cluster, node: Node) -> None:
    record = await cluster.metadata.get(member_key(node.id))
    assert record is not None
    later = record.value.replace(node.placement._incarnation.encode(), b"later")
    await cluster.metadata.put(member_key(node.id), later)


async def test_tasks_of_a_superseded_process_end_for_good(
    cluster: Cluster,
) -> None:
    first = await cluster.add()
    with capture_logs() as logs:
        await put_later_process(cluster, first)
        await until(lambda: [one for one in logs if one.get("task") == "transaction_session"])
    with pytest.raises(SupersededProcess) as refused:
        await first.placement.live_session()
    assert isinstance(refused.value, EndsForGood)
    told = [one["event"] for one in logs if one.get("task") == "transaction_session"]
    assert told == ["task_ended_for_good"]
    assert not first.broker.transactions.coordinators.led()


async def test_one_that_stops_gives_way_to_nobody(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await cluster.add()
    tasks = first.placement._tasks
    stop = BackgroundTasks.stop

    async def slowly(stopped: BackgroundTasks) -> None:
        await stop(stopped)
        if stopped is tasks:
            await put_later_process(cluster, first)
            await asyncio.sleep(0.05)

    monkeypatch.setattr(BackgroundTasks, "stop", slowly)
    with capture_logs() as logs:
        await first.stop()
    events = {one["event"] for one in logs}
    assert not events & {"broker_superseded", "task_failed", "stop_failed"}, logs
    assert not tasks.busy


async def test_a_record_that_another_owner_has_unloads_the_topic(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    producer = await (await first.client()).create_producer(TOPIC)
    await cluster.metadata.put(owner_key(TOPIC), b'{"brokerId":"x:1","incarnation":"y"}')
    await closed(producer)
    await until(lambda: TOPIC not in first.broker.topics.loaded())
    assert not first.owns(TOPIC)
    assert second.placement.known_owner(parse_topic_name(TOPIC)) is None, "x is no live broker"


async def test_a_topic_that_is_not_there_is_not_owned(cluster: Cluster) -> None:
    first = await cluster.add(auto_topic_creation=False)
    with pytest.raises(BrokerError) as refused:
        await (await first.client()).create_producer(TOPIC)
    assert refused.value.code == pb.TopicNotFound
    assert not first.placement.owned
    assert first.placement.counters.acquired == 0


async def test_a_listener_that_fails_is_the_only_one_that_misses_anything(
    cluster: Cluster,
) -> None:
    one, other = [await cluster.add() for _ in range(2)]
    heard: list[str] = []

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    one.placement.on_change(fails)
    one.placement.on_change(lambda name: heard.append(str(name)))
    one.placement.on_brokers(fails)
    for topic in TOPICS[:3]:
        await other.placement.acquire(parse_topic_name(topic))
    await until(lambda: set(heard) >= set(TOPICS[:3]))
    await cluster.add()
    assert len(one.placement.brokers) == 3
