"""Sequence ids of programs over splits and merges, where brokers deduplicate."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

import magnetar
from tests.client.conftest import MakeTopic, Service, Topic, rest
from tests.client.test_produce import stored, values

KEYS = 16
pytestmark = pytest.mark.magnetar_only("each of its segments counts by itself")


@pytest.fixture(autouse=True)
async def _deduplication(service: Service) -> AsyncIterator[None]:
    path = "/namespaces/public/default/deduplication"
    status, answer = await rest(service, "POST", path, body=True)
    assert status == 204, answer
    yield
    await rest(service, "POST", path, body=False)


async def change_layout(topic: Topic) -> None:
    """Split twice, and merge in another way than was split."""
    for _ in range(2):
        await topic.split((await topic.active_by_range())[0])
        await asyncio.sleep(0.1)
    _, second, third = await topic.active_by_range()
    await topic.merge(second, third)
    await asyncio.sleep(0.1)
    await topic.merge(*await topic.active_by_range())


async def send(producer: magnetar.Producer[bytes], numbers: range, pause_s: float) -> None:
    for number in numbers:
        await producer.room()
        producer.send_nowait(b"%d" % number, key=f"k{number % KEYS}", sequence_id=number)
        await asyncio.sleep(pause_s)
    await producer.flush()


@pytest.mark.parametrize("batching", [False, True], ids=["single", "batches"])
@pytest.mark.parametrize("changes", ["between", "meanwhile", "after"])
async def test_program_that_sends_all_again_stores_nothing_twice(
    client: magnetar.Client, topic: MakeTopic, service: Service, changes: str, batching: bool
) -> None:
    made = await topic()
    first = client.producer(made.name, name="robot", batching=batching)
    async with first as producer, asyncio.TaskGroup() as tasks:
        if changes == "meanwhile":
            tasks.create_task(change_layout(made))
        await send(producer, range(400), 0.002)
        if changes == "between":
            await change_layout(made)
            await send(producer, range(400, 450), 0)
    if changes == "after":
        await change_layout(made)
    async with (
        magnetar.connect(service.url) as other,
        other.producer(made.name, name="robot", batching=batching) as producer,
    ):
        assert producer.last_sequence_id == (449 if changes == "between" else 399)
        await send(producer, range(500), 0)
    found = Counter(values(await stored(client, made.name, 500)))
    assert found == Counter(b"%d" % number for number in range(500))
