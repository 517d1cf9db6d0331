"""The public names of `magnetar`, which loads this module when one of them is first used."""

from typing import TYPE_CHECKING

from magnetar import schema
from magnetar.checkpoint import Checkpoint
from magnetar.client import Client, connect
from magnetar.compression import CompressionType
from magnetar.consume.checkpoint_consumer import CheckpointConsumer
from magnetar.consume.message import Message
from magnetar.consume.namespace_consumer import NamespaceQueueConsumer, NamespaceStreamConsumer
from magnetar.consume.queue_consumer import QueueConsumer
from magnetar.consume.settings import (
    CheckpointSettings,
    DeadLetterPolicy,
    InitialPosition,
    NackDelay,
    QueueSettings,
    StreamSettings,
)
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials
from magnetar.errors import MagnetarError
from magnetar.layout import Layout, Segment
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.produce.receipts import Receipts
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import RangePlan
from magnetar.schema import AUTO, BYTES, STRING, Schema
from magnetar.settings import ClientSettings
from magnetar.transactions.attached_transaction import AttachedTransaction
from magnetar.transactions.attempt import Attempt
from magnetar.transactions.groups import CommittedGroup, GroupRecord, SegmentCount, Winner
from magnetar.transactions.keys import TransactionKey
from magnetar.transactions.transaction import Transaction

if TYPE_CHECKING:
    from magnetar.schema import avro_of, json_of, protobuf_of
else:

    def __getattr__(name: str) -> object:
        if name in ("avro_of", "json_of", "protobuf_of"):  # Loaded at their first use.
            return getattr(schema, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AUTO",
    "BYTES",
    "STRING",
    "AccessMode",
    "AttachedTransaction",
    "Attempt",
    "BasicCredentials",
    "Checkpoint",
    "CheckpointConsumer",
    "CheckpointSettings",
    "Client",
    "ClientSettings",
    "CommittedGroup",
    "CompressionType",
    "DeadLetterPolicy",
    "GroupRecord",
    "InitialPosition",
    "Layout",
    "MagnetarError",
    "Message",
    "MessageId",
    "NackDelay",
    "NamespaceQueueConsumer",
    "NamespaceStreamConsumer",
    "OAuth2Credentials",
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
