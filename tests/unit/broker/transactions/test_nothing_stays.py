"""After all sorts of transactions nothing in the broker remembers one, but what is bounded."""

import asyncio
import contextlib
import functools
import itertools
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import TxnId
from tests.support.raw_client import BrokerError, RawClient, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.transactions.conftest import Connect, TransactionClient
from tests.unit.broker.transactions.test_writes import OTHER, TOPIC, reader, send

Kind = pb.BaseCommand
ROUNDS = 8
BOUNDED = ("._ended", "._aborted")
"""What is kept of ended transactions: TXN_ENDED_KEPT of each topic and subscription, and the
aborted set, which goes with the ledgers."""
OPAQUE = (types.ModuleType, type, str, bytes, int, float, asyncio.AbstractEventLoop)


def paths_to_transactions(root: object) -> Counter[str]:
    """Where ids of transactions are held in memory: the attributes that lead there."""
    seen: set[int] = set()
    found: Counter[str] = Counter()
    todo: deque[tuple[str, object]] = deque([("", root)])
    while todo:
        path, one = todo.popleft()
        if isinstance(one, TxnId):
            found[path] += 1
            continue
        if isinstance(one, OPAQUE) or one is None or id(one) in seen:
            continue
        seen.add(id(one))
        todo.extend((path + step, part) for step, part in parts_of(one))
    return found


def parts_of(one: object) -> Iterator[tuple[str, object]]:
    """What an object refers to, with a step of the path to it."""
    if isinstance(one, Mapping):
        for key, value in list(one.items()):
            yield "", key
            yield "", value
    elif isinstance(one, Iterable) and isinstance(one, tuple | list | set | frozenset | deque):
        yield from (("", part) for part in list(one))
    elif isinstance(one, functools.partial):
        yield from ((".partial", part) for part in (one.func, one.args, one.keywords))
    elif isinstance(one, types.MethodType):
        yield "", one.__self__
    elif isinstance(one, types.FunctionType):
        for cell in one.__closure__ or ():
            yield ".closure", cell.cell_contents
    elif isinstance(one, asyncio.Task):
        yield ".task", one.get_coro()
    elif isinstance(one, types.CoroutineType):
        yield ".frame", dict(one.cr_frame.f_locals) if one.cr_frame else None
    else:
        yield from (("." + name, value) for name, value in vars_of(one))


def vars_of(one: object) -> Iterator[tuple[str, object]]:
    """Attributes, in slots too."""
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name):
                yield name, getattr(one, name)


async def acknowledge(consumer: RawConsumer, txn: tuple[int, int], *ids: pb.MessageIdData) -> None:
    ack = pb.CommandAck(
        consumer_id=consumer.consumer_id,
        ack_type=pb.CommandAck.Individual,
        message_id=ids,
        txnid_most_bits=txn[0],
        txnid_least_bits=txn[1],
    )
    await consumer.client.request(Kind.ACK, ack)


async def one_of_each(client: TransactionClient, raw: RawClient, unknown: Iterator[int]) -> None:
    """Transactions that commit, abort, time out, conflict, were never begun, or are cut short."""
    producer, shared = await raw.create_producer(TOPIC), pb.CommandSubscribe.Shared
    inputs = await raw.create_producer(OTHER)
    consumer = await raw.subscribe(
        OTHER,
        "s",
        pb.CommandSubscribe(sub_type=shared, initial_position=pb.CommandSubscribe.Earliest),
        permits=1000,
    )
    for action in (pb.COMMIT, pb.ABORT, None):
        txn = await client.begin(ttl_ms=60_000 if action is not None else 1000)
        await client.add_partitions(txn, TOPIC, "persistent://public/default/not there")
        await inputs.send(b"x")
        taken = (await consumer.receive()).message_id
        await acknowledge(consumer, txn, taken)
        await send(producer, txn, b"x")
        with pytest.raises(BrokerError, match="TransactionConflict"):
            await acknowledge(consumer, (0, next(unknown)), taken)
        if action is not None:
            await client.end(txn, action)
            await client.end(txn, action)
    never = (3, next(unknown))
    await inputs.send(b"x")
    with contextlib.suppress(BrokerError):  # whichever comes first: the answer, or the header
        await acknowledge(consumer, never, (await consumer.receive()).message_id)
    never = (3, next(unknown))
    with pytest.raises(BrokerError, match="NotAllowedError"):
        await send(producer, never, b"x")
    with pytest.raises(BrokerError, match="TransactionNotFound"):
        await client.end(never)


async def cut_short(raw: RawClient) -> None:
    """Requests whose connection goes away at once."""
    raw.send(Kind.NEW_TXN, pb.CommandNewTxn(request_id=1, txn_ttl_millis=3_600_000, scalable=True))
    await raw.ping()
    await raw.close()


async def test_nothing_stays_of_what_ended(
    broker: Broker, txn_client: TransactionClient, connect: Connect
) -> None:
    consumer = await reader(txn_client.raw)
    unknown = itertools.count(10**9)
    for _ in range(ROUNDS):
        await one_of_each(txn_client, raw := await connect(), unknown)
        await raw.close()
        await cut_short(await connect())
    coordinators = broker.transactions.coordinators
    for stored in coordinators.open_transactions():
        if stored.header.timeout_ms > 60_000:
            await txn_client.end((stored.txn.most, stored.txn.least), pb.ABORT)
    await until(lambda: not coordinators.open_transactions())
    while not consumer.messages.empty():
        consumer.messages.get_nowait()
    topics = [
        await broker.topics.get(parse_topic_name(each), create=False) for each in (TOPIC, OTHER)
    ]
    await until(lambda: all(each.buffer.idle for each in topics))
    pending = topics[1].subscriptions["s"].transactional
    assert pending is not None
    await until(lambda: not pending.pending.busy)
    found = paths_to_transactions(broker)
    assert {path for path in found if not path.endswith(BOUNDED)} == set()
    assert broker.transactions.decisions.followed == 0
    assert await broker.transactions.store.count_operations() == 0


async def test_the_search_finds_what_stays(broker: Broker, txn_client: TransactionClient) -> None:
    txn = await txn_client.begin()
    await send(await txn_client.raw.create_producer(TOPIC), txn, b"x")
    found = paths_to_transactions(broker)
    assert any("coordinators" in path for path in found)
    assert any("decisions" in path for path in found)
    assert any("_topics" in path for path in found)
