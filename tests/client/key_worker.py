"""A process that consumes, transforms and produces under a transaction key, a step at a time.

Rules: it is told each step in a line of JSON, `{"do": step, ...}`, and answers with one line:
`{"ok": ...}` or `{"error": class name, "text": ...}`.  `setup` ends what it had before.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any, Final

import magnetar

RECEIVE_S: Final = 90
"""What a paused process fetched ahead stays with it until its connection is missed."""
TRANSACTION_S: Final = 300
SUBSCRIPTION: Final = "workers"

Request = dict[str, Any]


class Worker:
    """What it holds between two steps."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    async def setup(self, url: str, source: str, sink: str, key: str) -> None:
        """A client, a consumer of `source`, a producer for `sink`."""
        await self._stack.aclose()
        self._key_name = key
        self._client = await self._stack.enter_async_context(magnetar.connect(url))
        self._consumer = await self._client.queue_consumer(
            source,
            SUBSCRIPTION,
            schema=str,
            initial_position="earliest",
            receiver_queue_size=1,
        )
        self._producer = await self._client.producer(sink, schema=str)

    async def open(self) -> int:
        """A new epoch of the key."""
        self._key = await self._client.transaction_key(self._key_name)
        return self._key.epoch

    async def begin(self) -> str:
        """A transaction under it."""
        self._transaction = await self._client.transaction(timeout_s=TRANSACTION_S, key=self._key)
        return str(self._transaction.id)

    async def work(self, count: int) -> list[str]:
        """Take that many, write each transformed, acknowledge each, all in the transaction."""
        taken = []
        for _ in range(count):
            message = await self._consumer.receive(timeout_s=RECEIVE_S)
            await self._producer.send(message.value.upper(), transaction=self._transaction)
            await self._consumer.ack(message, transaction=self._transaction)
            taken.append(message.value)
        return taken

    async def send(self) -> None:
        """Write in the transaction."""
        await self._producer.send("late", transaction=self._transaction)

    async def commit(self) -> None:
        """End the transaction."""
        await self._transaction.commit()

    async def leave(self) -> None:
        """Close everything."""
        await self._stack.aclose()


async def answer(worker: Worker, request: Request) -> Request:
    """What a step gave."""
    try:
        step = getattr(worker, request.pop("do"))
        return {"ok": await step(**request)}
    except (magnetar.MagnetarError, TimeoutError) as error:
        return {"error": type(error).__name__, "text": str(error)}


async def main() -> None:
    worker = Worker()
    print(json.dumps({"event": "serving"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(worker, json.loads(line))), flush=True)
    await worker.leave()


if __name__ == "__main__":
    asyncio.run(main())
