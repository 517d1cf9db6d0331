"""Two processes share a transaction key: the one that was paused does no harm when it wakes.

The first consumes, transforms and produces, is stopped by SIGSTOP in the middle of its transaction,
and woken when the second has opened the key, done all the work and finished.  The same with SIGKILL
of the broker between any two steps.
"""

import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import cycle
from typing import Final

import pytest

import magnetar
from tests.client.key_worker_process import (
    INPUT,
    LATE,
    WorkerProcess,
    everything_in,
    two_workers,
)
from tests.support.broker_process import BrokerProcess

pytestmark = pytest.mark.magnetar_only("it has no transaction keys")

STEPS: Final = (
    "first opens",
    "first begins",
    "first works",
    "second opens",
    "second begins",
    "second works",
    "second commits",
)


@pytest.fixture(scope="module")
def workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """For all tests: each sets them up anew."""
    with two_workers(tmp_path_factory.mktemp("workers")) as started:
        yield started


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
    await broker.create_scalable(name, 1)
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
