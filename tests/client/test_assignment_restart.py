"""Stream consumers keep their segments when the broker is killed, whoever comes back first."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import magnetar
from tests.client.streams import send, stream
from tests.client.test_stream_consumer import Reading
from tests.support.assignments import Assigned, until_assigned
from tests.support.broker_process import running
from tests.support.effort import by_effort, draw_seed

SEGMENTS = 7
KILLS = by_effort(quick=2, whole=5, nightly=40)
LATEST_KILL_S = 0.2
LOCAL_NAME = "orders"
TOPIC = f"topic://public/default/{LOCAL_NAME}"


async def check_after_each_kill(
    directory: Path, segments: int, names: str, places: int
) -> Assigned:
    """Kill the broker again and again: each consumer keeps its segments, which are returned.

    Each consumer has a connection of its own; they come back in any order.
    """
    rng = random.Random(draw_seed())
    reading = Reading()
    async with running(directory) as broker, AsyncExitStack() as opened:
        await broker.create_scalable(LOCAL_NAME, segments)
        for name in names:
            url = f"pulsar://127.0.0.1:{broker.port}"
            client = await opened.enter_async_context(magnetar.connect(url))
            consumer = await opened.enter_async_context(stream(client, TOPIC, name))
            reading.begin(consumer)
        had = await until_assigned(broker, LOCAL_NAME, len(names), places)
        sent = await send(client, TOPIC, 0, 2)
        await reading.until_all(sent)
        for turn in range(1, KILLS + 1):
            await asyncio.sleep(LATEST_KILL_S * rng.random())
            broker.kill()
            await broker.start()
            now = await until_assigned(broker, LOCAL_NAME, len(names), places)
            assert now == had, f"after kill {turn}"
            sent += await send(client, TOPIC, 2 * turn, 2)
            await reading.until_all(sent)
        await reading.end()
    reading.check_order()
    return had


@pytest.mark.magnetar_only("its broker is killed here, and is Magnetar")
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_consumers_have_what_they_had_after_each_kill(tmp_path: Path) -> None:
    had = await check_after_each_kill(tmp_path, SEGMENTS, "dbca", places=SEGMENTS)
    assert had != dealt_by_name(), "it would be the same without the stored assignment"


@pytest.mark.magnetar_only("its broker is killed here, and is Magnetar")
@pytest.mark.timeout(120 + 20 * KILLS)
async def test_sharers_have_what_they_had_after_each_kill(tmp_path: Path) -> None:
    """Five consumers of two segments with two entry buckets each: one has none."""
    await check_after_each_kill(tmp_path, 2, "edbca", places=4)


@pytest.mark.magnetar_only("its broker is killed here, and is Magnetar")
async def test_a_kill_in_the_middle_of_a_join_leaves_no_segment_without_consumer(
    tmp_path: Path,
) -> None:
    rng = random.Random(draw_seed())
    reading = Reading()
    async with running(tmp_path) as broker, AsyncExitStack() as opened:
        await broker.create_scalable(LOCAL_NAME, SEGMENTS)
        url = f"pulsar://127.0.0.1:{broker.port}"
        for count, name in enumerate("dbca", start=1):
            client = await opened.enter_async_context(magnetar.connect(url))
            joining = asyncio.ensure_future(opened.enter_async_context(stream(client, TOPIC, name)))
            await asyncio.wait((joining,), timeout=LATEST_KILL_S * rng.random())
            broker.kill()
            await broker.start()
            reading.begin(await joining)
            had = await until_assigned(broker, LOCAL_NAME, count, SEGMENTS)
            assert max(map(len, had.values())) - min(map(len, had.values())) <= 1
        sent = await send(client, TOPIC, 0, 4)
        await reading.until_all(sent)
        await reading.end()
    reading.check_order()


def dealt_by_name() -> Assigned:
    """Pulsar's assignment, which is made of the names alone."""
    return {name: list(range(n, SEGMENTS, 4)) for n, name in enumerate("abcd")}
