"""Scalable topics over the wire: one broker in this process, clients of the bare protocol."""

import asyncio
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient, RawConsumer, Session
from tests.support.waiting import until

NAME = "topic://public/default/t"
TOPIC = parse_topic_name(NAME)
EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


async def client_of(broker: Broker) -> RawClient:
    return await RawClient.open("127.0.0.1", broker.port)


def names(dag: pb.ScalableTopicDAG) -> dict[int, str]:
    return {
        s.segment_id: f"segment://public/default/t/{s.hash_start:04x}-{s.hash_end:04x}-{s.segment_id}"
        for s in dag.segments
    }


async def publish(client: RawClient, segment: str, *payloads: str) -> None:
    producer = await client.create_producer(segment)
    for payload in payloads:
        await producer.send(payload.encode())
    await producer.close()


async def receive(consumer: RawConsumer, count: int) -> list[str]:
    """So many messages, each acknowledged."""
    found = []
    for _ in range(count):
        message = await consumer.receive()
        consumer.ack(message.message_id)
        found.append(message.payload.decode())
    return found


async def next_segments(session: Session) -> list[int]:
    update = (await session.next()).scalable_topic_assignment_update
    return [segment.segment_id for segment in update.assignment.segments]


async def test_a_stream_goes_on_in_the_children_and_nothing_is_lost(broker: Broker) -> None:
    client = await client_of(broker)
    dag_session, first = await client.watch_dag(NAME)
    parent = names(first.dag)[0]
    stream, assignment = await client.subscribe_scalable(NAME, "s", "c")
    assert [s.segment_topic for s in assignment.segments] == [parent]
    options = pb.CommandSubscribe(consumer_name="c-seg-0")
    options.MergeFrom(EARLIEST)
    consumer = await client.subscribe(parent, "s", options, permits=100)
    await publish(client, parent, "1", "2")

    await broker.scalable.split(TOPIC, 0)
    dag = (await dag_session.next()).scalable_topic_update.dag
    assert dag.epoch == 1
    with pytest.raises(BrokerError) as refused:
        await client.create_producer(parent)
    assert refused.value.code == pb.TopicTerminatedError
    await publish(client, names(dag)[1], "3")
    await publish(client, names(dag)[2], "4")

    assert await receive(consumer, 2) == ["1", "2"]
    assert await next_segments(stream) == [1, 2]
    await consumer.close()
    for segment_id, payload in ((1, "3"), (2, "4")):
        child = await client.subscribe(
            names(dag)[segment_id],
            "s",
            pb.CommandSubscribe(consumer_name=f"c-seg-{segment_id}"),
            permits=10,
        )
        assert await receive(child, 1) == [payload]

    await broker.scalable.prune_all()
    dag = (await dag_session.next()).scalable_topic_update.dag
    assert (dag.epoch, sorted(names(dag))) == (2, [1, 2])
    with pytest.raises(BrokerError) as gone:
        await client.subscribe(parent, "s")
    assert gone.value.code == pb.TopicNotFound
    await client.close()


async def test_a_queue_subscription_made_on_the_parent_covers_what_follows(broker: Broker) -> None:
    client = await client_of(broker)
    session, first = await client.watch_dag(NAME)
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    await client.subscribe(names(first.dag)[0], "q", shared, permits=10)
    await broker.scalable.split(TOPIC, 0)
    dag = (await session.next()).scalable_topic_update.dag
    await publish(client, names(dag)[2], "before it is subscribed")
    late = await client.subscribe(names(dag)[2], "q", shared, permits=10)
    assert await receive(late, 1) == ["before it is subscribed"]
    await client.close()


