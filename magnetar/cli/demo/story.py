"""The steps of `magnetar demo`, with processes that are really killed."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import magnetar
from magnetar.bounds import DEMO_KEYLESS_TRANSACTION_S, DEMO_POLL_S, DEMO_SILENCE_S, DEMO_STEP_S
from magnetar.checkpoint import Checkpoint
from magnetar.cli.demo.audit import Audit
from magnetar.cli.demo.processes import DemoBroker, DemoFailed, DemoWorker
from magnetar.cli.demo.worker import FENCED_STATUS

ORDERS: Final = "topic://public/default/orders"
BILLS: Final = "topic://public/default/bills"
CUSTOMERS: Final = 40
BATCH: Final = 25
MORE_ORDERS: Final = 200
"""Orders for the worker that becomes a zombie."""

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Called with the number of orders that have bills, and the number of all orders."""


class Story:
    """One run of the demo in a directory.  It calls `say` once for each step."""

    def __init__(self, directory: Path, orders: int, say: Say, progress: Progress) -> None:
        self._directory = directory
        self._orders = orders
        self._say = say
        self._progress = progress
        self._broker = DemoBroker(directory, random.Random())
        self._audit = Audit()
        self._workers: list[DemoWorker] = []

    async def run(self) -> bool:
        """Do all steps; returns whether each order has one bill, in order.

        Raises `DemoFailed` when a step does not happen.
        """
        began_s = time.monotonic()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._kill_all)
            await self._start_broker()
            client = await stack.enter_async_context(magnetar.connect(self._broker.url))
            reading = asyncio.ensure_future(self._read_bills(client))
            stack.callback(reading.cancel)
            await self._write_orders(client, self._orders)
            first = await self._work()
            await self._kill_broker(first)
            await self._kill_worker(first)
            second, keys = await self._replace(reading)
            if keys:
                await self._fence(client, second, reading)
        whole = "nothing lost, nothing doubled" if self._audit.is_whole else "NOT WHOLE"
        self._say(f"{self._audit.verdict()}: {whole} ({time.monotonic() - began_s:.1f} s).")
        return self._audit.is_whole

    # The steps

    async def _start_broker(self) -> None:
        took_s = await _timed(self._broker.start())
        self._say(
            f"A broker starts on an empty directory: process {self._broker.pid}, "
            f"{self._broker.url}, {took_s:.1f} s."
        )
        for topic in ("orders", "bills"):
            await self._broker.rest("PUT", f"{topic}?numInitialSegments=2")

    async def _write_orders(self, client: magnetar.Client, count: int) -> None:
        async with client.producer(ORDERS, schema=str) as producer:
            for index in range(count):
                customer = f"customer-{index % CUSTOMERS}"
                number = self._audit.order(customer)
                await producer.room()
                producer.send_nowait(f"{customer}/{number}", key=customer)
            await producer.flush()
        self._say(f"{count:,} orders of {CUSTOMERS} customers are written to {ORDERS}.")

    async def _work(self) -> DemoWorker:
        transactions = self._orders // BATCH
        holds = f"{transactions // 3},{2 * transactions // 3}"
        worker = await self._worker("worker-1", "--hold-at", holds)
        self._say(
            f"A worker (process {worker.pid}) reads orders and writes a bill for each: up to "
            f"{BATCH} orders, their bills and the acknowledgement are one transaction."
        )
        return worker

    async def _kill_broker(self, worker: DemoWorker) -> None:
        held = await worker.wait_for_event("holding")
        await self._broker.kill()
        self._say(
            f"{self._billed()}, transaction {held['transaction']} is open with {held['orders']} "
            "more. SIGKILL to the broker."
        )
        took_s = await _timed(self._broker.start())
        worker.send_command("go")
        self._say(f"The broker is back on its data after {took_s:.1f} s. The worker goes on.")

    async def _kill_worker(self, worker: DemoWorker) -> None:
        held = await worker.wait_for_event("holding")
        await self._broker.rest("POST", "orders/split/0")
        self._say(
            f"{self._billed()}, transaction {held['transaction']} is open with {held['orders']} "
            "more. Segment 0 of the orders is split in two meanwhile."
        )
        await worker.kill()
        self._say("SIGKILL to the worker, in the middle of that transaction.")

    async def _replace(self, reading: "asyncio.Future[None]") -> tuple[DemoWorker, bool]:
        worker = await self._worker("worker-2")
        keys = bool((await worker.wait_for_event("ready"))["keys"])
        how = (
            "It opens the pipeline's transaction key, which aborts the dead one's transaction."
            if keys
            else f"The dead one's transaction is aborted after {DEMO_KEYLESS_TRANSACTION_S:.0f} s."
        )
        self._say(f"Another worker (process {worker.pid}) takes over. {how}")
        await self._until_whole(reading)
        self._say(f"{self._audit.verdict()}.")
        return worker, keys

    async def _fence(
        self, client: magnetar.Client, zombie: DemoWorker, reading: "asyncio.Future[None]"
    ) -> None:
        zombie.send_command("hold")
        await zombie.wait_for_event("will_hold")
        await self._write_orders(client, MORE_ORDERS)
        held = await zombie.wait_for_event("holding")
        zombie.signal(signal.SIGSTOP)
        self._say(f"The worker is paused (SIGSTOP) with {held['orders']} orders in a transaction.")
        worker = await self._worker("worker-3")
        self._say(
            f"A third worker (process {worker.pid}) opens the key: the paused one is a zombie now."
        )
        await self._until_whole(reading)
        zombie.signal(signal.SIGCONT)
        zombie.send_command("go")
        fenced = await zombie.wait_for_event("fenced")
        if await zombie.wait_for_exit() != FENCED_STATUS:
            raise zombie.failure("The zombie did not end as it says it would.")
        self._say(f"The zombie wakes up and wants to commit. It is refused: {fenced['error']}.")
        await self._until_whole(reading)

    # What the steps need

    async def _worker(self, name: str, *more: str) -> DemoWorker:
        arguments = ["--url", self._broker.url, "--batch", str(BATCH), *more, ORDERS, BILLS]
        worker = DemoWorker(name, self._directory, arguments)
        self._workers.append(worker)
        await worker.start()
        return worker

    async def _read_bills(self, client: magnetar.Client) -> None:
        """Count every bill from the first one on, during all steps."""
        async with client.checkpoint_consumer(
            BILLS, schema=str, start=Checkpoint.EARLIEST
        ) as bills:
            async for bill in bills:
                customer, _, number = bill.value.partition("/")
                self._audit.bill(customer, int(number))
                self._progress(self._audit.billed, self._audit.orders)

    async def _until_whole(self, reading: "asyncio.Future[None]") -> None:
        """Wait until every order has its bill and no more bills come for DEMO_SILENCE_S.

        Ends too when none came for DEMO_STEP_S; the verdict then says what is missing.
        """
        loop = asyncio.get_running_loop()
        seen, since_s = self._audit.bills, loop.time()
        while True:
            patience_s = DEMO_STEP_S if self._audit.lost else DEMO_SILENCE_S
            if loop.time() > since_s + patience_s:
                return
            if reading.done():
                raise DemoFailed(f"Bills cannot be read: {reading.exception()}.")
            await asyncio.sleep(DEMO_POLL_S)
            if self._audit.bills != seen:
                seen, since_s = self._audit.bills, loop.time()

    def _billed(self) -> str:
        return f"{self._audit.billed:,} orders are billed"

    async def _kill_all(self) -> None:
        for process in (*self._workers, self._broker):
            await process.kill()


async def _timed(step: Awaitable[None]) -> float:
    """Await a step; returns how long it took, in seconds."""
    began_s = time.monotonic()
    await step
    return time.monotonic() - began_s
