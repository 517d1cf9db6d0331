"""SIGKILL between the receipts of a replicator's messages and the next snapshot of positions."""

from pathlib import Path
from typing import Final

import pytest

from magnetar.protocol.ids import Position
from tests.support.broker_process import running
from tests.support.raw_client import RawClient
from tests.support.raw_replicator import BY_POSITION, RawReplicator

TOPIC: Final = "persistent://public/default/t"
COUNT: Final = 50
AGAIN: Final = 20


async def payloads(client: RawClient, count: int) -> list[int]:
    consumer = await client.subscribe(TOPIC, "s", permits=count + AGAIN)
    found = [int((await consumer.receive()).payload) for _ in range(count)]
    await client.ping()
    assert consumer.messages.empty()
    return found


@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("epoch", [0, 1], ids=["new replicator", "reconnected"])
async def test_what_a_replicator_sends_again_is_stored_once(
    tmp_path: Path, epoch: int, by_position: bool
) -> None:
    connect = BY_POSITION if by_position else None

    async def send(replicator: RawReplicator, number: int) -> bool:
        source = Position(3, number)
        metadata = replicator.metadata(f"3:{number}", f"origin-{number % 3}", number)
        expected = source if by_position else None
        return await replicator.send(metadata, expected, payload=b"%d" % number)

    async with running(tmp_path, {"deduplication": True}) as broker:
        client = await broker.connect(connect)
        await client.subscribe(TOPIC, "s")
        replicator = await RawReplicator.open(client, TOPIC)
        assert all([await send(replicator, number) for number in range(COUNT)])
        broker.kill()
        await broker.start()
        client = await broker.connect(connect)
        replicator = await RawReplicator.open(client, TOPIC, epoch=epoch)
        again = [await send(replicator, number) for number in range(COUNT - AGAIN, COUNT + 1)]
        assert again == [False] * AGAIN + [True]
        assert await payloads(client, COUNT + 1) == list(range(COUNT + 1))
