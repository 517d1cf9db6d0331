"""Two processes share a transaction key: the one that was paused does no harm when it wakes.

The first consumes, transforms and produces, is stopped by SIGSTOP in the middle of its transaction,
and woken when the second has opened the key, done all the work and finished.  The same with SIGKILL
of the broker between any two steps.
"""

import asyncio
import os
import queue
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import pytest

import magnetar
from tests.support.broker_process import ROOT, BrokerProcess
from tests.support.json_line_process import JsonLineProcess

pytestmark = pytest.mark.magnetar_only

ANSWER_S: Final = 60
INPUT: Final = ("a", "b", "c", "d")
FENCED: Final = {"ExpiredTransaction", "TransactionKeyFenced"}
LATE: Final = {"commit": FENCED, "send": FENCED | {"NotAllowed"}, "begin": FENCED}
"""What the one that was paused asks for when it wakes, and what it may be told.  Whoever owns a
segment knows nothing of keys: it refuses a message because its transaction has ended."""
QUIET_S: Final = 0.5
STEPS: Final = (
    "first opens",
    "first begins",
    "first works",
    "second opens",
    "second begins",
    "second works",
    "second commits",
)


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


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, ...]]:
    """Two of them, for all tests: each sets them up anew."""
    os.chdir(ROOT)
    directory = tmp_path_factory.mktemp("workers")
    started = [WorkerProcess(name, directory) for name in ("first", "second")]
    yield tuple(started)
    for worker in started:
        worker.kill()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One that is killed and started again in place."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.kill()


@pytest.fixture
async def client(broker: BrokerProcess) -> AsyncIterator[magnetar.Client]:
    if not broker.running:
        await broker.start()
    async with magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client:
        yield client


async def new_topic(broker: BrokerProcess, what: str) -> str:
    name = f"{what}-{uuid.uuid4().hex[:8]}"
    status, answer = await broker.rest("PUT", f"/scalable/public/default/{name}", body={})
    assert status == 204, answer
    return f"topic://public/default/{name}"


@pytest.mark.parametrize(
    ("killed_after", "late"), list(zip((None, None, None, *STEPS), cycle(LATE), strict=False))
)
async def test_a_zombie_does_no_harm(
    client: magnetar.Client,
    broker: BrokerProcess,
    workers: tuple[WorkerProcess, WorkerProcess],
    killed_after: str | None,
    late: str,
) -> None:
    first, second = workers
    source, sink = await new_topic(broker, "source"), await new_topic(broker, "sink")
    async with client.producer(source, schema=str) as producer:
        for value in INPUT:
            await producer.send(value)
    url, key = f"pulsar://127.0.0.1:{broker.port}", f"job-{uuid.uuid4().hex[:8]}"
    for worker in workers:
        await worker.ask("setup", url=url, source=source, sink=sink, key=key)

    async def after(name: str) -> None:
        if name == killed_after:
            broker.kill()
            await broker.start()

    await first.ask("open")
    await after("first opens")
    await first.ask("begin")
    await after("first begins")
    await first.ask("work", count=2)
    # What it might fetch ahead from a new broker would stay with it until its connection is missed.
    first.pause()
    try:
        await after("first works")
        await second.ask("open")
        await after("second opens")
        await second.ask("begin")
        await after("second begins")
        await second.ask("work", count=len(INPUT))
        await after("second works")
        await second.ask("commit")
        await after("second commits")
    finally:
        first.resume()
    assert await first.refusal(late) in LATE[late]
    for request in LATE:
        await first.refusal(request)
    assert await everything_in(client, sink) == sorted(value.upper() for value in INPUT)


async def everything_in(client: magnetar.Client, topic: str) -> list[str]:
    """What a reader sees of it, up to the end."""
    found = []
    async with client.queue_consumer(
        topic, "audit", schema=str, initial_position="earliest"
    ) as consumer:
        try:
            while True:
                message = await consumer.receive(timeout_s=QUIET_S if found else ANSWER_S)
                found.append(message.value)
                await consumer.ack(message)
        except TimeoutError:
            return sorted(found)