async def test_segments_change_hands_without_consumer_busy(broker: Broker) -> None:
    await broker.scalable.create(TOPIC, segments=2, properties={})
    first, second = await client_of(broker), await client_of(broker)
    a, assignment = await first.subscribe_scalable(NAME, "s", "a")
    own = {s.segment_id: s.segment_topic for s in assignment.segments}
    consumers = {
        n: await first.subscribe(topic, "s", pb.CommandSubscribe(consumer_name=f"a-seg-{n}"))
        for n, topic in own.items()
    }
    b, assignment = await second.subscribe_scalable(NAME, "s", "b")
    assert not assignment.segments
    assert await next_segments(a) == [0]
    await consumers[1].close()
    assert await next_segments(b) == [1]
    await second.subscribe(own[1], "s", pb.CommandSubscribe(consumer_name="b-seg-1"))
    await first.unsubscribe_scalable(a)
    await consumers[0].close()
    assert await next_segments(b) == [0, 1]
    await second.unsubscribe_scalable(b)
    await second.unsubscribe_scalable(b)
    assert (
        await broker.metadata.children("/topics/public/default/t/subscriptions/s/consumers") == []
    )
    await first.close()
    await second.close()


async def test_registrations_and_layouts_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        await broker.scalable.create(TOPIC, segments=2, properties={"k": "v"})
        await client.subscribe_scalable(NAME, "s", "a")
        await client.subscribe_scalable(NAME, "s", "b")
        await broker.scalable.split(TOPIC, 0)
        await client.close()
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        _, update = await client.watch_dag(NAME)
        assert update.dag.epoch == 1
        _, assignment = await client.subscribe_scalable(NAME, "s", "b")
        own = [s.segment_id for s in assignment.segments]
        assert own == [3, 1], "b had segment 1; a is to have the other child for a while"
        assert [e.kind.value for e in await broker.scalable.history(TOPIC)] == ["create", "split"]
        await client.close()


async def test_a_namespace_is_watched(broker: Broker) -> None:
    client = await client_of(broker)
    watch = await client.watch_namespace("public/default")
    assert not (await watch.next()).watch_scalable_topics_update.snapshot.topics
    await client.watch_dag(NAME)
    diff = (await watch.next()).watch_scalable_topics_update.diff
    assert list(diff.added) == [NAME]
    await client.close()


async def test_splits_under_load_lose_nothing(broker: Broker) -> None:
    """Producers that follow the layout as the official client does; one consumer of everything."""
    client = await client_of(broker)
    session, first = await client.watch_dag(NAME)
    dag = first.dag
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    shared.MergeFrom(EARLIEST)
    consumers = {0: await client.subscribe(names(dag)[0], "q", shared, permits=1000)}
    sent = 0

    async def send_some(count: int) -> None:
        nonlocal dag, sent
        for _ in range(count):
            active = [s for s in dag.segments if s.state == pb.ACTIVE]
            segment = names(dag)[active[sent % len(active)].segment_id]
            try:
                await publish(client, segment, str(sent))
            except BrokerError as error:
                if error.code != pb.TopicTerminatedError:
                    raise
                dag = (await session.next()).scalable_topic_update.dag
                continue
            sent += 1

    for segment_id in (0, 1, 3):
        await asyncio.gather(send_some(15), broker.scalable.split(TOPIC, segment_id))
        await send_some(5)
    latest = (await client.watch_dag(NAME))[1].dag
    for segment_id, segment in names(latest).items():
        if segment_id not in consumers:
            consumers[segment_id] = await client.subscribe(segment, "q", shared, permits=1000)
    received: list[int] = []

    async def drain(consumer: RawConsumer) -> None:
        while True:
            received.extend(int(payload) for payload in await receive(consumer, 1))

    tasks = [asyncio.ensure_future(drain(consumer)) for consumer in consumers.values()]
    await until(lambda: len(received) >= sent)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(received) == list(range(sent))
    await client.close()


async def test_switched_off_it_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, scalable_topics_enabled=False) as broker:
        client = await client_of(broker)
        _, update = await client.watch_dag(NAME)
        assert update.error == pb.NotAllowedError
        with pytest.raises(BrokerError) as refused:
            await client.subscribe_scalable(NAME, "s", "c")
        assert refused.value.code == pb.NotAllowedError
        with pytest.raises(BrokerError) as unsubscribed:
            await client.unsubscribe_scalable(Session(client, 1))
        assert unsubscribed.value.code == pb.NotAllowedError
        watch = await client.watch_namespace("public/default")
        assert (await watch.next()).watch_scalable_topics_update.error == pb.NotAllowedError
        await client.close()
