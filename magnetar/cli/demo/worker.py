"""The pipeline of the demo: reads orders and writes one bill for each, in transactions."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import magnetar
from magnetar.bounds import DEMO_AGAIN_S, DEMO_KEYLESS_TRANSACTION_S, DEMO_TRANSACTION_S
from magnetar.consume.settings import InitialPosition
from magnetar.errors import (
    ExpiredTransaction,
    InvalidArgument,
    MagnetarError,
    NotSupported,
    TransactionKeyFenced,
)
from magnetar.transactions.keys import TransactionKey

FENCED_STATUS = 3


@dataclass(frozen=True, slots=True)
class Work:
    """The options of a worker."""

    url: str
    orders: str
    bills: str
    batch: int
    hold_at: Sequence[int]


class Worker:
    """One worker, with its input and output.

    Up to `batch` orders, their bills and the acknowledgement are one transaction.  If one fails, it
    is aborted, and the worker begins anew after what is acknowledged.  If another worker opens the
    transaction key, this one ends.

    The worker reports each event as one line of JSON on standard output: `ready`, `holding`,
    `committed`, `again`, `fenced`.  Before it commits a transaction that `hold_at` names (counted
    from 1), or the next one after it read `hold` (and reported `will_hold`), it reports `holding`
    and waits until it reads `go`.  It ends when its input ends.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._hold_next = False
        self._go = asyncio.Event()
        self._begun = 0
        self._committed = 0

    def obey(self, command: str) -> None:
        """Obey a line of the input: `hold` or `go`."""
        if command == "hold":
            self._hold_next = True
            self._report("will_hold")
        else:
            self._go.set()

    async def run(self) -> int:
        """Work until another worker has the key; returns the exit status for that."""
        async with magnetar.connect(self._work.url) as client:
            key = await _open_key(client)
            self._report("ready", keys=key is not None)
            while True:
                try:
                    await self._pipeline(client, key)
                except (ExpiredTransaction, TransactionKeyFenced) as error:
                    self._report("fenced", error=type(error).__name__, reason=str(error))
                    return FENCED_STATUS
                except InvalidArgument:
                    raise
                except MagnetarError as error:
                    self._report("again", error=type(error).__name__, reason=str(error))
                    await asyncio.sleep(DEMO_AGAIN_S)

    async def _pipeline(self, client: magnetar.Client, key: TransactionKey | None) -> None:
        """Run transactions one after the other until one fails."""
        timeout_s = DEMO_KEYLESS_TRANSACTION_S if key is None else DEMO_TRANSACTION_S
        async with (
            client.stream_consumer(
                self._work.orders,
                "billing",
                schema=str,
                consumer_name="worker",
                initial_position=InitialPosition.EARLIEST,
            ) as orders,
            client.producer(self._work.bills, schema=str) as bills,
        ):
            while True:
                batch = await orders.receive_batch(self._work.batch, timeout_s=None)
                self._begun += 1
                async with client.transaction(timeout_s=timeout_s, key=key) as txn:
                    for order in batch:
                        bills.send_nowait(order.value, key=order.key, transaction=txn)
                    await orders.ack(batch[-1], transaction=txn)
                    await bills.flush()
                    await self._hold(len(batch))
                self._committed += len(batch)
                self._report("committed", orders=self._committed)

    async def _hold(self, orders: int) -> None:
        if self._hold_next or self._begun in self._work.hold_at:
            self._hold_next = False
            self._go.clear()
            self._report("holding", transaction=self._begun, orders=orders)
            await self._go.wait()

    def _report(self, event: str, **details: object) -> None:
        print(json.dumps({"event": event, **details}), flush=True)


async def _open_key(client: magnetar.Client) -> TransactionKey | None:
    """Open the pipeline's transaction key; None where the broker has no such keys."""
    try:
        return await client.transaction_key("demo-billing")
    except NotSupported:
        return None


def run_worker(work: Work) -> int:
    """Run a worker on this process's input and output; returns the exit status."""
    return asyncio.run(_run(work))


async def _run(work: Work) -> int:
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    worker = Worker(work)
    working = asyncio.ensure_future(worker.run())
    listening = asyncio.ensure_future(_listen(worker, commands))
    await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        listening.cancel()
        return working.result()
    working.cancel()
    await asyncio.wait((working,))
    return 0


async def _listen(worker: Worker, commands: asyncio.StreamReader) -> None:
    """Pass lines of the input to the worker until the input ends."""
    while line := await commands.readline():
        worker.obey(line.decode().strip())
