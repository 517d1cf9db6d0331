"""A load on a topic that scales by itself: awaited sends at a rate, and consumers of every kind."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Final

import magnetar
from tests.client.test_reshape import Reader, read_in_order, read_shared
from tests.support.broker_process import BrokerProcess
from tests.support.waiting import until

TOPIC: Final = "topic://public/default/orders"
PATH: Final = "/scalable/public/default/orders"
KEYS: Final = 48
LOW: Final = 60
"""Messages by the second."""
TICK_S: Final = 0.1
SAMPLE_S: Final = 1
RECEIVE_S: Final = 60
SETTINGS: Final[Mapping[str, object]] = MappingProxyType(
    {
        "scalable_topic_auto_scale_enabled": True,
        "scalable_topic_auto_scale_interval_s": 1,
        "scalable_topic_load_report_interval_s": 1,
        "sealed_segment_prune_interval_s": 1,
    }
)
POLICY: Final = {
    "splitMsgRateInThreshold": 250,
    "mergeMsgRateInThreshold": 80,
    "splitCooldownSeconds": 2,
    "mergeCooldownSeconds": 1,
    "mergeWindowSeconds": 3,
}


class ScalingLoad:
    """Sends `rate` messages/s to one topic; each send is awaited.  Consumers read all of them."""

    def __init__(self, broker: BrokerProcess, producer: magnetar.Producer[str]) -> None:
        self.rate = LOW
        self.sent = Counter[str]()
        self.ordered = Reader()
        self.at_checkpoints = Reader()
        self.seen = Counter[str]()
        self._broker = broker
        self._producer = producer
        self._number = 0
        self._sending = asyncio.create_task(self._send())

    @classmethod
    @asynccontextmanager
    async def on(cls, broker: BrokerProcess) -> AsyncIterator["ScalingLoad"]:
        """A load on a new topic of a broker; it is stopped before the end of the block."""
        await broker.create_scalable("orders", 1)
        status, answer = await broker.rest("POST", f"{PATH}/autoScalePolicy", body=POLICY)
        assert status == 204, answer
        async with (
            magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client,
            client.stream_consumer(
                TOPIC, "ordered", schema=str, initial_position="earliest"
            ) as stream,
            client.queue_consumer(
                TOPIC, "shared", schema=str, initial_position="earliest"
            ) as shared,
            client.checkpoint_consumer(TOPIC, schema=str) as checkpoints,
            client.producer(TOPIC, schema=str) as producer,
            asyncio.TaskGroup() as tasks,
        ):
            load = cls(broker, producer)
            reading = [
                tasks.create_task(read_in_order(stream, load.ordered)),
                tasks.create_task(read_shared(shared, load.seen)),
                tasks.create_task(read_checkpoints(checkpoints, load.at_checkpoints)),
            ]
            yield load
            for task in reading:
                task.cancel()

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while self.rate:
            due_s += TICK_S
            some = [self._next() for _ in range(int(self.rate * TICK_S))]
            await asyncio.gather(*(self._producer.send(v, key=k) for k, v in some))
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    def _next(self) -> tuple[str, str]:
        key = f"k{self._number % KEYS}"
        self._number += 1
        value = f"{key}:{self.sent[key]}"
        self.sent[key] += 1
        return key, value

    async def stop(self) -> None:
        """Send no more; return when all consumers have read everything."""
        self.rate = 0
        await self._sending
        total = self.sent.total()
        readers = (self.ordered, self.at_checkpoints)
        await until(
            lambda: len(self.seen) >= total and all(r.read.total() >= total for r in readers)
        )

    def check(self) -> None:
        """Nothing was lost, read twice, or out of order by its key."""
        for reader in (self.ordered, self.at_checkpoints):
            assert not reader.wrong, reader.wrong[:10]
            assert reader.read == self.sent
        assert max(self.seen.values()) == 1

    async def active(self) -> int:
        """The number of active segments."""
        _, record = await self._broker.rest("GET", PATH)
        assert isinstance(record, dict)
        return sum(each["state"] == "ACTIVE" for each in record["segments"].values())

    async def changes(self) -> Sequence[tuple[str, str]]:
        """What the policy changed, and why."""
        _, entries = await self._broker.rest("GET", f"{PATH}/history")
        assert isinstance(entries, list)
        return [(each["kind"], each["cause"]) for each in entries if each.get("cause")]


async def watch(load: ScalingLoad, take: Callable[[float, int, float, float], None]) -> None:
    """Call `take` each second: time, active segments, messages/s sent and read in order."""
    loop = asyncio.get_running_loop()
    start_s = before_s = loop.time()
    sent, read = load.sent.total(), load.ordered.read.total()
    while True:
        await asyncio.sleep(SAMPLE_S)
        segments, now_s = await load.active(), loop.time()
        now_sent, now_read = load.sent.total(), load.ordered.read.total()
        took_s = now_s - before_s
        take(now_s - start_s, segments, (now_sent - sent) / took_s, (now_read - read) / took_s)
        before_s, sent, read = now_s, now_sent, now_read


async def read_checkpoints(consumer: magnetar.CheckpointConsumer[str], reader: Reader) -> None:
    """Count what a checkpoint consumer reads."""
    while True:
        for message in await consumer.receive_batch(max_messages=1000, timeout_s=RECEIVE_S):
            reader.take(message.value)
