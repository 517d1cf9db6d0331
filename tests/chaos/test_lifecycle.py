"""Start and stop of the process: what drains, what is refused, and in which words."""

import asyncio
import signal
import socket
import time
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.chaos.audit import read_everything
from tests.chaos.steady_producer import SteadyProducer, position_of
from tests.support.broker_process import BrokerProcess, running
from tests.support.child_process import HOST

TOPIC = "persistent://public/default/letters"
SUBSCRIPTION = "readers"
FROM_THE_FIRST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)


async def refused(broker: BrokerProcess) -> str:
    """Start a broker that must not come up; returns its one sentence."""
    broker.spawn()
    try:
        status = await broker.ended()
    finally:
        broker.kill()
    assert status == 1
    text = broker.log(this_run=True)
    assert "Traceback" not in text
    (sentence,) = [line for line in text.splitlines() if line.startswith("magnetar: ")]
    return sentence


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_with_clients_connected(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Receipts given are kept, acknowledgements too, even those that nobody waited for."""
    stop = asyncio.Event()
    async with running(tmp_path, {"cursor_flush_ms": 60_000}) as broker:
        client = await broker.connect()
        consumer = await client.subscribe(TOPIC, SUBSCRIPTION, FROM_THE_FIRST, permits=100)
        busy = await broker.connect()
        producer = SteadyProducer(TOPIC, 1)
        producing = asyncio.create_task(producer.produce(busy, stop))
        taken = [await consumer.receive() for _ in range(100)]
        consumer.ack(*(delivery.message_id for delivery in taken))
        await client.ping()
        status = await broker.signalled(number)
        assert status == 0
        await client.wait_closed()
        await busy.wait_closed()
        with pytest.raises(ConnectionError):
            await producing
        assert not broker.faults()

        await broker.start()
        client = await broker.connect()
        consumer = await client.subscribe(TOPIC, SUBSCRIPTION, FROM_THE_FIRST, permits=1)
        position = position_of((await consumer.receive()).message_id)
        assert position > position_of(taken[-1].message_id)
        await consumer.close()
        stored = dict(await read_everything(broker, TOPIC, SUBSCRIPTION))
        for sequence, place in producer.receipts.items():
            assert place < position or stored[place] == [(1, sequence)]
        assert len(producer.receipts) >= 100


async def test_the_health_check_and_the_banner_come_with_service(tmp_path: Path) -> None:
    started = time.monotonic()
    async with running(tmp_path) as broker:
        client = await broker.connect()
        await client.ping()
        print(f"start to first served connection: {time.monotonic() - started:.2f} s")
        assert await broker.rest("GET", "/brokers/health") == (200, "ok")
        banner = broker.log(this_run=True)
        assert str(broker.data_dir) in banner
        assert f"pulsar://{HOST}:{broker.port}" in banner
        await client.close()
        assert await broker.terminate() == 0


async def test_a_second_process_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "first") as first:
        second = BrokerProcess(tmp_path / "second")
        second.data_dir = first.data_dir
        sentence = await refused(second)
        assert str(first.data_dir) in sentence
        assert str(first.pid) in sentence
        client = await first.connect()
        await client.ping()
        first.kill()
        await second.start()
        second.kill()


async def test_a_newer_data_format_is_refused_by_its_number(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        assert await broker.terminate() == 0
        label = broker.data_dir / "FORMAT"
        label.write_text(label.read_text().replace(" 1", " 7"))
        before = {path: path.read_bytes() for path in broker.data_dir.rglob("*") if path.is_file()}
        sentence = await refused(broker)
        assert "7" in sentence
        assert str(broker.data_dir) in sentence
        after = {path: path.read_bytes() for path in broker.data_dir.rglob("*") if path.is_file()}
        assert {**after, broker.data_dir / "LOCK": b""} == {**before, broker.data_dir / "LOCK": b""}


@pytest.mark.parametrize("which", ["port", "http_port"])
async def test_a_port_in_use_is_said(tmp_path: Path, which: str) -> None:
    broker = BrokerProcess(tmp_path)
    with socket.socket() as holder:
        holder.bind((HOST, getattr(broker, which)))
        holder.listen()
        sentence = await refused(broker)
        assert f"{getattr(broker, which)}" in sentence
        assert f"--{which.replace('_', '-')}" in sentence
    async with running(tmp_path) as again:
        assert again.running, "the refused start must leave the data directory usable"


async def test_a_client_in_the_handshake_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        reader, writer = await asyncio.open_connection(HOST, broker.port)
        writer.write(b"\0\0\0\x10")
        await writer.drain()
        client = await broker.connect()
        waiting = asyncio.create_task(client.wait_closed())
        assert await broker.terminate() == 0
        await waiting
        assert await reader.read() == b""
        writer.close()
