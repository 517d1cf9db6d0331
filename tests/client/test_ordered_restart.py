"""Everything that reads in order, when its broker (the controller too) is killed and comes back."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import magnetar
from magnetar.checkpoint import Checkpoint
from magnetar.layout_watch import LayoutWatch
from tests.client import test_checkpoint_consumer as checkpoints
from tests.client import test_namespace_consumer as namespaces
from tests.client.streams import WAIT_S, send, stream
from tests.client.test_stream_consumer import Reading
from tests.support.broker_process import BrokerProcess, running

TOPIC = "topic://public/default/orders"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    async with running(tmp_path) as process:
        await process.create_scalable("orders", 2)
        yield process


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    reading = Reading()
    yield reading
    await reading.end()


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_all_go_on_when_the_broker_was_killed_and_is_there_again(
    broker: BrokerProcess, reading: Reading
) -> None:
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client,
        stream(client, TOPIC, "one", subscription="two-of-them") as one,
        stream(client, TOPIC, "two", subscription="two-of-them") as two,
        checkpoints.reading(client, TOPIC) as alone,
        checkpoints.reading(client, TOPIC, Checkpoint.LATEST, group="group") as member,
        namespaces.stream(client, {}) as everywhere,
    ):
        watch = LayoutWatch(client.context, TOPIC)
        await watch.open(WAIT_S)
        for consumer in (one, two):
            reading.begin(consumer)
        sent = await send(client, TOPIC, 0, 2)
        await reading.until_all(sent)
        first = await checkpoints.read(alone, 5)
        broker.kill()
        await broker.start()
        sent += await send(client, TOPIC, 2, 2)
        status, _ = await broker.rest("POST", "/scalable/public/default/orders/split/0")
        assert status == 204
        sent += await send(client, TOPIC, 4, 2)
        await reading.until_all(sent)
        assert first | await checkpoints.read(alone, len(sent) - 5) == set(sent)
        assert await checkpoints.read(member, len(sent)) == set(sent)
        got: set[str] = set()
        while got != set(sent):
            message = await everywhere.receive(WAIT_S)
            got.add(message.value)
            await everywhere.ack(message)
        assert {segment.segment_id for segment in watch.layout.active} == {1, 2, 3}
        await watch.close()
    reading.check_order()
