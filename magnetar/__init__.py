"""The Python client for Pulsar v5 brokers.

    async with magnetar.connect("pulsar://localhost:6650") as client:
        async with client.producer("topic://public/default/orders", schema=str) as producer:
            await producer.send("first", key="customer-1")

Rules: what the client makes is awaited, or entered by `async with`; times are given in the unit
that ends their name; every error is a `MagnetarError` (`magnetar.errors` has them all).  Schemas of
other types are in `magnetar.schema`, the same client for threads in `magnetar.sync`.
"""

from typing import TYPE_CHECKING

from magnetar import schema
from magnetar.checkpoint import Checkpoint
from magnetar.client import Client, connect
from magnetar.compression import CompressionType
from magnetar.consume.checkpoint_consumer import CheckpointConsumer
from magnetar.consume.consumer_settings import (
    DeadLetterPolicy,
    InitialPosition,
    NackDelay,
    QueueSettings,
)
from magnetar.consume.namespace_consumer import NamespaceQueueConsumer, NamespaceStreamConsumer
from magnetar.consume.ordered_settings import CheckpointSettings, StreamSettings
from magnetar.consume.queue_consumer import QueueConsumer
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.errors import MagnetarError
from magnetar.layout import Layout, Segment
from magnetar.message import Message
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.produce.receipts import Receipts
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.schema import AUTO, BYTES, STRING, Schema
from magnetar.settings import ClientSettings
from magnetar.transactions.attached import AttachedTransaction
from magnetar.transactions.attempt import Attempt
from magnetar.transactions.groups import CommittedGroup, GroupRecord, SegmentCount, Winner
from magnetar.transactions.keys import TransactionKey
from magnetar.transactions.transaction import Transaction
from magnetar.transactions.txn_id import TxnId
from protocol.ids import Position

if TYPE_CHECKING:
    from magnetar.schema import avro_of, json_of, protobuf_of
else:

    def __getattr__(name: str) -> object:
        if name in ("avro_of", "json_of", "protobuf_of"):  # loaded when first asked for
            return getattr(schema, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AUTO",
    "BYTES",
    "STRING",
    "AccessMode",
    "AttachedTransaction",
    "Attempt",
    "Checkpoint",
    "CheckpointConsumer",
    "CheckpointSettings",
    "Client",
    "ClientSettings",
    "CommittedGroup",
    "CompressionType",
    "DeadLetterPolicy",
    "InitialPosition",
    "GroupRecord",
    "Layout",
    "MagnetarError",
    "Message",
    "MessageId",
    "NackDelay",
    "NamespaceQueueConsumer",
    "NamespaceStreamConsumer",
    "Position",
    "Producer",
    "ProducerSettings",
    "QueueConsumer",
    "QueueSettings",
    "RangePlan",
    "Receipts",
    "Schema",
    "Segment",
    "SegmentCount",
    "StoredEntry",
    "StreamConsumer",
    "StreamSettings",
    "Transaction",
    "TransactionKey",
    "TxnId",
    "Winner",
    "avro_of",
    "connect",
    "json_of",
    "protobuf_of",
]
