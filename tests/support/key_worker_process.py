"""Processes that share transaction keys, as tests drive them, and what a late one may be told.

Rules: a process that was paused goes on where it was; none is left behind.
"""

import asyncio
import os
import queue
import signal
import sys
from collections.abc import Iterator, Sequence
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
        self.name = name
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = JsonLineProcess(
            name,
            [sys.executable, "-m", "tests.support.key_worker", name],
            directory / f"{name}.log",
            on_line=self._lines.put,
            on_end=lambda: self._lines.put(None),
        )

    async def set_up(self, job: str, url: str, source: str, sink: str) -> None:
        """Take part in the job, whose key is its name."""
        await self._ask("setup", job, url=url, source=source, sink=sink, key=job)

    async def take(self, step: str, job: str, count: int) -> Any:  # noqa: ANN401
        """Take a step, which must succeed; return its result.  `work` handles `count` inputs."""
        return await self._ask(step, job, **({"count": count} if step == "work" else {}))

    async def refusal(self, do: str, job: str) -> str:
        """Take a step, which must fail, and return its error."""
        answer = await self._answer(do, job, {})
        assert "error" in answer, (do, job, answer)
        return str(answer["error"])

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    async def _ask(self, do: str, job: str, **given: object) -> Any:  # noqa: ANN401
        answer = await self._answer(do, job, given)
        assert "ok" in answer, (do, job, answer)
        return answer["ok"]

    async def _answer(self, do: str, job: str, given: dict[str, object]) -> dict[str, Any]:
        self._process.write({"do": do, "job": job, **given})
        line = await asyncio.to_thread(self._lines.get, True, ANSWER_S)
        assert line is not None, f"{self.name} has ended"
        return line


@contextmanager
def workers(directory: Path, *names: str) -> Iterator[Sequence[WorkerProcess]]:
    """Run the workers while the block lasts; each job has to be set up."""
    os.chdir(ROOT)
    started: list[WorkerProcess] = []
    try:
        started.extend(WorkerProcess(name, directory) for name in names)
        yield started
    finally:
        for worker in started:
            worker.resume()
            worker.kill()


def written_by(worker: str) -> list[str]:
    """Return what a reader sees of a job that this worker did, whole and once."""
    return sorted(f"{value.upper()} by {worker}" for value in INPUT)


async def put_input(client: magnetar.Client, source: str) -> None:
    """Send the input of one job."""
    async with client.producer(source, schema=str) as producer:
        for value in INPUT:
            await producer.send(value)


async def everything_in(client: magnetar.Client, topic: str) -> list[str]:
    """Read a topic of one segment up to a message that is sent now."""
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
