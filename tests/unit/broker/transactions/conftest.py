"""A whole broker with coordinators, and the commands of a transaction."""

from collections.abc import Awaitable, Callable

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient, Session

Connect = Callable[[], Awaitable[RawClient]]
Kind = pb.BaseCommand


class TransactionClient:
    """The commands of a client about transactions, on one connection.

    `scalable` False: the client is of a version before 5.
    """

    def __init__(self, raw: RawClient, *, scalable: bool = True) -> None:
        self.raw = raw
        self.scalable = scalable

    async def attach(self, tc: int = 0) -> None:
        """TC_CLIENT_CONNECT_REQUEST."""
        await self.raw.request(
            Kind.TC_CLIENT_CONNECT_REQUEST,
            pb.CommandTcClientConnectRequest(tc_id=tc, scalable=self.scalable),
        )

    async def begin(self, tc: int = 0, ttl_ms: int = 60_000) -> tuple[int, int]:
        """NEW_TXN: most and least bits."""
        answer = await self.raw.request(
            Kind.NEW_TXN, pb.CommandNewTxn(tc_id=tc, txn_ttl_millis=ttl_ms, scalable=self.scalable)
        )
        return answer.new_txn_response.txnid_most_bits, answer.new_txn_response.txnid_least_bits

    async def add_partitions(self, txn: tuple[int, int], *topics: str) -> None:
        """ADD_PARTITION_TO_TXN."""
        command = pb.CommandAddPartitionToTxn(
            txnid_most_bits=txn[0],
            txnid_least_bits=txn[1],
            partitions=topics,
            scalable=self.scalable,
        )
        await self.raw.request(Kind.ADD_PARTITION_TO_TXN, command)

    async def add_subscription(self, txn: tuple[int, int], topic: str, subscription: str) -> None:
        """ADD_SUBSCRIPTION_TO_TXN."""
        command = pb.CommandAddSubscriptionToTxn(
            txnid_most_bits=txn[0], txnid_least_bits=txn[1], scalable=self.scalable
        )
        command.subscription.add(topic=topic, subscription=subscription)
        await self.raw.request(Kind.ADD_SUBSCRIPTION_TO_TXN, command)

    async def end(self, txn: tuple[int, int], action: "pb.TxnAction" = pb.COMMIT) -> None:
        """END_TXN."""
        command = pb.CommandEndTxn(
            txnid_most_bits=txn[0],
            txnid_least_bits=txn[1],
            txn_action=action,
            scalable=self.scalable,
        )
        await self.raw.request(Kind.END_TXN, command)

    async def raw_answer(self, kind: "pb.BaseCommand.Type", body: object) -> pb.BaseCommand:
        """The answer to a request as it is, errors too; it must be the next thing that comes."""
        self.raw.send(kind, body)  # type: ignore[arg-type]
        return await self.raw.wait(self.raw.events.get())

    def watch(self, watch_id: int) -> Session:
        """WATCH_TC_ASSIGNMENTS."""
        session = self.raw.sessions[Kind.WATCH_TC_ASSIGNMENTS_UPDATE, watch_id] = Session(
            self.raw, watch_id
        )
        self.raw.send(Kind.WATCH_TC_ASSIGNMENTS, pb.CommandWatchTcAssignments(watch_id=watch_id))
        return session


Client = TransactionClient


@pytest.fixture
async def v4_client(connect: Connect) -> TransactionClient:
    return TransactionClient(await connect(), scalable=False)


@pytest.fixture
async def txn_client(connect: Connect) -> TransactionClient:
    return TransactionClient(await connect())
