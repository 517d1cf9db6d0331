"""Transactions of other roles, on a broker with authorization."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from tests.support.embedded_broker import running
from tests.support.group_client import GroupClient
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import RawConsumer, RawProducer
from tests.support.roles import TOKENS, connect_as
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.records import TxnState
from txn.store import StoredHeader

Kind = pb.BaseCommand
Txn = tuple[int, int]
ORDINARY = "persistent://public/default/t"
SCALABLE = "topic://public/default/s"


class World:
    """A broker with authorization, and a topic on which every role may produce and consume."""

    def __init__(self, broker: Broker, stack: AsyncExitStack, topic: str) -> None:
        self.broker = broker
        self.topic = topic
        self._stack = stack

    async def client(self, role: str, proxy: str | None = None) -> TransactionClient:
        """A client with that role, behind a proxy of that role if there is one."""
        connect = connect_as(proxy or role)
        if proxy is not None:
            connect.original_principal = role
        client = await RawClient.open("127.0.0.1", self.broker.port, connect)
        self._stack.push_async_callback(client.close)
        return TransactionClient(client)

    async def ended(self, client: TransactionClient, *, collected: bool = False) -> Txn:
        """An aborted transaction of the client's role."""
        txn = await client.begin()
        await client.end(txn, pb.ABORT)
        if collected:
            store = self.broker.transactions.store
            stored = await store.read_header(TxnId(*txn))
            assert stored is not None
            await store.delete_header(stored)
        return txn


@pytest.fixture(params=[SCALABLE, ORDINARY])
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with secured(tmp_path, request.param, "on") as world:
        yield world


@asynccontextmanager
async def secured(tmp_path: Path, topic: str, authorization: str) -> AsyncIterator[World]:
    settings = {"superuser_roles": ("root", "gate"), "proxy_roles": ("gate",)}
    async with (
        running(tmp_path, **TOKENS, authorization=authorization, **settings) as broker,
        AsyncExitStack() as stack,
    ):
        granted = {role: ["produce", "consume"] for role in ("alice", "bob")}
        await broker.namespaces.change(
            NamespaceName("public", "default"),
            lambda record: record.update(auth_policies={"namespace_auth": granted}),
        )
        world = World(broker, stack, topic)
        if topic == SCALABLE:
            alice = await world.client("alice")
            _, first = await alice.raw.watch_dag(SCALABLE)
            (segment,) = first.dag.segments
            first_hash, last_hash = segment.hash_start, segment.hash_end
            descriptor = f"{first_hash:04x}-{last_hash:04x}-{segment.segment_id}"
            world.topic = f"segment://public/default/s/{descriptor}"
        yield world


def in_transaction(txn: Txn) -> dict[str, Message]:
    """The fields of a SEND in a transaction."""
    return {
        "send": pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
        "metadata": pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1]),
    }


def ack_in(
    txn: Txn, consumer: RawConsumer, *ids: pb.MessageIdData, cumulative: bool = False
) -> pb.CommandAck:
    """An ACK in a transaction."""
    ack = consumer.ack_command(ids, cumulative, None)
    ack.txnid_most_bits, ack.txnid_least_bits = txn
    return ack


