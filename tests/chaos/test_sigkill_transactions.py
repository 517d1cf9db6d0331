"""SIGKILL under transactions: each is seen whole or not at all, each input goes through once."""

import asyncio
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.chaos.test_sigkill_reshape import Segment, bounds, neighbours, segments_of
from tests.chaos.transacting_worker import Outcome, TransactingWorker, parsed
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import end, until

ROUNDS: Final = by_effort(quick=4, whole=8, nightly=100)
WORKERS: Final = 6
V4_WORKERS: Final = (1, 4)
"""Clients before version 5, beside those of version 5 on the same ordinary topics."""
INPUTS: Final = max(4000, 350 * ROUNDS)
INPUT: Final = "persistent://public/default/inputs"
SUBSCRIPTION: Final = "work"
TOPIC: Final = "topic://public/default/shifting"
PATH: Final = "/scalable/public/default/shifting"
"""The topic of `test_sigkill_reshape`, whose helpers know it."""
ORDINARY: Final = [f"persistent://public/default/out-{number}" for number in range(2)]
EARLIEST: Final = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
SETTINGS: Final = {
    "ledger_max_entries": 50,
    "ledger_min_age_s": 0,
    "log_file_size_bytes": 1024 * 1024,
    "transaction_gc_interval_s": 1,
    "transaction_gc_retention_s": 20,
}
"""Small ledgers and files; headers are kept for longer than a worker takes to settle an end."""


class Layout:
    """Where workers may write: the ordinary topics, and the active segments as last seen."""

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.active: list[str] = []

    async def look(self, broker: BrokerProcess) -> None:
        segments = await segments_of(broker)
        names = {key: segment_name(key, segments[key]) for key in segments}
        self.all |= set(names.values())
        self.active = [names[key] for key in segments if segments[key]["state"] == "ACTIVE"]

    def outputs(self) -> Sequence[str]:
        return [*ORDINARY, *self.active]


def segment_name(segment_id: str, segment: Segment) -> str:
    """Of the topic of its own."""
    first, last = bounds(segment)
    return f"segment://{TOPIC.removeprefix('topic://')}/{first:04x}-{last:04x}-{segment_id}"


@pytest.mark.timeout(180 + 10 * ROUNDS)
async def test_sigkill_under_transactions(tmp_path: Path) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    layout = Layout()
    workers = [
        TransactingWorker(
            number,
            random.Random(seed + number),
            (lambda: ORDINARY) if number in V4_WORKERS else layout.outputs,
            INPUT,
            SUBSCRIPTION,
            scalable=number not in V4_WORKERS,
        )
        for number in range(WORKERS)
    ]
    stop = asyncio.Event()
    async with running(tmp_path, SETTINGS) as broker:
        await prepare(broker, layout)
        working = [asyncio.create_task(worker.run(broker, stop)) for worker in workers]
        try:
            for turn in range(ROUNDS):
                await a_commit_more_of_each(workers, working)
                await trouble(broker, layout, rng, turn)
            await a_commit_more_of_each(workers, working)
            stop.set()
            await asyncio.gather(*working)
        finally:
            await end(*working)
        await layout.look(broker)
        await end_what_is_open(broker)
        seen = await everything_that_is_seen(broker, layout)
        used = transactions_are_whole(workers, seen)
        await inputs_went_through_once(broker, used)
        await nothing_is_left(broker)
        assert not broker.faults()
    outcomes = Counter(each for worker in workers for each in worker.outcomes.values())
    print(f"{dict(outcomes)}, {len(used)} inputs used")
    assert outcomes[Outcome.COMMITTED] > ROUNDS * WORKERS


async def prepare(broker: BrokerProcess, layout: Layout) -> None:
    """Topics with subscriptions that hold everything, and the inputs."""
    await broker.create_scalable("shifting", 2)
    await layout.look(broker)
    path = f"{PATH}/subscriptions/audit"
    status, answer = await broker.rest("PUT", path, type="QUEUE")
    assert status == 204, answer
    client = await broker.connect()
    for topic in ORDINARY:
        await (await client.subscribe(topic, "audit", EARLIEST)).close()
    await (await client.subscribe(INPUT, SUBSCRIPTION, EARLIEST)).close()
    producer = await client.create_producer(INPUT)
    await producer.send_many(b"%d" % number for number in range(INPUTS))
    await client.close()


async def a_commit_more_of_each(
    workers: Sequence[TransactingWorker], working: Sequence["asyncio.Task[None]"]
) -> None:
    """Return when every worker has another commit."""
    before = [worker.committed for worker in workers]

    def so_far() -> bool:
        return any(task.done() for task in working) or all(
            worker.committed > count for worker, count in zip(workers, before, strict=True)
        )

    await until(so_far)
    for task in working:
        if task.done():
            task.result()


