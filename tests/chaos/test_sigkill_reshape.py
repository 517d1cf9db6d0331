"""SIGKILL in the middle of splits and merges: done wholly or not at all, and nothing is lost."""

import asyncio
import random
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

import aiohttp
import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.chaos import audit
from tests.chaos.routing_producer import CONTENT, RoutingProducer, Stored, segment_topic
from tests.chaos.steady_producer import position_of
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.raw_client import BrokerError, RawClient, RawConsumer
from tests.support.waiting import end, until

ROUNDS: Final = by_effort(quick=4, whole=6, nightly=80)
KEYS: Final = 16
LATEST_KILL_S: Final = 0.15
"""Kills come early rather than late: the steps of a layout change are short."""
LOCAL_NAME: Final = "shifting"
TOPIC: Final = f"topic://public/default/{LOCAL_NAME}"
PATH: Final = f"/scalable/public/default/{LOCAL_NAME}"
Segment = Mapping[str, object]


@pytest.mark.timeout(240 + 10 * ROUNDS)
async def test_sigkill_in_splits_and_merges(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    producer = RoutingProducer(TOPIC, KEYS)
    stop = asyncio.Event()
    async with running(tmp_path) as broker:
        await broker.create_scalable(LOCAL_NAME, 2)
        path = f"{PATH}/subscriptions/{audit.SUBSCRIPTION}"
        status, answer = await broker.rest("PUT", path, type="QUEUE")
        assert status == 204, answer
        producing = asyncio.create_task(producer.run(broker, stop))
        try:
            done: list[bool] = []
            for turn in range(ROUNDS):
                await all_keys_get_on(producer, producing)
                done.append(await reshape_and_kill(broker, rng, producing, turn))
            await all_keys_get_on(producer, producing)
            stop.set()
            await producing
        finally:
            await end(producing)
        await everything_is_there(broker, producer)
        assert not broker.faults()
    print(f"{len(producer.receipts)} receipts; done before the kill, or after it: {done}")
    assert any(done)


async def all_keys_get_on(producer: RoutingProducer, producing: "asyncio.Task[None]") -> None:
    """Return when every key has another receipt."""
    before = dict(producer.sent)
    await until(lambda: all(producer.sent[k] > before[k] for k in before) or producing.done())
    if producing.done():
        producing.result()


async def kill_during(
    request: "asyncio.Task[tuple[int, object]]",
    broker: BrokerProcess,
    rng: random.Random,
    producing: "asyncio.Task[None]",
    *,
    once_answered: bool,
) -> bool:
    """Kill a broker while it serves a request, start it again; whether it had confirmed it.

    `once_answered`: right behind the answer, so that it has something left to finish.
    """
    if once_answered:
        await asyncio.wait({request, producing}, return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.wait({request, producing}, timeout=LATEST_KILL_S * rng.random() ** 3)
    assert not producing.done(), producing.result()
    answered = request.done() and not request.exception() and request.result()[0] == 204
    broker.kill()
    try:
        status, answer = await request
        assert status == 204, answer
    except aiohttp.ClientError:
        pass
    await broker.start()
    return answered


async def reshape_and_kill(
    broker: BrokerProcess, rng: random.Random, producing: "asyncio.Task[None]", turn: int
) -> bool:
    """Kill while a split or merge runs, start again; whether it took place."""
    before = await segments_of(broker)
    active = sorted(s for s in before if before[s]["state"] == "ACTIVE")
    merging = turn % 2 == 1 and len(active) > 1
    parents = neighbours(before, rng) if merging else [rng.choice(active)]
    kind = "merge" if merging else "split"
    url = f"{PATH}/{kind}/{'/'.join(parents)}"
    request = asyncio.create_task(broker.rest("POST", url))
    # However slow the machine is, the last change takes place.
    last = turn == ROUNDS - 1
    answered = await kill_during(request, broker, rng, producing, once_answered=last)
    after = await segments_of(broker)
    covers_everything(after)
    sealed = [after[parent]["state"] == "SEALED" for parent in parents]
    assert all(sealed) or not any(sealed), f"half a {kind} of {parents}: {after}"
    assert all(sealed) or not answered, f"the {kind} of {parents} was confirmed and is gone"
    if all(sealed):
        assert len(after) == len(before) + (1 if merging else 2)
    else:
        assert after == before
    return all(sealed)


async def segments_of(broker: BrokerProcess) -> dict[str, Segment]:
    """Every segment of the topic's record, by id."""
    status, record = await broker.rest("GET", PATH)
    assert status == 200, record
    return cast("dict[str, dict[str, Segment]]", record)["segments"]


def bounds(segment: Segment) -> tuple[int, int]:
    """First and last hash of a segment."""
    hash_range = cast("Mapping[str, int]", segment["hashRange"])
    return hash_range["start"], hash_range["end"]


def neighbours(segments: dict[str, Segment], rng: random.Random) -> list[str]:
    """Two ACTIVE segments side by side."""
    active = [s for s in segments if segments[s]["state"] == "ACTIVE"]
    return list(rng.choice(list(pairwise(sorted(active, key=lambda s: bounds(segments[s]))))))


def covers_everything(segments: dict[str, Segment]) -> None:
    """Raise unless the ACTIVE segments hold each hash once."""
    active = sorted(bounds(s) for s in segments.values() if s["state"] == "ACTIVE")
    assert active[0][0] == 0
    assert active[-1][1] == 0xFFFF
    assert all(after[0] == before[1] + 1 for before, after in pairwise(active)), active


async def everything_is_there(broker: BrokerProcess, producer: RoutingProducer) -> None:
    """Each receipt's message is where it says; more copies only of what was sent more than once."""
    client = await broker.connect()
    topic = producer.topic
    session, update = await client.watch_dag(topic)
    client.close_dag(session)
    found: list[tuple[tuple[int, int], Stored]] = []
    for segment in sorted(update.dag.segments, key=lambda s: (s.created_at_epoch, s.segment_id)):
        consumer = await audit.subscribe(client, segment_topic(topic, segment))
        last = position_of((await consumer.last_message_id()).last_message_id)
        position = None
        while last.entry_id >= 0 and (position is None or position < last):
            delivery = await consumer.receive()
            consumer.flow(1)
            position = position_of(delivery.message_id)
            stored = Stored(segment.segment_id, position)
            found.append((CONTENT.unpack(delivery.payload), stored))
        if segment.state == pb.SEALED:
            if position is not None:
                consumer.ack(delivery.message_id, cumulative=True)
            await is_terminated(client, consumer, segment_topic(topic, segment))
    await client.close()
    everything = set(found)
    for message, place in producer.receipts.items():
        assert (message, place) in everything, f"{message} is not at {place}"
    for key, sent in producer.sent.items():
        copies = [message[1] for message, _ in found if message[0] == key]
        assert list(dict.fromkeys(copies))[:sent] == list(range(sent)), "out of order"
        for number in range(sent):
            assert copies.count(number) <= producer.attempts[key, number]


async def is_terminated(client: RawClient, consumer: RawConsumer, topic: str) -> None:
    """Raise unless a consumer that is done is told of the end, and producers are refused."""
    event = await client.wait(consumer.events.get())
    assert event.type == pb.BaseCommand.REACHED_END_OF_TOPIC
    with pytest.raises(BrokerError) as caught:
        await client.create_producer(topic)
    assert caught.value.code == pb.TopicTerminatedError