class Member:
    """A client with a producer, a consumer on a subscription of its own, and messages there."""

    def __init__(
        self,
        client: TransactionClient,
        topic: str,
        producer: RawProducer,
        consumer: RawConsumer,
        ids: list[pb.MessageIdData],
    ) -> None:
        self.client = client
        self.topic = topic
        self.producer = producer
        self.consumer = consumer
        self.ids = ids

    @classmethod
    async def attach(cls, world: World, role: str, proxy: str | None = None) -> Self:
        """Open both, and receive three messages."""
        client = await world.client(role, proxy)
        producer = await client.raw.create_producer(world.topic)
        consumer = await client.raw.subscribe(world.topic, uuid4().hex, permits=100)
        for number in range(3):
            await producer.send(b"%d" % number)
        ids = [(await consumer.receive()).message_id for _ in range(3)]
        return cls(client, world.topic, producer, consumer, ids)

    async def send(self, txn: Txn) -> None:
        """SEND in a transaction."""
        await self.producer.send(b"in", **in_transaction(txn))  # type: ignore[arg-type]

    async def ack(self, txn: Txn) -> None:
        """ACK of one message."""
        await self.client.raw.request(Kind.ACK, ack_in(txn, self.consumer, self.ids[0]))

    async def ack_of_batch(self, txn: Txn) -> None:
        """ACK of a part of a batch."""
        part = pb.MessageIdData(batch_size=10, ack_set=[0b11])
        part.MergeFrom(self.ids[1])
        await self.client.raw.request(Kind.ACK, ack_in(txn, self.consumer, part))

    async def ack_up_to(self, txn: Txn) -> None:
        """Cumulative ACK."""
        ack = ack_in(txn, self.consumer, self.ids[2], cumulative=True)
        await self.client.raw.request(Kind.ACK, ack)

    async def add_partition(self, txn: Txn) -> None:
        """ADD_PARTITION_TO_TXN."""
        await self.client.add_partitions(txn, self.topic)

    async def add_subscription(self, txn: Txn) -> None:
        """ADD_SUBSCRIPTION_TO_TXN."""
        await self.client.add_subscription(txn, self.topic, "s")

    async def commit(self, txn: Txn) -> None:
        """END_TXN."""
        await self.client.end(txn)

    @property
    def uses(self) -> tuple[Callable[[Txn], Awaitable[None]], ...]:
        """Every way to use a transaction."""
        acks = (self.ack, self.ack_of_batch, self.ack_up_to)
        return (self.send, *acks, self.add_partition, self.add_subscription, self.commit)


