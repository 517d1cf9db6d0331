"""Stream consumers that come and go, in transactions that fail, over connections that break.

Whatever happens, each input's output is there once in the end, in the order of its key, and no key
ever waits for long.  What happens is by a fixed seed; when, is the machine's.

A consumer that is closed while its connection is broken cannot say so: its segments wait for the
end of the broker's grace period, so the broker is one with a short one.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest

import magnetar
from magnetar.errors import ConnectionLost, MagnetarError
from magnetar.transactions.states import TransactionState
from tests.client.conftest import MakeTopic, Service, Topic, rest
from tests.conftest import Report
from tests.java.broker_under_test import MagnetarProcess
from tests.java.fixtures import serving
from tests.support.effort import by_effort
from tests.support.waiting import end, until

SEED = 12
KEYS = 24
WORKERS = 3
INPUTS = by_effort(quick=700, whole=1000, nightly=1500)
INPUTS_PER_S = 60
BATCH = 20
TRANSACTION_S = 1.0
STALL_S = 30.0
"""How long a key may wait at most."""
WATCH_S = 0.1
GRACE_S = 2
pytestmark = pytest.mark.magnetar_only(
    "a transaction's end is answered before its segments know it"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, on_peer: bool) -> Iterator[Service]:
    """A broker of its own; see the module's docstring."""
    if on_peer:
        pytest.skip("a broker of its own is no peer")
    settings = {"scalable_consumer_grace_period_s": GRACE_S}
    yield from serving(MagnetarProcess(tmp_path_factory.mktemp("stress"), settings))


class Outputs:
    """What has been put out, as it comes, against what was put in."""

    def __init__(self) -> None:
        self.put_in = Counter[str]()
        self.put_out = Counter[str]()
        self.wrong: list[str] = []
        self.longest_wait_s = 0.0
        self._since: dict[str, float] = {}
        self._loop = asyncio.get_running_loop()

    def next_input(self, key: str) -> str:
        """Its value."""
        if self.put_in[key] == self.put_out[key]:
            self._since[key] = self._loop.time()
        number = self.put_in[key]
        self.put_in[key] += 1
        return f"{key}:{number}"

    async def read(self, consumer: magnetar.CheckpointConsumer[str]) -> None:
        async for message in consumer:
            key, _, number = message.value.partition(":")
            if int(number) != self.put_out[key]:
                self.wrong.append(f"{message.value} came when {self.put_out[key]} was due")
            self.put_out[key] = int(number) + 1
            self._since[key] = self._loop.time()

    @property
    def is_complete(self) -> bool:
        return self.put_in.total() == INPUTS and self.put_out == self.put_in

    async def watch(self, state: Callable[[], Awaitable[str]]) -> None:
        """Until all is there; raises when a key waits too long, or something is wrong.

        `state` says what is known of consumers and of the broker then.
        """
        while not self.is_complete:
            await asyncio.sleep(WATCH_S)
            now = self._loop.time()
            waits = {k: now - t for k, t in self._since.items() if self.put_in[k] > self.put_out[k]}
            self.longest_wait_s = max([self.longest_wait_s, *waits.values()])
            stalled = {key: self.put_out[key] for key, wait in waits.items() if wait > STALL_S}
            if stalled or self.wrong:
                wrong = self.wrong or f"nothing more of these after so many: {stalled}"
                raise AssertionError(f"{wrong}\n{await state()}")


def cut(client: magnetar.Client) -> None:
    """All its connections."""
    for connection in client.context.pool.connections:
        connection.abort(ConnectionLost("A test has cut it."))


