"""The client for threads: the same objects, without asyncio.

with magnetar.sync.connect("pulsar://localhost:6650") as client:
    with client.producer("orders", schema=str) as producer:
        producer.send("first", key="customer-1")

Every client has one background thread.  A process that forks must connect anew in the child.
"""

from magnetar.sync.client import Client, connect
from magnetar.sync.consumers import CheckpointConsumer, QueueConsumer, StreamConsumer
from magnetar.sync.producer import Producer, Receipts
from magnetar.sync.transaction import (
    AttachedTransaction,
    Attempt,
    Transaction,
)
from magnetar.sync.transaction_key import TransactionKey

__all__ = [
    "AttachedTransaction",
    "Attempt",
    "CheckpointConsumer",
    "Client",
    "Producer",
    "QueueConsumer",
    "Receipts",
    "StreamConsumer",
    "Transaction",
    "TransactionKey",
    "connect",
]
