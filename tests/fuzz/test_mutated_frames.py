"""Mutated frames against a live broker: it lives on, and nobody else notices.

The frames are those of one seed, so that a change is judged by itself; at night, and by `make
fuzz`, others are drawn.
"""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.fuzz import corpus
from tests.fuzz.attack import Attack
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, chosen_seed, show_seed
from tests.support.raw_client import RawClient
from tests.support.waiting import end, until

SEED: Final = 2_685_058_770
FRAMES: Final = by_effort(quick=40_000, whole=40_000, nightly=2_000_000)
SIDE_BY_SIDE: Final = 8
BEGUN_AT_ONCE: Final = 100
MEMORY_GROWTH: Final = 150 * 1024 * 1024
INNOCENT: Final = "persistent://public/default/innocent"
EARLIEST: Final = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


class Innocent:
    """A producer and a consumer on connections of their own, one message there and back a time."""

    def __init__(self, producing: RawClient, consuming: RawClient) -> None:
        self.round_trips = 0
        self.clients = (producing, consuming)

    async def run(self, topic: str, subscription: str, stop: asyncio.Event) -> None:
        """Raises at the first message that is late, lost, doubled or changed."""
        producer = await self.clients[0].create_producer(topic)
        consumer = await self.clients[1].subscribe(topic, subscription, EARLIEST, permits=1)
        while not stop.is_set():
            payload = b"message %d" % self.round_trips
            receipt = await producer.send(payload)
            delivery = await consumer.receive()
            assert delivery.payload == payload
            assert delivery.message_id.entry_id == receipt.message_id.entry_id
            await consumer.ack_answered(delivery.message_id)
            consumer.flow(1)
            self.round_trips += 1


@pytest.mark.timeout(300 + FRAMES // 500)
async def test_mutated_frames(tmp_path: Path) -> None:
    seed = chosen_seed(SEED)
    show_seed(seed)
    async with running(tmp_path) as broker:
        await broker.create_scalable("attacked", 2)
        await begin_transactions(broker)
        innocent = Innocent(await broker.connect(), await broker.connect())
        stop = asyncio.Event()
        working = asyncio.create_task(innocent.run(INNOCENT, "s", stop))
        await until(lambda: innocent.round_trips > 0 or working.done())
        sockets, memory = broker.sockets(), broker.resident_bytes()
        attack = Attack(broker, seed, FRAMES)
        attacking = asyncio.create_task(attack.run(SIDE_BY_SIDE))
        try:
            faults = await watched(broker, attack, attacking, working)
            stop.set()
            await working
        finally:
            await end(attacking, working)
        grown = broker.resident_bytes() - memory
        print(f"{attack.served} frames on {attack.connections} connections, {grown >> 20} MB more")
        print(f"{innocent.round_trips} innocent round trips meanwhile")
        assert not faults, "\n\n".join(faults)
        assert attack.served >= FRAMES
        assert innocent.round_trips > 100
        await until(lambda: broker.sockets() <= sockets)
        assert grown < MEMORY_GROWTH
        assert await broker.rest("GET", "/brokers/health") == (200, "ok")
        await attacked_topics_still_work(broker)
        assert await broker.terminate() == 0
        assert not broker.faults()


async def begin_transactions(broker: BrokerProcess) -> None:
    """What frames may write to, acknowledge in, and end."""
    client = await broker.connect()
    new = pb.CommandNewTxn(tc_id=0, txn_ttl_millis=3_600_000, scalable=True)
    for _ in range(0, corpus.TRANSACTIONS, BEGUN_AT_ONCE):
        await asyncio.gather(
            *(client.request(pb.BaseCommand.NEW_TXN, new) for _ in range(BEGUN_AT_ONCE))
        )
    await client.close()


async def watched(
    broker: BrokerProcess,
    attack: Attack,
    attacking: "asyncio.Task[None]",
    working: "asyncio.Task[None]",
) -> list[str]:
    """Wait for the end of the attack; what the broker logged as its own faults, with the frames."""
    seen = 0
    kinds: Counter[str] = Counter()
    described: list[str] = []
    while not attacking.done():
        await asyncio.wait((attacking, working), timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        faults = broker.faults()
        for line in faults[seen:]:
            kind = re.sub(r"\d+", "", line[:60] + line[-200:])
            kinds[kind] += 1
            if kinds[kind] == 1:
                described.append(description(line, attack))
        seen = len(faults)
        assert broker.running
    attacking.result()
    return described


def description(line: str, attack: Attack) -> str:
    """A fault, and the frames of the connection that it names."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    text = "\n".join(f"{name}: {value}" for name, value in record.items())
    name = record.get("command", "")
    kind = pb.BaseCommand.Type.Value(name) if name else -1
    frames = attack.frames_from(record.get("remote", ":0"))
    suspects = [frame.data.hex() for frame in frames if frame.data[9:10] == bytes([kind & 255])]
    return f"{text}\nframes of that type on the connection: {suspects[:4]}"


async def attacked_topics_still_work(broker: BrokerProcess) -> None:
    """Producers and new subscriptions of the topics that took the frames find them in order.

    Frames began transactions and wrote in them, so what is open is ended first: until its deadline
    it may hold back what follows it, and nothing else may.
    """
    await end_open_transactions(broker)
    for topic in (*corpus.TOPICS, *corpus.SEGMENTS):
        client = await broker.connect()
        consumer = await client.subscribe(topic, "afterwards", permits=10)
        producer = await client.create_producer(topic)
        await producer.send(b"still here")
        try:
            assert (await consumer.receive()).payload == b"still here"
        except TimeoutError:
            _, why = await broker.transactions("GET", "/why/" + topic.replace("://", "/"))
            pytest.fail(f"{topic} gives no message: {json.dumps(why, indent=1)}")
        await client.close()


async def end_open_transactions(broker: BrokerProcess) -> None:
    """Abort by hand what is open, as an operator would."""
    while True:
        status, found = await broker.transactions("GET", "/open", limit=1000)
        assert status == 200, found
        assert isinstance(found, dict)
        if not found["open"]:
            return
        for one in found["transactions"]:
            path = "/end/" + one["txnId"].replace("_", "/")
            status, answer = await broker.transactions("POST", path, action="abort")
            assert status in (204, 409), answer