class Worker:
    """Copies inputs to outputs, with a client of its own; `counts` tells what happened."""

    def __init__(self, number: int, client: magnetar.Client, counts: Counter[str]) -> None:
        self.client = client
        self.consumer: magnetar.StreamConsumer[str] | None = None
        self.calm = False
        """No more accidents."""
        self._left = False
        self._luck = random.Random(f"{SEED} {number}")
        self._number = number
        self._counts = counts

    async def run(self, source: Topic, sink: Topic) -> None:
        async with self.client.producer(sink.name, schema=str) as producer:
            life = 0
            while True:
                life += 1
                consumers = self.client.stream_consumer(
                    source.name,
                    "s",
                    schema=str,
                    initial_position="earliest",
                    consumer_name=f"w{self._number}-{life if self._luck.random() < 0.5 else 0}",
                    receiver_queue_size=self._luck.choice((5, 1000)),
                )
                async with consumers as consumer:
                    self.consumer = consumer
                    self._left = False
                    while not self._left and (self.calm or self._luck.random() < 0.85):
                        await self._turn(consumer, producer)

    @property
    def state(self) -> str:
        """What its consumer waits for, perhaps."""
        consumer = self.consumer
        if consumer is None:
            return "no consumer"
        segments = [
            f"{each.segment.segment_id} {each.state.name}, {len(each.unanswered)} unanswered"
            for each in consumer._segments()
        ]
        return (
            f"{consumer.name} closed {consumer._closing is not None}, in doubt "
            f"{consumer.in_doubt}, {len(consumer._inbox)} waiting, segments "
            f"{sorted(consumer.segment_ids)}: {segments}"
        )

    async def _turn(
        self, consumer: magnetar.StreamConsumer[str], producer: magnetar.Producer[str]
    ) -> None:
        messages = await consumer.receive_batch(self._luck.randint(1, BATCH), timeout_s=0.2)
        if not messages:
            return
        try:
            async with self.client.transaction(timeout_s=TRANSACTION_S) as transaction:
                for message in messages:
                    await producer.room()
                    producer.send_nowait(message.value, key=message.key, transaction=transaction)
                await consumer.ack(messages[-1], transaction=transaction)
                await self._accident(consumer, transaction)
            self._counts["committed"] += 1
        except (MagnetarError, ValueError) as error:
            self._counts[type(error).__name__] += 1

    async def _accident(
        self, consumer: magnetar.StreamConsumer[str], transaction: magnetar.Transaction
    ) -> None:
        what = self._luck.random()
        if self.calm or what > 0.4:
            return
        if what < 0.15:
            raise ValueError
        if what < 0.25:
            cut(self.client)
        elif what < 0.35:
            self._left = True
            await consumer.close()
        await until(lambda: transaction.state is not TransactionState.OPEN)


async def state_of(service: Service, topic: Topic, workers: Sequence[Worker]) -> str:
    """For who looks why a segment stands still."""
    _, stats = await rest(service, "GET", f"/scalable/{topic.name.partition('://')[2]}/stats")
    return "\n".join([*(each.state for each in workers), json.dumps(stats, indent=1)])


async def put_in(producer: magnetar.Producer[str], outputs: Outputs) -> None:
    luck = random.Random(SEED)
    for _ in range(INPUTS):
        key = f"k{luck.randrange(KEYS)}"
        producer.send_nowait(outputs.next_input(key), key=key)
        await asyncio.sleep(1 / INPUTS_PER_S)
    await producer.flush()


async def cut_at_times(clients: list[magnetar.Client], counts: Counter[str]) -> None:
    luck = random.Random(SEED)
    while True:
        await asyncio.sleep(luck.expovariate(2))
        cut(luck.choice(clients))
        counts["cuts"] += 1


async def test_each_input_is_put_out_once_and_in_order_and_nothing_waits_for_ever(
    service: Service, client: magnetar.Client, topic: MakeTopic, report: Report
) -> None:
    source, sink = await topic(4), await topic(1)
    counts = Counter[str]()
    outputs = Outputs()
    async with (
        client.producer(source.name, schema=str) as producer,
        client.checkpoint_consumer(sink.name, schema=str) as reader,
        AsyncExitStack() as stack,
    ):
        clients = [
            await stack.enter_async_context(magnetar.connect(service.url)) for _ in range(WORKERS)
        ]
        workers = [Worker(number, each, counts) for number, each in enumerate(clients)]
        async with asyncio.TaskGroup() as tasks:
            accidents = tasks.create_task(cut_at_times(clients, counts))
            endless = [tasks.create_task(each.run(source, sink)) for each in workers]
            endless += [tasks.create_task(outputs.read(reader)), accidents]
            state = partial(state_of, service, source, workers)
            watching = tasks.create_task(outputs.watch(state))
            await put_in(producer, outputs)
            await end(accidents)
            for worker in workers:
                worker.calm = True
            await watching
            await end(*endless)
    report(f"stream stress: a key waited {outputs.longest_wait_s:.1f} s at most; {dict(counts)}")
    assert outputs.put_out == outputs.put_in
    assert {"committed", "ValueError", "TransactionTimedOut"} <= counts.keys()