def elsewhere(world: World, monkeypatch: pytest.MonkeyPatch) -> list[TxnId]:
    """Have the broker act as if others led all coordinators; returns the headers that it reads."""
    read: list[TxnId] = []
    transactions = world.broker.transactions
    read_header = transactions.store.read_header

    async def counted(txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        read.append(txn)
        return await read_header(txn, fresh=fresh)

    monkeypatch.setattr(transactions.coordinators, "find_open", lambda txn: None)
    monkeypatch.setattr(transactions.store, "read_header", counted)
    return read


async def test_transaction_of_another_role_is_refused_as_one_that_does_not_exist(
    world: World,
) -> None:
    alice, bob = await Member.attach(world, "alice"), await Member.attach(world, "bob")
    foreign = await alice.client.begin()
    await alice.send(foreign)
    await alice.ack(foreign)
    ownerless = await world.broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    refused: dict[str, set[tuple[int, str]]] = {}
    for txn in (
        foreign,
        ownerless,
        await world.ended(alice.client),
        await world.ended(alice.client, collected=True),
        await world.ended(bob.client, collected=True),
        (0, 999_999),
        (0, 999_999 | 7 << 44),
    ):
        for use in bob.uses:
            with pytest.raises(BrokerError) as error:
                await use(txn)
            words = error.value.message.replace(str(TxnId(*txn)), "TXN")
            refused.setdefault(use.__name__, set()).add((error.value.code, words))
    words = (
        "There is no transaction TXN for this client: it ended long ago, or another client began "
        "it. Begin another one."
    )
    not_found = {(pb.TransactionNotFound, words)}
    # After any other code than NotAllowedError clients repeat a SEND endlessly.
    sends = {(pb.NotAllowedError, words)}
    assert refused == {use.__name__: sends if use == bob.send else not_found for use in bob.uses}

    # It has left nothing in the transaction, which commits what its own role did.
    operations = await world.broker.transactions.store.operations_of(TxnId(*foreign))
    assert len(operations) == 2
    await alice.commit(foreign)
    assert (await bob.consumer.receive()).payload == b"in"


async def test_own_transaction_is_used_over_any_connection_of_the_role(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await Member.attach(world, "alice"), await Member.attach(world, "alice")
    read = elsewhere(world, monkeypatch)
    txn = await one.client.begin()
    for member in (one, other):
        for use in member.uses[:-3]:
            if use != member.ack_up_to:
                await use(txn)
                await member.send(txn)
    # Once for each connection, and once by the segment for its claim, and the subscription.
    assert read.count(TxnId(*txn)) <= 2 + 1 + 2
    await other.commit(txn)
    with pytest.raises(BrokerError, match="has ended and takes no writes") as ended:
        await one.send(txn)
    assert ended.value.code == pb.NotAllowedError
    with pytest.raises(BrokerError, match="is COMMITTED already"):
        await one.ack(txn)


async def test_superuser_uses_transactions_of_every_role_and_of_none(world: World) -> None:
    alice = await world.client("alice")
    begun = await world.broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    for txn in (await alice.begin(), begun):
        root = await Member.attach(world, "root")
        for use in root.uses:
            if use != root.ack_up_to:
                await use(txn)
        stored = await world.broker.transactions.store.read_header(TxnId(*txn))
        assert stored is not None
        assert stored.header.state is TxnState.COMMITTED


async def test_behind_a_proxy_the_role_of_its_client_counts(world: World) -> None:
    alice = await Member.attach(world, "alice")
    txn = await alice.client.begin()
    own, foreign = await Member.attach(world, "alice", "gate"), await world.client("bob", "gate")
    await own.send(txn)
    await own.ack(txn)
    producer = await foreign.raw.create_producer(world.topic)
    with pytest.raises(BrokerError, match="There is no transaction"):
        await producer.send(b"in", **in_transaction(txn))  # type: ignore[arg-type]
    await own.commit(txn)


async def test_sends_and_acknowledgements_keep_their_order_while_a_header_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob, alice = await Member.attach(world, "bob"), await Member.attach(world, "alice")
    txn = await alice.client.begin()
    elsewhere(world, monkeypatch)
    first = asyncio.ensure_future(alice.send(txn))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(alice.producer.send(b"second"))
    await asyncio.sleep(0)
    # The message is held before the next command of this connection is served.
    alice.client.raw.send(Kind.ACK, ack_in(txn, alice.consumer, alice.ids[0]))
    alice.consumer.redeliver()
    await asyncio.gather(first, second, alice.client.raw.ping())
    await alice.commit(txn)
    found = [(await bob.consumer.receive()).payload for _ in range(5)]
    assert found[-2:] == [b"in", b"second"]
    again = [(await alice.consumer.receive()).payload for _ in range(4)]
    assert b"0" not in again


async def test_refusals_are_counted_and_audited(world: World) -> None:
    alice, bob = await Member.attach(world, "alice"), await Member.attach(world, "bob")
    txn = await alice.client.begin()
    with capture_logs() as logs:
        for use in (bob.send, bob.ack):
            with pytest.raises(BrokerError):
                await use(txn)
    denied = [each for each in logs if each["event"] == "access_denied"]
    assert [(each["operation"], each["role"], each["access"]) for each in denied] == [
        (kind, "bob", [f"to use transaction {TxnId(*txn)}"]) for kind in ("SEND", "ACK")
    ]
    page = await metrics_text(world.broker)
    assert 'magnetar_access_denied_total{cluster="standalone",operation="SEND"} 1' in page


@pytest.mark.parametrize("topic", [SCALABLE, ORDINARY])
async def test_dry_run_logs_and_allows(tmp_path: Path, topic: str) -> None:
    async with secured(tmp_path, topic, "dry_run") as world:
        alice, bob = await Member.attach(world, "alice"), await Member.attach(world, "bob")
        txn = await alice.client.begin()
        with capture_logs() as logs:
            for use in (bob.send, bob.send, bob.ack):
                await use(txn)
        denied = [each for each in logs if each["event"] == "access_would_be_denied"]
        assert [each["operation"] for each in denied] == ["SEND"]
        await alice.commit(txn)


async def test_keys_and_groups_of_another_role_are_refused_as_those_that_do_not_exist(
    world: World,
) -> None:
    """Both roles have a key of the same name; each request of one names a group of the other."""
    alice = GroupClient((await world.client("alice")).raw, "k")
    bob = GroupClient((await world.client("bob")).raw, "k")
    await alice.open()
    await bob.open()
    attempt = await alice.attempt("n")
    group = TxnId(*attempt).group.least
    assert not await bob.abort(), "it would abort what is open of its own key"
    uses: dict[str, Callable[[Txn], Awaitable[object]]] = {
        "add": lambda txn: bob.add(txn, world.topic),
        "end": bob.end,
        "extend": lambda txn: bob.extend(txn[1], 1000),
        "commit": lambda txn: bob.commit("n", txn[1], [txn[1]]),
    }
    refused: dict[str, set[tuple[int, str]]] = {}
    for least in (group, attempt[1], 999_999, 999_999 | 7 << 44):
        txn = (attempt[0], least)
        for name, use in uses.items():
            with pytest.raises(BrokerError) as error:
                await use(txn)
            words = error.value.message.replace(str(TxnId(*txn)), "TXN")
            refused.setdefault(name, set()).add((error.value.code, words))
    assert {name: len(answers) for name, answers in refused.items()} == dict.fromkeys(refused, 1)
    await alice.commit("n", group, [attempt[1]])
