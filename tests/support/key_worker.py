"""A process that consumes, transforms and produces under transaction keys, a step at a time.

Rules: it does any number of jobs, each with a client of its own.  It is told each step of a job in
a line of JSON, `{"do": step, "job": name, ...}`, and answers with one line: `{"ok": ...}` or
`{"error": class name, "text": ...}`.  What it writes ends with its own name, its one argument.
"""

import asyncio
import json
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any, Final

import magnetar

RECEIVE_S: Final = 90
"""What a paused process fetched ahead stays with it until its connection is missed."""
TRANSACTION_S: Final = 300
SUBSCRIPTION: Final = "workers"

Request = dict[str, Any]


class Job:
    """What it holds of one between two steps."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._stack = AsyncExitStack()

    async def setup(self, url: str, source: str, sink: str, key: str) -> None:
        """A client, a consumer of `source`, a producer for `sink`."""
        self._key_name, self._sink = key, sink
        self._client = await self._stack.enter_async_context(magnetar.connect(url))
        self._consumer = await self._client.queue_consumer(
            source,
            SUBSCRIPTION,
            schema=str,
            initial_position="earliest",
            receiver_queue_size=1,
        )
        self._producer = await self._client.producer(sink, schema=str)

    async def open(self) -> tuple[int, bool | None]:
        """A new epoch of the key, and whether the last transaction before it was committed."""
        self._key = await self._client.transaction_key(self._key_name)
        last = self._key.last_transaction
        return self._key.epoch, None if last is None else last.committed

    async def begin(self) -> tuple[int, int]:
        """A transaction under it."""
        self._transaction = await self._client.transaction(timeout_s=TRANSACTION_S, key=self._key)
        return self._transaction.id

    async def join(self) -> None:
        """Say where it is going to write, and write nothing."""
        (segment,) = (await self._client.layout(self._sink)).active
        told = self._transaction.writing_to(segment.topic)
        assert told is not None
        await told

    async def work(self, count: int) -> None:
        """Take that many, write each transformed, acknowledge each, all in the transaction."""
        for _ in range(count):
            message = await self._consumer.receive(timeout_s=RECEIVE_S)
            value = f"{message.value.upper()} by {self._worker}"
            await self._producer.send(value, transaction=self._transaction)
            await self._consumer.ack(message, transaction=self._transaction)

    async def send(self) -> None:
        """Write in the transaction."""
        await self._producer.send("late", transaction=self._transaction)

    async def commit(self) -> None:
        """End the transaction."""
        await self._transaction.commit()

    async def leave(self) -> None:
        """Close everything."""
        await self._stack.aclose()


async def answer(job: Job, request: Request) -> Request:
    """What a step gave."""
    try:
        step = getattr(job, request.pop("do"))
        return {"ok": await step(**request)}
    except (magnetar.MagnetarError, TimeoutError) as error:
        return {"error": type(error).__name__, "text": str(error)}


async def main() -> None:
    jobs = defaultdict[str, Job](lambda: Job(sys.argv[1]))
    print(json.dumps({"event": "serving"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        print(json.dumps(await answer(jobs[request.pop("job")], request)), flush=True)
    for job in jobs.values():
        await job.leave()


if __name__ == "__main__":
    asyncio.run(main())
