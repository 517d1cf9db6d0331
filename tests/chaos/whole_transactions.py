"""Checks of the transactions of `TransactingWorker`s, once everything runs again.

Each is seen whole or not at all, each input goes through once, and no record of any is left.
Requests go to the brokers that serve what they are about, be it one or several.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.chaos.test_sigkill_reshape import PATH, TOPIC, Segment, bounds, neighbours, segments_of
from tests.chaos.transacting_worker import Acks, Outcome, TransactingWorker, parsed
from tests.support.batch_acks import messages_in, permits_of
from tests.support.broker_process import BrokerProcess
from tests.support.routed_client import RoutedClient
from tests.support.waiting import until

SUBSCRIPTION: Final = "work"
"""The subscription of the workers to the topics of inputs."""
AUDIT: Final = "audit"
"""A subscription that keeps everything on the topics that workers write to."""
ORDINARY: Final = [f"persistent://public/default/out-{number}" for number in range(2)]
EARLIEST: Final = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
SETTINGS: Final[Mapping[str, Any]] = {
    "ledger_max_entries": 50,
    "ledger_min_age_s": 0,
    "transaction_gc_interval_s": 1,
    "transaction_gc_retention_s": 20,
}
"""Small ledgers; headers are kept for longer than a worker takes to settle an end."""
NOTHING_LEFT_S: Final = 60
Seen = dict[str, list[tuple[int, int, list[str]]]]
"""By transaction: place, count and inputs of each message."""


class Input(NamedTuple):
    """A topic of inputs, and how workers acknowledge them."""

    topic: str
    names: Sequence[str]
    acks: Acks = Acks.INDIVIDUAL
    batch: int = 1
    v4: bool = True
    """Whether clients before version 5 can use the topic."""


def ordinary_inputs(count: int) -> list[Input]:
    """A topic for each way to acknowledge, with so many inputs each."""
    return [
        Input("persistent://public/default/singles", input_names("s", count)),
        Input("persistent://public/default/batches", input_names("b", count), batch=3),
        Input("persistent://public/default/ordered", input_names("o", count), Acks.CUMULATIVE),
    ]


def input_names(kind: str, count: int) -> list[str]:
    """Names of inputs, which no other kind has."""
    return [f"{kind}{number}" for number in range(count)]


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
    """The full name of a segment of the scalable topic."""
    first, last = bounds(segment)
    return f"segment://{TOPIC.removeprefix('topic://')}/{first:04x}-{last:04x}-{segment_id}"


def workers_on(inputs: Sequence[Input], layout: Layout, seed: int) -> list[TransactingWorker]:
    """For each topic a client before version 5, if it can use it, and one of version 5."""
    kinds = [(each, scalable) for each in inputs for scalable in (False, True)]
    return [
        TransactingWorker(
            number,
            random.Random(seed + number),
            layout.outputs if scalable else (lambda: ORDINARY),
            source.topic,
            SUBSCRIPTION,
            scalable=scalable,
            acks=source.acks,
        )
        for number, (source, scalable) in enumerate(kinds)
        if scalable or source.v4
    ]


async def prepare_outputs(brokers: Sequence[BrokerProcess], layout: Layout) -> None:
    """Make the topics that workers write to, with subscriptions that hold everything."""
    await brokers[0].create_scalable("shifting", 2)
    await layout.look(brokers[0])
    path = f"{PATH}/subscriptions/{AUDIT}"
    status, answer = await brokers[0].rest("PUT", path, type="QUEUE")
    assert status == 204, answer
    async with RoutedClient(brokers) as routes:
        for topic in ORDINARY:
            client = await routes.to_owner(topic)
            await (await client.subscribe(topic, AUDIT, EARLIEST)).close()


async def prepare_inputs(brokers: Sequence[BrokerProcess], inputs: Input) -> None:
    """Send these to their topic, where the workers' subscription begins before them."""
    async with RoutedClient(brokers) as routes:
        client = await routes.to_owner(inputs.topic)
        await (await client.subscribe(inputs.topic, SUBSCRIPTION, EARLIEST)).close()
        producer = await client.create_producer(inputs.topic)
        if inputs.batch == 1:
            await producer.send_many(each.encode() for each in inputs.names)
            return
        for first in range(0, len(inputs.names), inputs.batch):
            part = [each.encode() for each in inputs.names[first : first + inputs.batch]]
            await producer.send(
                build_batch((pb.SingleMessageMetadata(payload_size=0), each) for each in part),
                metadata=pb.MessageMetadata(num_messages_in_batch=len(part)),
                send=pb.CommandSend(num_messages=len(part)),
            )


async def a_commit_more_of_each(
    workers: Sequence[TransactingWorker],
    working: Sequence["asyncio.Task[None]"],
    timeout_s: float = 30,
) -> None:
    """Return when every worker has another commit."""
    before = [worker.committed for worker in workers]

    def so_far() -> bool:
        return any(task.done() for task in working) or all(
            worker.committed > count for worker, count in zip(workers, before, strict=True)
        )

    await until(so_far, timeout_s)
    for task in working:
        if task.done():
            task.result()


