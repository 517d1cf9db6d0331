"""Processes that share a transaction key, as tests drive them, and what a late one may be told.

Rules: a process that was paused goes on where it was; none is left behind.
"""

import asyncio
import os
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import magnetar
from tests.support.broker_process import ROOT
from tests.support.json_line_process import JsonLineProcess

ANSWER_S: Final = 120
INPUT: Final = ("a", "b", "c", "d")
FENCED: Final = {"ExpiredTransaction", "TransactionKeyFenced"}
LATE: Final = {"commit": FENCED, "send": FENCED | {"NotAllowed"}, "begin": FENCED}
"""What the one that was paused asks for when it wakes, and what it may be told.  Whoever owns a
segment knows nothing of keys: it refuses a message because its transaction has ended."""
LAST: Final = "the last"


class WorkerProcess:
    """`key_worker`, as a process that can be paused."""

    def __init__(self, name: str, directory: Path) -> None:
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = JsonLineProcess(
            name,
            [sys.executable, "-m", "tests.client.key_worker"],
            directory / f"{name}.log",
            on_line=self._lines.put,
            on_end=lambda: self._lines.put(None),
        )

    def tell(self, do: str, **given: object) -> None:
        """Say what is next; the answer is taken by `answer`."""
        self._process.write({"do": do, **given})

    async def answer(self) -> dict[str, Any]:
        line = await asyncio.to_thread(self._lines.get, True, ANSWER_S)
        assert line is not None, "the worker has ended"
        return line

    async def ask(self, do: str, **given: object) -> object:
        """What the step gives; it must succeed."""
        self.tell(do, **given)
        answer = await self.answer()
        assert "ok" in answer, (do, answer)
        return answer["ok"]

    async def refusal(self, do: str, **given: object) -> str:
        """The error of a step that must fail."""
        self.tell(do, **given)
        answer = await self.answer()
        assert "error" in answer, (do, answer)
        return str(answer["error"])

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def two_workers(directory: Path) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """Both run; each test has to set them up."""
    os.chdir(ROOT)
    started: list[WorkerProcess] = []
    try:
        started.append(WorkerProcess("first", directory))
        started.append(WorkerProcess("second", directory))
        yield started[0], started[1]
    finally:
        for worker in started:
            worker.resume()
            worker.kill()


async def everything_in(client: magnetar.Client, topic: str) -> list[str]:
    """What a reader sees of a topic of one segment, up to a message that is sent now."""
    async with client.producer(topic, schema=str) as producer:
        await producer.send(LAST)
    found: list[str] = []
    async with client.queue_consumer(
        topic, "audit", schema=str, initial_position="earliest"
    ) as consumer:
        while True:
            message = await consumer.receive(timeout_s=ANSWER_S)
            await consumer.ack(message)
            if message.value == LAST:
                return sorted(found)
            found.append(message.value)
