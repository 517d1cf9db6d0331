"""Starting, draining, stopping."""

import asyncio
import socket
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.scalable.records import topic_path
from broker.topics.topic import TopicUnavailable
from broker.wire.listening import CannotListen
from config import bounds
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import LedgerId
from magnetar.protocol.names import parse_topic_name
from storage.data_directory import DataDirectory, DataDirectoryInUse
from storage.ledger.local.local_ledger import LocalWritableLedger
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import AppendCallback, LedgerBusy, LedgerError
from storage.managed_ledger.records import NAMES_INDEX
from storage.metadata.store import IndexEntry
from tests.support.bounds import set_bound
from tests.support.clocks import FakeClock
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient

TOPIC = "persistent://public/default/t"


async def test_acknowledgements_survive_a_drain(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        consumer = await client.subscribe(TOPIC, "s", permits=100)
        producer = await client.create_producer(TOPIC)
        for _ in range(20):
            await producer.send(b"x")
        got = [await consumer.receive() for _ in range(20)]
        consumer.ack(got[14].message_id, cumulative=True)
        await client.ping()
        await broker.drain()
        assert not broker.serving
        await client.wait_closed()
        with pytest.raises(TopicUnavailable):
            await broker.topics.get(parse_topic_name(TOPIC), create=True)
    async with running(tmp_path) as broker:
        topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
        assert topic.subscriptions["s"].backlog == 5
        assert topic.sequence_store.unsaved_entries == 0


async def test_receipts_in_flight_leave_before_the_connection_does(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer(TOPIC)
        answers: list[object] = []
        for _ in range(200):
            producer.send_frame(*producer.frame(b"x" * 2000), answers.append)
        await client.ping()
        await broker.drain()
        await client.wait_closed()
        assert len(answers) == 200


async def test_a_port_that_is_taken_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CannotListen, match="for clients is in use"):
            async with running(tmp_path, port=taken.getsockname()[1]):
                pass
    DataDirectory.open(tmp_path).close()


async def test_a_data_directory_has_one_broker(broker: Broker) -> None:
    with pytest.raises(DataDirectoryInUse):
        async with running(broker.settings.data_dir):
            pass
    client = await RawClient.open("127.0.0.1", broker.port)
    await client.ping()
    await client.close()


async def test_health_is_a_write_to_both_stores(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.check_health()

    def fails(_ledger: object, entry: bytes, done: object) -> int:
        raise LedgerError("The disk is gone: mend it.")

    monkeypatch.setattr(LocalWritableLedger, "append", fails)
    with pytest.raises(LedgerError):
        await broker.check_health()
    monkeypatch.undo()
    await broker.check_health()


async def test_a_busy_store_does_not_cost_the_health_check_its_ledger(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.check_health()
    before = await broker._stores.ledgers.list_ledgers()  # type: ignore[union-attr]

    def refuses(_ledger: object, entry: bytes, done: object) -> int:
        raise LedgerBusy("Wait.")

    monkeypatch.setattr(LocalWritableLedger, "append", refuses)
    with pytest.raises(LedgerBusy):
        await broker.check_health()
    monkeypatch.undo()
    await broker.check_health()
    assert await broker._stores.ledgers.list_ledgers() == before  # type: ignore[union-attr]


async def test_the_health_check_replaces_a_ledger_before_it_looks_like_an_orphan(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.check_health()
    before = await broker._stores.ledgers.list_ledgers()  # type: ignore[union-attr]
    now_ms = broker.clock.now_ms()
    monkeypatch.setattr(
        broker._health, "_clock", FakeClock(now_ms + bounds.LEDGER_NAMING_MS - 5000)
    )
    await broker.check_health()
    assert await broker._stores.ledgers.list_ledgers() == before  # type: ignore[union-attr]
    monkeypatch.setattr(broker._health, "_clock", FakeClock(now_ms + bounds.LEDGER_NAMING_MS))
    await broker.check_health()
    after = await broker._stores.ledgers.list_ledgers()  # type: ignore[union-attr]
    assert (len(after), set(after) & set(before)) == (len(before), set(before[:-1]))


async def test_health_checks_keep_one_ledger_that_does_not_grow_and_ends_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "HEALTH_LEDGER_ENTRIES", 2)
    written: list[int] = []
    append = LocalWritableLedger.append

    def counted(ledger: LocalWritableLedger, entry: bytes, done: AppendCallback) -> int:
        written.append(ledger.ledger_id)
        return append(ledger, entry, done)

    monkeypatch.setattr(LocalWritableLedger, "append", counted)
    ledgers: list[LedgerId] = []
    delete = LocalLedgerStore.delete

    async def deleted(store: LocalLedgerStore, ledger_id: LedgerId) -> None:
        await delete(store, ledger_id)
        ledgers.extend(await store.list_ledgers())

    monkeypatch.setattr(LocalLedgerStore, "delete", deleted)
    async with running(tmp_path) as broker:
        for _ in range(5):
            await broker.check_health()
        await asyncio.gather(*(broker.check_health() for _ in range(10)))
        assert len(written) == 6
        assert [written.count(each) for each in dict.fromkeys(written)] == [2, 2, 2]
    assert ledgers == []


async def test_no_property_of_a_topic_keeps_a_broker_from_starting(tmp_path: Path) -> None:
    name = parse_topic_name("topic://public/default/t")
    properties = {NAMES_INDEX: "x", "magnetar:scalable-topics": "with-sealed-segments", "k": "v"}
    async with running(tmp_path) as broker:
        await broker.scalable.create(name, segments=1, properties=properties)
        # As earlier versions stored them.
        key = topic_path(name)
        record = await broker.metadata.get(key)
        assert record is not None
        entries = [IndexEntry(key, value) for key, value in properties.items()]
        await broker.metadata.put(key, record.value, indexes=entries)
    async with running(tmp_path) as broker:
        assert (await broker.scalable.get(name)).properties == properties
        for item in properties.items():
            found = await broker.scalable.list(name.namespace_name, dict([item]))
            assert found == [str(name)]


async def test_names_differ_between_starts(tmp_path: Path) -> None:
    names: list[str] = []
    for _ in range(2):
        async with running(tmp_path, cluster_name="here") as broker:
            client = await RawClient.open("127.0.0.1", broker.port)
            names += [(await client.create_producer(TOPIC)).name for _ in range(2)]
    assert names == ["here-0-0", "here-0-1", "here-1-0", "here-1-1"]


async def test_the_policy_of_a_namespace_decides_over_the_setting(tmp_path: Path) -> None:
    async with running(tmp_path, deduplication=True) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        options = pb.CommandProducer(producer_name="p")
        first = await client.create_producer(TOPIC, options)
        await first.send(b"x")
        await first.close()
        assert (await client.create_producer(TOPIC, options)).success.last_sequence_id == 0
