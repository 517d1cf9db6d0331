"""The official Java client, told in Python what to do.

Rules: one call is one order, done when the call returns; calls of one client are done one after the
other.  Every call waits in a thread, so that the event loop goes on.  Bytes are base64 on the way,
here they are `bytes`.  What the Java client throws is raised as `JavaFailed`.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.java.stock_driver import CaseFailed, StartedCase, StockDriver
from tests.support.json_line_process import Facts

SESSION_TIMEOUT_S: Final = 3600
ORDER_TIMEOUT_S: Final = 40
"""Longer than any is to wait for messages, shorter than a test may take."""
QUIET_MS: Final = 500


class JavaFailed(Exception):
    """The Java client threw; `java_class` is the simple name of what."""

    def __init__(self, java_class: str, text: str) -> None:
        super().__init__(text)
        self.java_class = java_class


@dataclass(frozen=True)
class JavaMessage:
    """What the Java client tells of a message."""

    value: object
    id: bytes
    key: str | None
    properties: Mapping[str, str]
    event_time_ms: int | None
    publish_time_ms: int
    sequence_id: int
    producer_name: str | None
    topic: str
    redelivery_count: int


def told(value: object) -> object:
    """A value as an order tells it."""
    return b64encode(value).decode() if isinstance(value, bytes) else value


class JavaClient:
    """A session of the driver: a client and what it has opened."""

    def __init__(self, case: StartedCase) -> None:
        self._case = case
        self._names = itertools.count(1)
        self._turn = threading.Lock()
        self._stuck: str | None = None
        """The order that was not done in time: none is given after it."""
        case.wait_event("ready")

    @classmethod
    def start(
        cls,
        driver: StockDriver,
        url: str,
        admin_url: str,
        *,
        transactions: bool = True,
        **timeouts: int,
    ) -> JavaClient:
        """A client of the broker there; `timeouts`: operationTimeoutS, transactionTimeoutS."""
        case = driver.start(
            "interop",
            url,
            admin_url,
            timeoutS=SESSION_TIMEOUT_S,
            transactions=transactions,
            **timeouts,
        )
        return cls(case)

    def end(self) -> None:
        """Close everything, after the order that is being done if there is one."""
        with self._turn:
            if self._stuck is None:
                self._case.order_last(do="end")

    async def order(self, do: str, **rest: object) -> Facts:
        """Have one thing done; what came of it."""
        order = {name: value for name, value in rest.items() if value is not None}
        answer = await asyncio.to_thread(self._in_turn, do, order)
        if not answer["ok"]:
            raise JavaFailed(answer["class"], answer["error"])
        return answer

    def _in_turn(self, do: str, order: Facts) -> Facts:
        with self._turn:
            if self._stuck is not None:
                raise CaseFailed(f"the Java client is still at {self._stuck!r}, of a test before")
            try:
                return self._case.order(ORDER_TIMEOUT_S, do=do, **order)
            except CaseFailed:
                self._stuck = do
                raise

    # Producing

    async def producer(self, topic: str, schema: str = "bytes", **how: object) -> JavaProducer:
        """`how`: compression, batching, chunk_size, producer_name, access_mode."""
        name = self._name("producer")
        await self.order("producer", name=name, topic=topic, schema=schema, **how)
        return JavaProducer(self, name)

    # Consuming

    async def queue(
        self, topic: str, subscription: str, schema: str = "bytes", **how: object
    ) -> JavaConsumer:
        """`how`: receiver_queue_size, max_redelivery_count; consumer_name is of no use to it."""
        return await self._consumer(
            "queue", topic=topic, subscription=subscription, schema=schema, **how
        )

    async def stream(
        self, topic: str, subscription: str, schema: str = "bytes", **how: object
    ) -> JavaConsumer:
        """An ordered consumer; `how`: consumer_name."""
        return await self._consumer(
            "stream", topic=topic, subscription=subscription, schema=schema, **how
        )

    async def of_namespace(
        self, kind: str, namespace: str, subscription: str, **how: object
    ) -> JavaConsumer:
        """A "queue" or "stream" of all topics of a namespace; `how`: properties, consumer_name."""
        return await self._consumer(kind, namespace=namespace, subscription=subscription, **how)

    async def checkpoint_consumer(
        self, topic: str, schema: str = "bytes", *, start: bytes | None = None
    ) -> JavaConsumer:
        """From the checkpoint of these bytes on, or from the first message."""
        told_start = None if start is None else told(start)
        return await self._consumer(
            "checkpoint_consumer", topic=topic, schema=schema, start=told_start
        )

    async def _consumer(self, kind: str, **how: object) -> JavaConsumer:
        name = self._name(kind)
        await self.order(kind, name=name, **how)
        return JavaConsumer(self, name)

    # Transactions

    async def begin(self) -> JavaTransaction:
        """A transaction."""
        name = self._name("transaction")
        await self.order("begin", name=name)
        return JavaTransaction(self, name)

    # What bytes mean

    async def explain_id(self, id_bytes: bytes | str) -> Facts:
        """What the Java client reads out of an id (or of its own "earliest", "latest")."""
        return await self.order("explain", id=told(id_bytes))

    async def explain_checkpoint(self, checkpoint: bytes | str) -> Facts:
        """What the Java client reads out of a checkpoint (or of "earliest", "latest")."""
        return await self.order("explain", checkpoint=told(checkpoint))

    async def schema(
        self, schema: str, values: Sequence[object] = (), encoded: Sequence[bytes] = ()
    ) -> Facts:
        """What a schema registers; the bytes of values, and the values of bytes."""
        return await self.order(
            "schema",
            schema=schema,
            values=[told(value) for value in values],
            bytes=[told(one) for one in encoded],
        )

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._names)}"


@dataclass(frozen=True)
class JavaProducer:
    """A producer of the Java client."""

    client: JavaClient
    name: str

    async def send(
        self,
        values: Iterable[object],
        *,
        keys: Sequence[str] | None = None,
        sequence_ids: Sequence[int] | None = None,
        transaction: JavaTransaction | None = None,
        **same: object,
    ) -> list[bytes]:
        """All at once; `same`: properties, event_time_ms of each.  Ids, when all are stored."""
        messages: list[dict[str, object]] = [{"value": told(value), **same} for value in values]
        for message, key in zip(messages, keys or (), strict=False):
            message["key"] = key
        for message, sequence_id in zip(messages, sequence_ids or (), strict=False):
            message["sequence_id"] = sequence_id
        answer = await self.client.order(
            "send",
            producer=self.name,
            messages=messages,
            transaction=transaction and transaction.name,
        )
        return [b64decode(one) for one in answer["ids"]]

    async def close(self) -> None:
        """Close it."""
        await self.client.order("close", names=[self.name])


@dataclass(frozen=True)
class JavaConsumer:
    """A consumer of the Java client, of any kind."""

    client: JavaClient
    name: str

    async def receive(self, count: int, *, quiet_ms: int | None = None) -> list[JavaMessage]:
        """So many messages; fewer when nothing comes for `quiet_ms` (10 s unless given)."""
        answer = await self.client.order(
            "receive", consumer=self.name, count=count, quiet_ms=quiet_ms
        )
        return [JavaMessage(**{**one, "id": b64decode(one["id"])}) for one in answer["messages"]]

    async def receive_rest(self) -> list[JavaMessage]:
        """What comes until nothing does for a while."""
        return await self.receive(1_000_000, quiet_ms=QUIET_MS)

    async def ack(
        self, *id_bytes: bytes, transaction: JavaTransaction | None = None
    ) -> frozenset[int]:
        """Each of these; of an ordered consumer all up to the last of them.

        Which of them, from 0, the client dropped in a transaction: it does not use them.
        """
        answer = await self.client.order(
            "ack",
            consumer=self.name,
            ids=[told(one) for one in id_bytes],
            transaction=transaction and transaction.name,
        )
        return frozenset(answer["dropped"])

    async def nack(self, *id_bytes: bytes) -> None:
        """Have these again."""
        await self.client.order("nack", consumer=self.name, ids=[told(one) for one in id_bytes])

    async def checkpoint(self) -> bytes:
        """Where a checkpoint consumer is."""
        answer = await self.client.order("checkpoint", consumer=self.name)
        return b64decode(answer["checkpoint"])

    async def close(self) -> None:
        """Close it."""
        await self.client.order("close", names=[self.name])


@dataclass(frozen=True)
class JavaTransaction:
    """A transaction of the Java client."""

    client: JavaClient
    name: str

    async def commit(self) -> None:
        """Commit it."""
        await self.client.order("commit", name=self.name)

    async def abort(self) -> None:
        """Abort it."""
        await self.client.order("abort", name=self.name)