async def trouble(broker: BrokerProcess, layout: Layout, rng: random.Random, turn: int) -> None:
    """One round: unloads and a reshape, then the end of the process, in one of its forms."""
    await asyncio.sleep(rng.uniform(0, 0.5))
    for topic in rng.sample([INPUT, *ORDINARY], rng.randrange(3)):
        await broker.rest("PUT", f"/{topic.replace('://', '/')}/unload")
    reshaping = asyncio.create_task(reshape(broker, rng, merging=turn % 3 == 2))
    await asyncio.wait({reshaping}, timeout=rng.choice((0, 0.05, 3)))
    kind = rng.randrange(6)
    if kind == 0:
        assert await broker.terminate() == 0
    elif kind == 1:
        broker.signal(signal.SIGSTOP)
        await asyncio.sleep(2)
        broker.signal(signal.SIGCONT)
    else:
        broker.kill()
    await asyncio.wait({reshaping})
    reshaping.exception()
    if not broker.running:
        await broker.start()
    await layout.look(broker)


async def reshape(broker: BrokerProcess, rng: random.Random, *, merging: bool) -> None:
    """A split or a merge, which may be cut short."""
    segments = await segments_of(broker)
    active = sorted(key for key in segments if segments[key]["state"] == "ACTIVE")
    if merging and len(active) > 1:
        await broker.rest("POST", f"{PATH}/merge/{'/'.join(neighbours(segments, rng))}")
    else:
        await broker.rest("POST", f"{PATH}/split/{rng.choice(active)}")


async def end_what_is_open(broker: BrokerProcess) -> None:
    """Transactions whose NEW_TXN was not answered, and such whose worker lost an answer."""
    _, found = await broker.transactions("GET", "/open", limit=1000)
    assert isinstance(found, dict)
    for one in found["transactions"]:
        path = "/end/" + one["txnId"].replace("_", "/")
        await broker.transactions("POST", path, action="abort")


async def everything_that_is_seen(
    broker: BrokerProcess, layout: Layout
) -> dict[str, list[tuple[int, int, list[str]]]]:
    """By transaction: place, count and inputs of each message that a new reader gets."""
    seen: dict[str, list[tuple[int, int, list[str]]]] = defaultdict(list)
    client = await broker.connect()
    last = b"the last|0|1|"
    for topic in sorted({*ORDINARY, *layout.all}):
        sealed = topic not in layout.outputs()
        if not sealed:
            await (await client.create_producer(topic)).send(last)
        consumer = await client.subscribe(topic, "audit", EARLIEST, permits=100_000)
        while True:
            try:
                delivery = await consumer.receive(2 if sealed else None)
            except TimeoutError:
                assert sealed, (topic, await broker.transactions("GET", "/open"))
                break
            if delivery.payload == last:
                break
            name, place, count, inputs = parsed(delivery.payload)
            seen[name].append((place, count, inputs))
    await client.close()
    return seen


def transactions_are_whole(
    workers: Sequence[TransactingWorker], seen: dict[str, list[tuple[int, int, list[str]]]]
) -> set[str]:
    """Each is seen once and whole, or not at all, as its worker was told; the inputs used."""
    used: set[str] = set()
    known = {name: each for worker in workers for name, each in worker.outcomes.items()}
    for name, outcome in known.items():
        messages = seen.pop(name, [])
        if outcome is Outcome.ABORTED:
            assert not messages, f"{name} was aborted and is seen: {messages}"
        if outcome is Outcome.COMMITTED:
            assert messages, f"{name} was committed and is not seen"
        if messages:
            _, count, inputs = messages[0]
            places = sorted(place for place, _, _ in messages)
            assert places == list(range(count)), f"{name} ({outcome}) is torn: {places} of {count}"
            assert not used & set(inputs), f"{name} used inputs again: {used & set(inputs)}"
            used |= set(inputs)
    assert not seen, f"nobody sent these: {list(seen)[:5]}"
    return used


async def inputs_went_through_once(broker: BrokerProcess, used: set[str]) -> None:
    """What is left of the subscription is exactly what no committed transaction used."""
    client = await broker.connect()
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe(INPUT, SUBSCRIPTION, options, permits=INPUTS + 1)
    producer = await client.create_producer(INPUT)
    await producer.send(b"the last")
    left: list[str] = []
    want = INPUTS - len(used) + 1
    while len(left) < want:
        try:
            left.append((await consumer.receive()).payload.decode())
        except TimeoutError:
            pytest.fail(f"of {want - 1} inputs {len(left)} are left")
    assert len(set(left)) == len(left)
    assert not used & set(left), f"used and delivered again: {sorted(used & set(left))[:5]}"
    assert consumer.messages.empty()
    await client.close()


async def nothing_is_left(broker: BrokerProcess) -> None:
    """No transaction is open, and no claim or acknowledgement record is stored."""

    async def outstanding() -> float:
        _, found = await broker.transactions("GET", "/open")
        assert isinstance(found, dict)
        return float(found["open"]) + await broker.metric(
            "pulsar_txn_metadata_store_outstanding_op_records"
        )

    for _ in range(300):
        if not await outstanding():
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{await outstanding()} records or open transactions are left")
