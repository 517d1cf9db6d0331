"""The bare client on the simulated network: it writes down what it sees, and has transactions."""

import asyncio
from collections.abc import Sequence

from protocol import pulsar_pb2 as pb
from protocol.frames import Frame
from protocol.message import parse_metadata, payload_of
from tests.simulation.history import Delivered, History, Txn
from tests.simulation.network import SimulatedTransport
from tests.support.raw_client import Delivery, RawClient, RawConsumer
from tests.support.raw_handles import BrokerError

Kind = pb.BaseCommand
GONE = (ConnectionError, TimeoutError, BrokerError, OSError)
"""What a client must expect of any request."""


class SimulatedClient(RawClient):
    """One connection of one actor."""

    history: History
    who: str

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.subscriptions: dict[int, tuple[str, str]] = {}
        """Subscription and segment of each consumer id."""
        self.delivered: dict[tuple[int, int, int], Delivered] = {}
        """The newest delivery of each (consumer id, ledger, entry)."""

    @classmethod
    async def of(
        cls, history: History, who: str, port: int, timeout_s: float = 20.0
    ) -> "SimulatedClient":
        client = await cls.open("broker", port, timeout_s=timeout_s)
        assert isinstance(client, SimulatedClient)
        client.history, client.who = history, who
        return client

    @property
    def alive(self) -> bool:
        return not self.closed.done()

    def drop(self) -> None:
        """End the connection without waiting for anybody."""
        if self._transport is not None:
            self._transport.abort()
        if not self.closed.done():
            self.closed.set_result("dropped")

    def fail(self, why: str) -> None:
        self.history.violated(f"{self.who}: the broker broke the protocol: {why}")
        super().fail(why)

    def _message(self, frame: Frame) -> None:
        message = frame.command.message
        if message.consumer_id not in self.consumers or frame.entry is None:
            if message.consumer_id not in self.subscriptions:
                super()._message(frame)
            return
        consumer = self.consumers[message.consumer_id]
        subscription, segment = self.subscriptions[message.consumer_id]
        payload = bytes(payload_of(frame.entry))
        metadata = parse_metadata(frame.entry)
        transport = self._transport
        assert isinstance(transport, SimulatedTransport)
        delivered = Delivered(
            subscription,
            name_of(payload),
            segment,
            (message.message_id.ledger_id, message.message_id.entry_id),
            self.who,
            asyncio.get_running_loop().time(),
            transport.written_at,
            message.redelivery_count,
            transport.written_at >= transport.peer.host.replaced_at,
        )
        self.history.delivered(delivered)
        consumer.messages.put_nowait(Delivery(message, metadata, payload, frame.entry))
        self.delivered[(message.consumer_id, *delivered.position)] = delivered

    async def attach(
        self,
        segment: str,
        subscription: str,
        kind: "pb.CommandSubscribe.SubType",
        name: str,
        permits: int,
        *,
        durable: bool = True,
    ) -> RawConsumer:
        """SUBSCRIBE at Earliest; deliveries are written down."""
        consumer_id = self.next_id()
        self.subscriptions[consumer_id] = (subscription, segment)
        options = pb.CommandSubscribe(
            consumer_id=consumer_id,
            sub_type=kind,
            consumer_name=name,
            durable=durable,
            initial_position=pb.CommandSubscribe.Earliest,
        )
        return await self.subscribe(segment, subscription, options, permits=permits)

    def transactional_ack(
        self, consumer: RawConsumer, ids: Sequence[pb.MessageIdData], txn: Txn
    ) -> "asyncio.Future[pb.BaseCommand]":
        ack = consumer._ack(ids, False, None)
        ack.txnid_most_bits, ack.txnid_least_bits = txn
        return asyncio.ensure_future(self.request(Kind.ACK, ack))

    # Transactions

    async def connect_coordinator(self, coordinator: int = 0) -> None:
        await self.request(
            Kind.TC_CLIENT_CONNECT_REQUEST,
            pb.CommandTcClientConnectRequest(tc_id=coordinator, scalable=True),
        )

    async def begin(self, timeout_ms: int, coordinator: int = 0) -> Txn:
        answer = await self.request(
            Kind.NEW_TXN,
            pb.CommandNewTxn(txn_ttl_millis=timeout_ms, tc_id=coordinator, scalable=True),
        )
        body = answer.new_txn_response
        return body.txnid_most_bits, body.txnid_least_bits

    async def add_partition(self, txn: Txn, segments: Sequence[str]) -> None:
        await self.request(
            Kind.ADD_PARTITION_TO_TXN,
            pb.CommandAddPartitionToTxn(
                txnid_most_bits=txn[0], txnid_least_bits=txn[1], partitions=segments, scalable=True
            ),
        )

    async def add_subscription(self, txn: Txn, segment: str, subscription: str) -> None:
        named = pb.Subscription(topic=segment, subscription=subscription)
        await self.request(
            Kind.ADD_SUBSCRIPTION_TO_TXN,
            pb.CommandAddSubscriptionToTxn(
                txnid_most_bits=txn[0],
                txnid_least_bits=txn[1],
                subscription=[named],
                scalable=True,
            ),
        )

    async def end(self, txn: Txn, action: "pb.TxnAction") -> None:
        await self.request(
            Kind.END_TXN,
            pb.CommandEndTxn(
                txnid_most_bits=txn[0], txnid_least_bits=txn[1], txn_action=action, scalable=True
            ),
        )


def payload_for(name: str, size: int) -> bytes:
    """A payload that names the message; what is behind it is made of the name too."""
    head = f"{name}|".encode()
    return head + (name.encode() * (size // len(name) + 1))[:size]


def name_of(payload: bytes) -> str:
    """The message whose payload this is; "?" and more if it is none."""
    head, _, rest = payload.partition(b"|")
    name = head.decode("utf-8", "replace")
    if payload_for(name, len(rest)) != payload:
        return f"?{payload[:40]!r}"
    return name
