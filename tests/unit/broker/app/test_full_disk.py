"""A full disk is the operator's error wherever it shows, and all works again with free space."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from storage.metadata.store import MetadataError
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient

TOPIC = "persistent://public/default/before"
OPERATORS = (pb.MetadataError, pb.PersistenceError)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which needs root."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
async def broker(small_disk: Path) -> AsyncIterator[Broker]:
    async with running(small_disk / "data", ledger_min_age_s=0) as broker:
        yield broker


def fill(disk: Path) -> Path:
    """Take all the space there is."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def refused(error: BrokerError) -> None:
    assert error.code in OPERATORS, error
    assert "disk" in error.message, error
    assert "bug" not in error.message, error
    assert "report" not in error.message.replace("reports", ""), error


async def test_every_request_names_the_full_disk_and_works_again(
    broker: Broker, small_disk: Path
) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    producer = await client.create_producer(TOPIC)
    consumer = await client.subscribe(TOPIC, "before", permits=100)
    await producer.send(b"kept")
    filler = fill(small_disk)
    # A write is tried again for a while before it fails.
    sending = asyncio.ensure_future(producer.send(bytes(20_000)))
    failed = 0
    for number in range(40):
        # Space inside of the files that are there lasts for a while.
        for request in (
            lambda n: client.subscribe(TOPIC, f"s{n}-{'x' * 200}"),
            lambda n: client.create_producer(f"persistent://public/default/new-{n}"),
            lambda n: client.subscribe(f"persistent://public/default/other-{n}", "s"),
        ):
            try:
                await request(number)
            except BrokerError as error:
                refused(error)
                failed += 1
    assert failed > 40
    filler.unlink()
    try:
        await sending
    except BrokerError as error:
        refused(error)
    await client.create_producer("persistent://public/default/after")
    await client.subscribe(TOPIC, "after")
    again = await client.create_producer(TOPIC)
    await again.send(b"again")
    assert (await consumer.receive()).payload == b"kept"
    assert not broker.damage.sentences()
    await client.close()


async def test_a_start_on_a_full_disk_names_it(small_disk: Path) -> None:
    async with running(small_disk / "data"):
        pass
    for name in ("ledgers.mark", "metadata/metadata.db.commit", "metadata/metadata.db.sums"):
        (small_disk / "data" / name).unlink(missing_ok=True)
    filler = fill(small_disk)
    with pytest.raises(MetadataError, match=r"the disk is full: free space|the disk failed"):
        async with running(small_disk / "data"):
            pass
    filler.unlink()
    async with running(small_disk / "data") as broker:
        assert not broker.damage.sentences()


async def test_free_space_is_a_metric(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as broker:
        text = await metrics_text(broker)
        lines = [line for line in text.splitlines() if line.startswith("magnetar_data_dir_free")]
        assert float(lines[0].rpartition(" ")[2]) > 0