async def reshape(broker: BrokerProcess, rng: random.Random, *, merging: bool) -> None:
    """A split or a merge, which may be cut short."""
    segments = await segments_of(broker)
    active = sorted(key for key in segments if segments[key]["state"] == "ACTIVE")
    if merging and len(active) > 1:
        await broker.rest("POST", f"{PATH}/merge/{'/'.join(neighbours(segments, rng))}")
    else:
        await broker.rest("POST", f"{PATH}/split/{rng.choice(active)}")


async def end_what_is_open(broker: BrokerProcess) -> None:
    """Abort transactions whose NEW_TXN was not answered, or whose worker lost an answer."""
    _, found = await broker.transactions("GET", "/open", limit=1000)
    assert isinstance(found, dict)
    for one in found["transactions"]:
        path = "/end/" + one["txnId"].replace("_", "/")
        await broker.transactions("POST", path, action="abort")


async def everything_that_is_seen(brokers: Sequence[BrokerProcess], layout: Layout) -> Seen:
    """By transaction: place, count and inputs of each message that a new reader gets."""
    seen: Seen = defaultdict(list)
    last = b"the last|0|1|"
    async with RoutedClient(brokers) as routes:
        for topic in sorted({*ORDINARY, *layout.all}):
            client = await routes.to_owner(topic)
            sealed = topic not in layout.outputs()
            if not sealed:
                await (await client.create_producer(topic)).send(last)
            consumer = await client.subscribe(topic, AUDIT, EARLIEST, permits=100_000)
            while True:
                try:
                    delivery = await consumer.receive(2 if sealed else None)
                except TimeoutError:
                    assert sealed, (topic, await brokers[0].transactions("GET", "/open"))
                    break
                if delivery.payload == last:
                    break
                name, place, count, inputs = parsed(delivery.payload)
                seen[name].append((place, count, inputs))
    return seen


def transactions_are_whole(workers: Sequence[TransactingWorker], seen: Seen) -> set[str]:
    """Check that each is seen once and whole, or not at all; returns the inputs that they used."""
    used: dict[str, str] = {}
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
            again = {each: f"{used[each]} ({known[used[each]]})" for each in inputs if each in used}
            assert not again, f"{name} ({outcome}) used inputs again: {again}"
            used.update(dict.fromkeys(inputs, name))
    assert not seen, f"nobody sent these: {list(seen)[:5]}"
    return set(used)


async def inputs_went_through_once(
    brokers: Sequence[BrokerProcess], inputs: Input, used: set[str]
) -> None:
    """Check that exactly the inputs which no committed transaction used are left."""
    topic, last = inputs.topic, "the last"
    assert used & set(inputs.names), f"nobody used {topic}"
    wanted = {*inputs.names, last} - used
    left: list[str] = []
    async with RoutedClient(brokers) as routes:
        client = await routes.to_owner(topic)
        await (await client.create_producer(topic)).send(last.encode())
        options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
        consumer = await client.subscribe(topic, SUBSCRIPTION, options, permits=1000)
        while len(left) < len(wanted):
            try:
                delivery = await consumer.receive()
            except TimeoutError:
                pytest.fail(f"of {len(wanted)} inputs of {topic} {len(left)} are left")
            consumer.flow(permits_of(delivery))
            ack_set = delivery.command.ack_set
            bodies = messages_in(delivery.payload, delivery.metadata, ack_set)
            left += [body.decode() for body, _ in bodies]
        await client.ping()
        assert consumer.messages.empty(), f"{topic}: more than {len(wanted)} inputs are left"
    assert len(set(left)) == len(left), f"{topic}: inputs were delivered twice"
    assert set(left) == wanted, (
        f"{topic}: used and delivered again: {sorted(set(left) - wanted)[:5]}, "
        f"lost: {sorted(wanted - set(left))[:5]}"
    )


async def nothing_is_left(brokers: Sequence[BrokerProcess], inputs: Iterable[Input]) -> None:
    """Wait until no transaction is open, and no claim or acknowledgement is held anywhere."""

    async def outstanding() -> dict[str, float]:
        _, found = await brokers[0].transactions("GET", "/open")
        assert isinstance(found, dict)
        kinds = {"open": float(found["open"]), "records": 0.0}
        for broker in brokers:
            kinds["records"] += await broker.metric(
                "pulsar_txn_metadata_store_outstanding_op_records"
            )
        paths = {f"/transactionBufferStats/{_local(each)}" for each in ORDINARY}
        paths |= {
            f"/pendingAckStats/{_local(each.topic)}/{SUBSCRIPTION}" for each in inputs if each.v4
        }
        for path in paths:
            status, shown = await brokers[0].transactions("GET", path)
            assert status == 200, (path, status, shown)
            assert isinstance(shown, dict)
            kinds[path] = shown["ongoingTxnSize"]
        return kinds

    deadline = asyncio.get_running_loop().time() + NOTHING_LEFT_S
    while any((found := await outstanding()).values()):
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(f"these are left: { {k: v for k, v in found.items() if v} }")
        await asyncio.sleep(0.1)


def _local(topic: str) -> str:
    return topic.partition("://")[2]
