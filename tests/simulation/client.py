"""The bare client on the simulated network: it writes down what it sees, and has transactions."""

import asyncio
from collections.abc import Sequence

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.incarnation import INCARNATION
from magnetar.protocol.message import parse_metadata, payload_of
from tests.simulation.history import Delivered, History, Transaction, Txn
from tests.simulation.network import SimulatedTransport
from tests.support.batch_acks import messages_in
from tests.support.raw_client import Delivery, RawClient, RawConsumer
from tests.support.raw_handles import BrokerError

Kind = pb.BaseCommand
ACTIONS = {pb.COMMIT: "COMMITTED", pb.ABORT: "ABORTED"}
GONE = (ConnectionError, TimeoutError, BrokerError, OSError)
"""What a client must expect of any request."""
ASSIGNMENT = "persistent://pulsar/system/transaction_coordinator_assign"
"""The name by whose partitions clients before version 5 look coordinators up."""
JAVA_V4, GO = "Pulsar-Java-v4.0.9", "Pulsar-Go"
"""Versions of CONNECT whose transactions are those of PIP-31."""


class SimulatedClient(RawClient):
    """One connection of one actor."""

    history: History
    who: str
    scalable = True
    """Sent in the commands of transactions; False: those of PIP-31."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.subscriptions: dict[int, tuple[str, str]] = {}
        """Subscription and segment of each consumer id."""
        self.attachments: dict[int, int] = {}
        """The number of the attachment of each consumer id."""
        self.delivered: dict[tuple[int, int, int], list[Delivered]] = {}
        """The newest delivery of each (consumer id, ledger, entry): its message, or a batch."""
        self.keys: dict[Txn, tuple[str, int]] = {}
        """Key and epoch of each transaction that was begun under one."""

    @classmethod
    async def of(
        cls, history: History, who: str, port: int, timeout_s: float = 20.0, version: str = ""
    ) -> "SimulatedClient":
        connect = pb.CommandConnect(client_version=version) if version else None
        client = await cls.open("broker", port, connect, timeout_s=timeout_s)
        assert isinstance(client, SimulatedClient)
        client.history, client.who = history, who
        client.scalable = not version.startswith((JAVA_V4, GO))
        return client

    @property
    def alive(self) -> bool:
        return not self.closed.done()

    def drop(self) -> None:
        """End the connection without waiting for anybody."""
        if self.transport is not None:
            self.transport.abort()
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
        transport = self.transport
        assert isinstance(transport, SimulatedTransport)
        place = (message.message_id.ledger_id, message.message_id.entry_id)
        host, written_at = transport.peer.host, transport.written_at
        stale = written_at >= host.replaced_at
        stale = stale or self.history.was_owner(segment, host.name, written_at)
        found = [
            Delivered(
                subscription,
                name,
                segment,
                (*place, *index),
                self.who,
                asyncio.get_running_loop().time(),
                written_at,
                message.redelivery_count,
                stale,
                self.attachments[message.consumer_id],
            )
            for name, index in names_in(payload, metadata, message.ack_set)
        ]
        for each in found:
            self.history.delivered(each)
        consumer.messages.put_nowait(Delivery(message, metadata, payload, frame.entry))
        self.delivered[(message.consumer_id, *place)] = found

    def seen(self, consumer: RawConsumer, delivery: Delivery) -> list[Delivered]:
        """The messages of a delivery."""
        place = delivery.message_id
        return self.delivered[consumer.consumer_id, place.ledger_id, place.entry_id]

    async def attach(
        self,
        segment: str,
        subscription: str,
        kind: "pb.CommandSubscribe.SubType",
        name: str,
        permits: int,
        *,
        durable: bool = True,
        incarnation: str = "",
        buckets: Sequence[pb.IntRange] = (),
    ) -> RawConsumer:
        """SUBSCRIBE at Earliest; deliveries are written down.

        With `buckets`, the ranges of all entry buckets of the segment, it is shared.
        """
        consumer_id = self.next_id()
        self.subscriptions[consumer_id] = (subscription, segment)
        self.history.attachments += 1
        self.attachments[consumer_id] = self.history.attachments
        meta = pb.KeySharedMeta(key_shared_mode=pb.AUTO_SPLIT)
        if buckets:
            meta = pb.KeySharedMeta(
                key_shared_mode=pb.STICKY, hash_ranges=buckets, entryBucketDispatch=True
            )
        options = pb.CommandSubscribe(
            key_shared_meta=meta if kind == pb.CommandSubscribe.Key_Shared else None,
            consumer_id=consumer_id,
            sub_type=kind,
            consumer_name=name,
            durable=durable,
            initial_position=pb.CommandSubscribe.Earliest,
        )
        if incarnation:
            options.metadata.add(key=INCARNATION, value=incarnation)
        return await self.subscribe(segment, subscription, options, permits=permits)

    def transactional_ack(
        self,
        consumer: RawConsumer,
        ids: Sequence[pb.MessageIdData],
        txn: Txn,
        *,
        cumulative: bool = False,
    ) -> "asyncio.Future[pb.BaseCommand]":
        ack = consumer.ack_command(ids, cumulative, None)
        ack.txnid_most_bits, ack.txnid_least_bits = txn
        return asyncio.ensure_future(self.request(Kind.ACK, ack))

    # Transactions

    async def connect_coordinator(self, coordinator: int = 0) -> None:
        await self.request(
            Kind.TC_CLIENT_CONNECT_REQUEST,
            pb.CommandTcClientConnectRequest(tc_id=coordinator, scalable=self.scalable),
        )

    async def find_coordinator(self, coordinator: int = 0) -> None:
        """Look it up as clients before version 5 do, and connect to it."""
        asked = pb.CommandPartitionedTopicMetadata(topic=ASSIGNMENT)
        answer = await self.request(Kind.PARTITIONED_METADATA, asked)
        count = answer.partitioned_metadata_response.partitions
        assert coordinator < count, f"{coordinator} of {count} coordinators"
        found = await self.lookup(f"{ASSIGNMENT}-partition-{coordinator}")
        if found.response == pb.CommandLookupTopicResponse.Failed:
            raise ConnectionError(f"coordinator {coordinator}: {found.message}")
        await self.connect_coordinator(coordinator)

    async def begin(
        self,
        timeout_ms: int,
        coordinator: int = 0,
        key: tuple[str, int] | None = None,
        beginner: str = "",
    ) -> Txn:
        command = pb.CommandNewTxn(
            txn_ttl_millis=timeout_ms, tc_id=coordinator, scalable=self.scalable
        )
        if key is not None:
            command.transaction_key, command.transaction_key_epoch = key
            command.transaction_key_beginner = beginner
        body = (await self.request(Kind.NEW_TXN, command)).new_txn_response
        txn = body.txnid_most_bits, body.txnid_least_bits
        if key is not None:
            self.keys[txn] = key
        return txn

    async def open_key(
        self, coordinator: int, key: str, epoch: int, opener: str
    ) -> pb.CommandOpenTransactionKeyResponse:
        command = pb.CommandOpenTransactionKey(
            tc_id=coordinator, key=key, epoch=epoch, opener=opener
        )
        answer = await self.request(Kind.OPEN_TRANSACTION_KEY, command)
        return answer.open_transaction_key_response

    async def begin_attempt(
        self,
        coordinator: int,
        key: tuple[str, int],
        nonce: str,
        timeout_ms: int,
        batch: tuple[str, int] | None = None,
    ) -> tuple[Txn, Txn] | None:
        """The attempt and its group; None: the batch is committed already."""
        command = pb.CommandBeginAttempt(
            tc_id=coordinator, key=key[0], epoch=key[1], nonce=nonce, timeout_ms=timeout_ms
        )
        if batch is not None:
            command.query, command.batch = batch
        answer = (await self.request(Kind.BEGIN_ATTEMPT, command)).begin_attempt_response
        if answer.done:
            return None
        attempt = answer.txnid_most_bits, answer.txnid_least_bits
        self.keys[attempt] = key
        return attempt, (answer.txnid_most_bits, answer.group_least_bits)

    async def commit_group(
        self,
        key: tuple[str, int],
        nonce: str,
        group: Txn,
        batch: tuple[str, int],
        winners: Sequence[Txn],
    ) -> pb.CommandCommitGroupResponse:
        command = pb.CommandCommitGroup(
            tc_id=group[0],
            key=key[0],
            epoch=key[1],
            nonce=nonce,
            group_least_bits=group[1],
            query=batch[0],
            batch=batch[1],
            positions=str(batch[1]),
            winners=[pb.GroupWinner(attempt_least_bits=least) for _, least in winners],
        )
        return (await self.request(Kind.COMMIT_GROUP, command)).commit_group_response

    async def abort_group(self, coordinator: int, key: tuple[str, int]) -> bool:
        command = pb.CommandAbortGroup(tc_id=coordinator, key=key[0], epoch=key[1])
        return (await self.request(Kind.ABORT_GROUP, command)).abort_group_response.aborted

    def _under(
        self,
        command: pb.CommandAddPartitionToTxn | pb.CommandAddSubscriptionToTxn | pb.CommandEndTxn,
        txn: Txn,
    ) -> None:
        if txn in self.keys:
            command.transaction_key, command.transaction_key_epoch = self.keys[txn]

    async def begin_recorded(self, timeout_ms: int, coordinator: int = 0) -> Transaction:
        txn = await self.begin(timeout_ms, coordinator)
        record = Transaction(txn, asyncio.get_running_loop().time(), timeout_ms)
        self.history.transactions[txn] = record
        self.history.note(self.who, f"begins {txn} timeout={timeout_ms}")
        return record

    async def end_recorded(self, record: Transaction, action: "pb.TxnAction") -> None:
        """END_TXN; what was asked and what was answered is written down."""
        name = ACTIONS[action]
        record.asked.append(name)
        self.history.note(self.who, f"ends {record.txn} {name}")
        try:
            await self.end(record.txn, action)
        except GONE as error:
            self.history.note(self.who, f"end of {record.txn}: {type(error).__name__} {error}")
            record.answers.append((name, str(error) or type(error).__name__))
            raise
        record.answers.append((name, ""))
        self.history.note(self.who, f"end of {record.txn} answered: {name}")

    async def add_partition(self, txn: Txn, segments: Sequence[str]) -> None:
        command = pb.CommandAddPartitionToTxn(
            txnid_most_bits=txn[0],
            txnid_least_bits=txn[1],
            partitions=segments,
            scalable=self.scalable,
        )
        self._under(command, txn)
        await self.request(Kind.ADD_PARTITION_TO_TXN, command)

    async def add_subscription(self, txn: Txn, segment: str, subscription: str) -> None:
        named = pb.Subscription(topic=segment, subscription=subscription)
        await self.request(
            Kind.ADD_SUBSCRIPTION_TO_TXN,
            pb.CommandAddSubscriptionToTxn(
                txnid_most_bits=txn[0],
                txnid_least_bits=txn[1],
                subscription=[named],
                scalable=self.scalable,
            ),
        )

    async def end(self, txn: Txn, action: "pb.TxnAction") -> None:
        command = pb.CommandEndTxn(
            txnid_most_bits=txn[0],
            txnid_least_bits=txn[1],
            txn_action=action,
            scalable=self.scalable,
        )
        self._under(command, txn)
        await self.request(Kind.END_TXN, command)


def names_in(
    payload: bytes, metadata: pb.MessageMetadata, ack_set: Sequence[int]
) -> list[tuple[str, tuple[int, ...]]]:
    """Names of the messages of an entry, as `messages_in`."""
    return [(name_of(body), place) for body, place in messages_in(payload, metadata, ack_set)]


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
