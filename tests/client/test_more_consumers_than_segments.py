"""More stream consumers than segments: each gets work, and each key keeps its order."""

import asyncio
import random
from pathlib import Path

import pytest

import magnetar
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.plain import STRING
from tests.client.conftest import MakeTopic, Service, Topic
from tests.client.streams import Readers, send
from tests.support.broker_process import running
from tests.support.losing_relay import losing

pytestmark = pytest.mark.magnetar_only("5.0.0-M1 knows no entry buckets")
NAMES = tuple(f"c{number}" for number in range(8))
KEYS = tuple(f"key{number}" for number in range(60))
SEED = 5


class Sender:
    """Sends to all keys until it is stopped, without awaiting the receipts."""

    def __init__(self, client: magnetar.Client, topic: str) -> None:
        self.sent: list[str] = []
        self._stopped = False
        self._task = asyncio.create_task(self._send(client, topic))

    async def _send(self, client: magnetar.Client, topic: str) -> None:
        number = 0
        async with client.producer(topic, schema=STRING) as producer:
            while not self._stopped:
                for key in KEYS:
                    producer.send_nowait(f"{key}:{number}", key=key)
                    self.sent.append(f"{key}:{number}")
                number += 1
                await asyncio.sleep(0.05)
            await producer.flush()

    async def stop(self) -> list[str]:
        """All that was sent, when it is stored."""
        self._stopped = True
        await self._task
        return self.sent


async def rebucket_all(topic: Topic, buckets: int) -> None:
    for segment in await topic.active():
        await topic.rebucket(segment, buckets)


async def test_eight_consumers_on_two_segments_each_get_work(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(segments=2)
    async with Readers(client, str(made)) as readers:
        for name in NAMES:
            await readers.add(name)
        await rebucket_all(made, 8)
        sending = Sender(client, str(made))
        async with asyncio.timeout(20):
            while readers.busy < set(NAMES):
                await asyncio.sleep(0.05)
        await readers.until_all(await sending.stop())
        readers.check_order(exactly_once=True)


async def test_the_policy_gives_each_consumer_work(tmp_path: Path) -> None:
    """It gives segments more entry buckets while consumers have nothing to read."""
    settings = {
        "scalable_topic_auto_scale_enabled": True,
        "scalable_topic_auto_scale_interval_s": 1,
        "scalable_topic_load_report_interval_s": 1,
    }
    async with running(tmp_path, settings) as broker:
        await broker.create_scalable("orders", 2)
        topic = "topic://public/default/orders"
        async with (
            magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client,
            Readers(client, topic) as readers,
        ):
            for name in NAMES:
                await readers.add(name)
            sending = Sender(client, topic)
            async with asyncio.timeout(40):
                while readers.busy < set(NAMES):
                    await asyncio.sleep(0.05)
            await readers.until_all(await sending.stop())
            readers.check_order(exactly_once=True)
            active = (await client.layout(topic)).active
            assert [len(each.bucket_splits) + 1 for each in active] == [4, 4]


async def test_keys_keep_their_order_whatever_happens(
    client: magnetar.Client, topic: MakeTopic, service: Service
) -> None:
    made, rng = await topic(segments=2), random.Random(SEED)
    async with (
        losing(service.url) as relay,
        magnetar.connect(relay.url) as cut_off,
        Readers(client, str(made)) as readers,
    ):
        for name in NAMES[:6]:
            await readers.add(name, cut_off if name in ("c2", "c4") else client)
        sending = Sender(client, str(made))
        await rebucket_all(made, 4)
        for step in range(3):
            relay.lose(lambda command: command.type == pb.BaseCommand.ACK, times=step + 1)
            await readers.add(f"d{step}")
            await asyncio.sleep(0.3)
            await made.split(rng.choice(await made.active()))
            await readers.remove(
                rng.choice(["c0", "c1", "c3", "c5"]) if step == 0 else f"d{step - 1}"
            )
            await asyncio.sleep(0.3)
            await made.rebucket(rng.choice(await made.active()), 5 + step)
        low, high, *_ = await made.active_by_range()
        await made.merge(low, high)
        await readers.until_all(await sending.stop())
        readers.check_order(exactly_once=False)
        more = await send(client, str(made), 0, 5)
        await readers.until_all(more)
