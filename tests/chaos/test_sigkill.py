"""SIGKILL under load: what was acknowledged is there after the restart, in order, once."""

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from magnetar.protocol.ids import Position
from tests.chaos import audit
from tests.chaos.acking_consumer import AckingConsumer, consume, is_kept
from tests.chaos.steady_producer import DUPLICATE, SteadyProducer, produce
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import end, until

ROUNDS = by_effort(quick=6, whole=8, nightly=200)
SEGMENTS = 4
SETTINGS = {
    "ledger_max_entries": 400,
    "ledger_min_age_s": 0,
    "log_file_size_bytes": 1024 * 1024,
}
"""Small ledgers and files, so that kills meet roll-overs of both."""
SEGMENT_NAMES = [
    f"segment://public/default/orders/{start:04x}-{start + 0x3FFF:04x}-{number}"
    for number, start in enumerate(range(0, 0x10000, 0x4000))
]
REGULAR = "persistent://public/default/invoices"


def make_producers() -> list[SteadyProducer]:
    """Names chosen by the client and by the broker; single messages and batches."""
    return [
        *(SteadyProducer(topic, number) for number, topic in enumerate(SEGMENT_NAMES, 1)),
        SteadyProducer(SEGMENT_NAMES[0], 5, name="second on the first segment"),
        SteadyProducer(REGULAR, 6, name="regular"),
        SteadyProducer(REGULAR, 7, batch=5),
    ]


@pytest.mark.timeout(120 + 10 * ROUNDS)
async def test_sigkill_under_load(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    topics = [*SEGMENT_NAMES, REGULAR]
    producers = make_producers()
    consumers = [AckingConsumer(topic, number, rng) for number, topic in enumerate(topics, 1)]
    async with running(tmp_path, SETTINGS) as broker:
        await broker.create_scalable("orders", SEGMENTS)
        client = await broker.connect()
        for topic in topics:
            await audit.hold_everything(client, topic)
        await client.close()
        stop = asyncio.Event()
        producing = asyncio.create_task(produce(broker, producers, stop))
        consuming = asyncio.create_task(consume(broker, consumers))
        try:
            receipts_by_round = [
                await kill_and_restart(broker, rng, producers, (producing, consuming))
                for _ in range(ROUNDS)
            ]
            stop.set()
            await producing
            await everything_is_there(broker, producers, consumers)
            await acknowledgements_hold(consumers, consuming)
        finally:
            await end(producing, consuming)
        assert not broker.faults()
    print(f"receipts by round: {receipts_by_round}")
    assert sum(producer.resent for producer in producers) > 0


async def kill_and_restart(
    broker: BrokerProcess,
    rng: random.Random,
    producers: list[SteadyProducer],
    work: tuple["asyncio.Task[None]", ...],
) -> int:
    """SIGKILL at some moment after work was resumed, and once in five during the next start too.

    Returns the receipts that came until then.
    """
    before = receipts_of(producers)
    await until(lambda: receipts_of(producers) > before or any(task.done() for task in work))
    await asyncio.wait(work, timeout=rng.uniform(0, 0.6), return_when=asyncio.FIRST_COMPLETED)
    for task in work:
        if task.done():
            task.result()
    broker.kill()
    if not rng.randrange(5):
        broker.spawn()
        await asyncio.sleep(rng.uniform(0.1, 0.8))
        broker.kill()
    await broker.start()
    return receipts_of(producers) - before


def receipts_of(producers: list[SteadyProducer]) -> int:
    """Receipts so far."""
    return sum(len(producer.receipts) for producer in producers)


async def everything_is_there(
    broker: BrokerProcess, producers: list[SteadyProducer], consumers: list[AckingConsumer]
) -> None:
    """What the topics hold against the receipts; every entry came to the consumers as well."""
    for consumer in consumers:
        entries = await audit.read_everything(broker, consumer.topic)
        positions = [position for position, _ in entries]
        assert positions == sorted(set(positions)), "an entry came twice, or out of order"
        here = [producer for producer in producers if producer.topic == consumer.topic]
        stored: dict[int, list[int]] = {producer.number: [] for producer in here}
        place: dict[tuple[int, int], Position] = {}
        for position, numbers in entries:
            for number, message in numbers:
                stored[number].append(message)
                place[number, message] = position
        for producer in here:
            assert stored[producer.number] == list(range(producer.sent)), (
                f"producer {producer.number} on {producer.topic}: {gaps(stored[producer.number])}"
            )
            for message in range(producer.sent):
                receipt = producer.receipts[producer.first_of(message)]
                assert receipt in (DUPLICATE, place[producer.number, message])
        await until(partial(set(positions).issubset, consumer.seen))


def gaps(numbers: list[int]) -> str:
    """Where a row of numbers is not 0, 1, 2 ..."""
    wrong = [
        f"{before} then {after}"
        for before, after in zip([-1, *numbers], numbers, strict=False)
        if after != before + 1
    ]
    return f"{len(numbers)} messages, {', '.join(wrong[:5])}"


async def acknowledgements_hold(
    consumers: list[AckingConsumer], consuming: "asyncio.Task[None]"
) -> None:
    """Durable acknowledgements hold; what was never acknowledged came again after the last kill."""
    for consumer in consumers:
        assert consumer.durable
        assert not consumer.came_back, f"{consumer.topic}: {consumer.came_back[:5]} came again"
        kept = {position for position in consumer.seen if is_kept(position)}
        await until(partial(consumer.came_again, kept))
    assert not consuming.done()
