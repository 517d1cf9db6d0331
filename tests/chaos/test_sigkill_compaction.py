"""SIGKILL while a topic is compacted: readers find the newest value of each key, every time."""

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import to_wire
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import POLL_S, until

NAME = "persistent://public/default/killed"
PATH = "/persistent/public/default/killed"
KEYS = 300
ROUND = 3000
"""Messages between two kills; compacting them takes some 0.5 s."""
LONGEST_S = 0.8
KILLS = by_effort(quick=2, whole=3, nightly=30)
SETTINGS = {"ledger_max_entries": 500, "ledger_min_age_s": 0, "entry_cache_bytes": 0}


async def send(broker: BrokerProcess, rng: random.Random, values: dict[str, bytes]) -> None:
    """Send messages of random keys, some of which delete their key; notes them in `values`."""
    client = await broker.connect()
    producer = await client.create_producer(NAME)
    receipts: list[object] = []
    for number in range(ROUND):
        key = f"k{rng.randrange(KEYS)}"
        value = b"" if rng.random() < 0.1 else b"%d" % number
        sequence, frame = producer.frame(value, metadata=pb.MessageMetadata(partition_key=key))
        producer.send_frame(sequence, frame, receipts.append)
        values.pop(key, None)
        if value:
            values[key] = value
    await until(lambda: len(receipts) == ROUND)
    await client.close()


async def read(broker: BrokerProcess) -> dict[str, bytes]:
    """The values that a compacted reader has, up to the last message."""
    client = await broker.connect()
    options = pb.CommandSubscribe(read_compacted=True, durable=False)
    options.start_message_id.CopyFrom(pb.MessageIdData(ledger_id=to_wire(-1), entry_id=to_wire(-1)))
    reader = await client.subscribe(NAME, "r", options, permits=100_000)
    last = (await reader.last_message_id()).last_message_id
    found: dict[str, bytes] = {}
    while True:
        delivery = await reader.receive()
        found.pop(delivery.metadata.partition_key, None)
        if delivery.payload:
            found[delivery.metadata.partition_key] = delivery.payload
        place = delivery.message_id
        if (place.ledger_id, place.entry_id) >= (last.ledger_id, last.entry_id):
            break
    await client.close()
    return found


async def compact(broker: BrokerProcess) -> str:
    status, answer = await broker.rest("PUT", f"{PATH}/compaction")
    assert status == 204, answer
    while True:
        _, shown = await broker.rest("GET", f"{PATH}/compaction")
        assert isinstance(shown, dict)
        if shown["status"] != "RUNNING":
            return str(shown["status"])
        await asyncio.sleep(POLL_S)


@pytest.mark.timeout(600)
async def test_sigkill_during_compactions(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    values: dict[str, bytes] = {}
    async with running(tmp_path, SETTINGS) as broker:
        for _ in range(KILLS):
            await send(broker, rng, values)
            asyncio.get_running_loop().call_later(rng.uniform(0.0, LONGEST_S), broker.kill)
            try:
                await compact(broker)
            except aiohttp.ClientError:
                pass
            await until(lambda: not broker.running)
            await broker.start()
            assert await read(broker) == values
        assert await compact(broker) == "SUCCESS"
        assert await read(broker) == values
        _, ledgers = await broker.rest("GET", f"{PATH}/internalStats")
        assert isinstance(ledgers, dict)
        assert ledgers["compactedLedger"]["entries"] == len(values)
        assert not broker.faults()
