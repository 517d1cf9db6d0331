"""A well-behaved client beside an attack: what its requests take, and what it was promised."""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawProducer
from tests.support.security import APP_ROLE

Kind = pb.BaseCommand
TOPIC: Final = "persistent://public/default/probe"
MESSAGES_PER_S: Final = 50
TRANSACTION_EVERY_S: Final = 1.0
TRANSACTION_TIMEOUT_MS: Final = 60_000
ANSWER_TIMEOUT_S: Final = 120.0
READ_BACK_PERMITS: Final = 1000


class Probe:
    """Sends `MESSAGES_PER_S` messages and a transaction every `TRANSACTION_EVERY_S`.

    `latencies_s` has the time of each receipt and of each whole transaction, `ANSWER_TIMEOUT_S`
    where none came; `acknowledged` has the
    payloads with a receipt, those of a transaction once its commit was answered.
    """

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self.latencies_s: list[float] = []
        self.acknowledged: set[bytes] = set()
        self._sent = 0
        self._client: RawClient
        self._producer: RawProducer
        self._tasks: list[asyncio.Task[None]] = []
        self._sends: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect, and begin to send."""
        self._client = await self._connect()
        self._producer = await self._client.create_producer(TOPIC)
        self._tasks = [
            asyncio.create_task(self._send_messages()),
            asyncio.create_task(self._run_transactions()),
        ]

    async def stop(self) -> None:
        """Stop sending; return when all that was sent is answered, or too late."""
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert not failed
        await asyncio.gather(*self._sends)
        await self._client.close()

    async def missing(self) -> set[bytes]:
        """The acknowledged payloads that a new reader does not find."""
        missing = set(self.acknowledged)
        with suppress(TimeoutError, OSError):
            await self._read_back(missing)
        return missing

    async def _connect(self) -> RawClient:
        """Connect; a broker with security gets a token over TLS."""
        security = self._broker.security
        connect = None if security is None else security.connect(APP_ROLE)
        client = await self._broker.connect(connect)
        client.timeout_s = ANSWER_TIMEOUT_S
        return client

    async def _read_back(self, missing: set[bytes]) -> None:
        client = await self._connect()
        options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
        consumer = await client.subscribe(TOPIC, "read-back", options, permits=READ_BACK_PERMITS)
        taken = 0
        while missing:
            missing.discard(bytes((await consumer.receive()).payload))
            taken += 1
            if taken % (READ_BACK_PERMITS // 2) == 0:
                consumer.flow(READ_BACK_PERMITS // 2)
        await client.close()

    async def _send_messages(self) -> None:
        next_s = time.monotonic()
        while True:
            send = asyncio.create_task(self._send_one())
            self._sends.add(send)
            send.add_done_callback(self._sends.discard)
            next_s += 1 / MESSAGES_PER_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _send_one(self) -> None:
        payload = self._payload()
        await self._timed(payload, self._producer.send(payload))

    async def _run_transactions(self) -> None:
        while True:
            began_s = time.monotonic()
            payload = self._payload()
            await self._timed(payload, self._transaction(payload))
            await asyncio.sleep(max(0.0, began_s + TRANSACTION_EVERY_S - time.monotonic()))

    async def _transaction(self, payload: bytes) -> None:
        command = pb.CommandNewTxn(txn_ttl_millis=TRANSACTION_TIMEOUT_MS, scalable=True)
        begun = (await self._client.request(Kind.NEW_TXN, command)).new_txn_response
        most, least = begun.txnid_most_bits, begun.txnid_least_bits
        await self._producer.send(
            payload,
            send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
            metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
        )
        end = pb.CommandEndTxn(
            txnid_most_bits=most, txnid_least_bits=least, txn_action=pb.COMMIT, scalable=True
        )
        await self._client.request(Kind.END_TXN, end)

    def _payload(self) -> bytes:
        self._sent += 1
        return b"probe %d" % self._sent

    async def _timed(self, payload: bytes, work: Awaitable[object]) -> None:
        began_s = time.monotonic()
        with suppress(TimeoutError):
            await work
            self.acknowledged.add(payload)
        self.latencies_s.append(time.monotonic() - began_s)
