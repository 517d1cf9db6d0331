"""Offloading on a whole broker: REST, the command line, looks, and clients that notice nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from broker.admin.app import AdminServer
from broker.app.service import Broker
from broker.topics.offloading import OffloadNotConfigured, OffloadState, location_of
from broker.topics.topic import Topic
from config.settings import Settings
from magnetar.cli.main import build_app
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.message import parse_metadata, payload_of
from magnetar.protocol.names import parse_topic_name
from storage.ledger.local.local_store import LocalLedgerStore
from storage.offload.context import InvalidOffloadUrl, data_key
from storage.offload.errors import OffloadedDataCorrupt
from tests.support.commands import run_command
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawConsumer
from tests.support.waiting import until
from tests.unit.broker.topics.reads import Reads, place
from tests.unit.broker.transactions.conftest import TransactionClient
from tests.unit.broker.transactions.test_writes import send

TOPIC = "persistent://public/default/t"
SEGMENT = "segment://public/default/s/0000-ffff-0"
REST = "/admin/v2/persistent/public/default/t/offload"
SCALABLE = "/admin/v2/scalable/public/default/s"
SMALL: Mapping[str, object] = {
    "ledger_max_entries": 10,
    "ledger_min_age_s": 0,
    "entry_cache_bytes": 0,
    "offload_deletion_lag_s": -1,
    "retention_time_minutes": -1,
    "retention_size_mb": -1,
}


@dataclass
class Ground:
    """A broker, its REST interface, a client, and where copies are."""

    broker: Broker
    session: aiohttp.ClientSession
    url: str
    client: RawClient
    copies: Path

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        json = {} if body is None else {"json": body}
        async with self.session.request(method, self.url + path, **json) as answer:  # type: ignore[arg-type]
            text = await answer.text()
            return answer.status, await answer.json() if text else None

    async def get(self, path: str) -> dict[str, object]:
        status, answer = await self.call("GET", path)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    async def topic(self, name: str = TOPIC) -> Topic:
        return await self.broker.topics.get(parse_topic_name(name), create=False)

    async def publish(self, count: int, topic: str = TOPIC) -> None:
        producer = await self.client.create_producer(topic)
        for number in range(count):
            await producer.send(b"%d" % number)
        await producer.close()

    async def payloads(self, topic: str = TOPIC) -> list[bytes]:
        """As a new subscription gets them."""
        consumer = await self.subscribe(topic)
        entries = (await self.topic(topic)).ledger.entry_count
        consumer.flow(entries)
        found = [bytes(payload_of((await consumer.receive()).entry)) for _ in range(entries)]
        await consumer.unsubscribe()
        await consumer.close()
        return found

    async def subscribe(self, topic: str = TOPIC) -> RawConsumer:
        """A new subscription, from the first entry on."""
        options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
        return await self.client.subscribe(topic, f"s{self.client.next_id()}", options)

    async def done(self) -> Topic:
        """The topic, once nothing runs."""
        await until(lambda: not self.broker.offloads.running)
        return await self.topic()

    async def cli(self, *words: str) -> str:
        arguments = [*words, "--admin-url", self.url]
        result = await run_command(build_app("topics"), arguments)
        assert result.exit_code == 0, result.output
        return result.output


@asynccontextmanager
async def ground(tmp_path: Path, **settings: object) -> AsyncIterator[Ground]:
    copies = tmp_path / "copies"
    given = {**SMALL, "offload_url": f"file://{copies}", **settings}
    async with running(tmp_path / "data", **given) as broker:
        admin = AdminServer(broker)
        await admin.start()
        client = await RawClient.open("127.0.0.1", broker.port)
        try:
            async with aiohttp.ClientSession() as session:
                yield Ground(broker, session, f"http://127.0.0.1:{admin.port}", client, copies)
        finally:
            await client.close()
            await admin.stop()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Ground]:
    async with ground(tmp_path) as found:
        yield found


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_a_topic_is_offloaded_as_pulsars_tools_ask_for_it(here: Ground) -> None:
    await here.publish(35)
    ledgers = (await here.topic()).ledger.ledgers
    assert (await here.get(REST))["status"] == "NOT_RUN"
    body = {"ledgerId": ledgers[2].ledger_id, "entryId": 0, "partitionIndex": -1}
    assert await here.call("PUT", REST, body) == (204, None)
    topic = await here.done()
    assert await here.get(REST) == {
        "status": "SUCCESS",
        "lastError": "",
        "firstUnoffloadedMessage": body,
    }
    assert [info.offload is not None for info in topic.ledger.ledgers] == [True, True, False, False]
    stats = await here.get(REST.replace("/offload", "/internalStats"))
    listed = stats["ledgers"]
    assert isinstance(listed, list)
    assert [each["offloaded"] for each in listed] == [True, True, False, False]
    assert await here.call("POST", REST + "/dropHot", [ledgers[0].ledger_id]) == (
        200,
        [ledgers[0].ledger_id],
    )
    assert await here.payloads() == numbered(35)
    assert here.broker.managed_ledgers.cold.counters.opened > 0


async def test_the_manifest_tells_what_was_copied(here: Ground) -> None:
    await here.publish(15)
    await here.call("PUT", REST)
    await here.done()
    manifest = await here.get(REST + "/manifest")
    listed = manifest["ledgers"]
    assert isinstance(listed, list)
    first, second = listed
    assert (first["entries"], first["offloaded"], first["bookkeeperDeleted"]) == (10, True, False)
    assert first["url"] == here.broker.settings.offload_url
    for key in first["objects"]:
        assert (here.copies / key).is_file()
    assert (here.copies / first["objects"][0]).stat().st_size == first["dataBytes"]
    assert first["dataSha256"] != first["entriesSha256"]
    assert 0 < first["firstPublishTime"] <= first["lastPublishTime"]
    assert "url" not in second


async def test_a_sealed_segment_and_its_topic(here: Ground) -> None:
    await here.call("PUT", SCALABLE + "?numInitialSegments=1")
    await here.publish(25, SEGMENT)
    assert (await here.call("POST", SCALABLE + "/split/0"))[0] == 204
    below = f"{here.broker.settings.offload_url}/of%20s"
    assert await here.call("PUT", f"{SCALABLE}/offload?url={below}") == (200, [0, 1, 2])
    await until(lambda: not here.broker.offloads.running)
    segments = (await here.get(SCALABLE + "/offload/manifest"))["segments"]
    assert isinstance(segments, dict)
    assert [each["offloaded"] for each in segments["0"]["ledgers"]] == [True] * 3
    assert segments["0"]["sealed"]
    assert len(list((here.copies / "of s").iterdir())) == 6
    status, dropped = await here.call("POST", SCALABLE + "/offload/dropHot")
    assert status == 200
    assert isinstance(dropped, dict)
    assert {key: len(each) for key, each in dropped.items()} == {"0": 3, "1": 0, "2": 0}
    assert await here.payloads(SEGMENT) == numbered(25)
    assert (await here.call("DELETE", SCALABLE + "?force=true"))[0] == 204
    assert list((here.copies / "of s").iterdir()) == []


async def test_the_command_line(here: Ground) -> None:
    await here.publish(25)
    said = await here.cli("topics", "offload", TOPIC, "--wait")
    assert said.count("copied") == 2
    assert "being written" in said
    assert "Deleted 2 ledger(s)" in await here.cli("topics", "drop-hot", TOPIC)
    assert "copy only" in await here.cli("topics", "offload-status", TOPIC)
    await here.call("PUT", SCALABLE + "?numInitialSegments=2")
    assert "offload-status" in await here.cli("topics", "offload", "s")
    assert "segment://" in await here.cli("topics", "offload-status", "s")
    topic = await here.topic()
    orphan = data_key(
        here.broker.managed_ledgers.cold.new_context(location_of(here.broker.settings)).uid, 9
    )
    (here.copies / orphan).write_bytes(b"left")
    assert orphan in await here.cli("topics", "offload-orphans")
    assert "1 object(s) deleted" in await here.cli("topics", "offload-orphans", "--delete")
    assert "0 object(s)" in await here.cli("topics", "offload-orphans")
    assert len(topic.ledger.offload.copied()) == 2
    assert await here.payloads() == numbered(25)


async def test_refusals_name_what_to_do(here: Ground, tmp_path: Path) -> None:
    await here.publish(5)
    for body in ({"ledgerId": 3}, [1], {"ledgerId": "x", "entryId": 1}):
        status, answer = await here.call("PUT", REST, body)
        assert (status, "message id" in str(answer)) == (412, True)
    status, answer = await here.call("PUT", REST + "?url=file:///elsewhere")
    assert (status, "not below" in str(answer)) == (412, True)
    assert (await here.call("POST", REST + "/dropHot", {"a": 1}))[0] == 412
    async with ground(tmp_path / "other", offload_url="") as other:
        await other.publish(15)
        status, answer = await other.call("PUT", REST)
        assert (status, "set offload_url" in str(answer)) == (412, True)
        await other.broker.offloads.start_due_runs()
        assert not other.broker.offloads.running


@pytest.mark.parametrize(
    ("base", "url", "allowed"),
    [
        ("s3://b/p", "s3://b/p/q", True),
        ("s3://b/p", "s3://b/p", True),
        ("s3://b", "s3://b/any", True),
        ("s3://b/p", "s3://b/pq", False),
        ("s3://b/p", "s3://c/p", False),
        ("s3://b/p", "gs://b/p", False),
        ("s3://b/p", "s3://b/p/../q", False),
        ("/a/b", "/a/b/c", True),
        ("/a/b", "/a/bc", False),
        ("/a/b", "/a/b/../c", False),
        ("/a/b", "s3://b/p", False),
    ],
)
def test_cve_2024_27894_copies_stay_below_the_brokers_own_place(
    base: str, url: str, allowed: bool
) -> None:
    settings = Settings(offload_url=base)
    if allowed:
        location_of(settings, url)
    else:
        with pytest.raises(OffloadNotConfigured, match="not below"):
            location_of(settings, url)


async def test_a_broker_with_a_wrong_place_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidOffloadUrl, match="write s3://"):
        async with running(tmp_path, offload_url="ftp://x/y"):
            pass


async def test_failed_offload_is_reported_and_retried(here: Ground) -> None:
    await here.publish(15)
    here.copies.write_text("in the way")
    await here.call("PUT", REST)
    topic = await here.done()
    status = await here.get(REST)
    assert (status["status"], status["firstUnoffloadedMessage"]) == ("ERROR", None)
    assert "mend it" in str(status["lastError"])
    here.copies.unlink()
    await here.broker.offloads.start_due_runs()
    assert not here.broker.offloads.running, "not so soon"
    here.broker.offloads._now_s = lambda: 1e12
    await here.broker.offloads.start_due_runs()
    await here.done()
    assert here.broker.offloads.outcome(topic).state is OffloadState.SUCCESS


async def test_requested_offload_continues_after_a_restart(tmp_path: Path) -> None:
    async with ground(tmp_path) as here:
        await here.publish(25)
        here.copies.write_text("in the way")
        await here.call("PUT", REST)
        await here.done()
        here.copies.unlink()
    async with ground(tmp_path) as here:
        topic = await here.topic()
        assert len(topic.ledger.offload.pending()) == 2
        await here.broker.offloads.start_due_runs()
        await here.done()
        assert len(topic.ledger.offload.copied()) == 2


async def test_a_namespace_has_its_oldest_ledgers_offloaded(here: Ground) -> None:
    await here.publish(55)
    topic = await here.topic()
    await here.broker.offloads.start_due_runs()
    assert not here.broker.offloads.running
    size = topic.ledger.ledgers[0].size_bytes
    policy = "/admin/v2/namespaces/public/default/offloadThreshold"
    assert (await here.call("PUT", policy, 3 * size))[0] == 204
    assert await here.call("GET", policy) == (200, 3 * size)
    assert (await here.call("PUT", policy, "much"))[0] == 412
    await here.broker.offloads.start_due_runs()
    await here.done()
    assert len(topic.ledger.offload.copied()) == 3
    assert (await here.call("PUT", policy, 0))[0] == 204
    await here.broker.offloads.start_due_runs()
    await here.done()
    assert len(topic.ledger.offload.copied()) == 5


async def test_a_namespace_says_when_ledgers_go(here: Ground) -> None:
    await here.publish(25)
    await here.call("PUT", REST)
    topic = await here.done()
    await topic.ledger.trim()
    assert all(info.hot for info in topic.ledger.ledgers), "never, says the broker"
    policy = "/admin/v2/namespaces/public/default/offloadDeletionLagMs"
    assert (await here.call("PUT", policy, 3_600_000))[0] == 204
    copied = topic.ledger.offload.copied()[0].offload
    assert copied is not None
    assert topic.ledger.next_trim_ms() == copied.offloaded_ms + 3_600_000
    assert (await here.call("PUT", policy, 0))[0] == 204
    await until(lambda: [info.hot for info in topic.ledger.ledgers] == [False, False, True])
    assert await here.payloads() == numbered(25)


async def test_one_at_a_time_and_not_unloaded_meanwhile(here: Ground) -> None:
    await here.publish(15)
    topic = await here.topic()
    gate, cold = asyncio.Event(), here.broker.managed_ledgers.cold
    write = cold.write

    async def slowly(*given: object) -> None:
        await gate.wait()
        await write(*given)  # type: ignore[arg-type]

    cold.write = slowly  # type: ignore[method-assign, assignment]
    await here.call("PUT", REST)
    status, answer = await here.call("PUT", REST)
    assert (status, "wait until" in str(answer)) == (409, True)
    assert (await here.get(REST))["status"] == "RUNNING"
    assert not here.broker.idle_topics._is_idle(topic)
    gate.set()
    await here.done()
    assert topic.idle == here.broker.idle_topics._is_idle(topic)


async def test_damaged_copy_is_reported_and_not_delivered(here: Ground) -> None:
    await here.publish(25)
    await here.call("PUT", REST)
    topic = await here.done()
    await here.call("POST", REST + "/dropHot")
    for path in here.copies.iterdir():
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
    with pytest.raises(OffloadedDataCorrupt, match=r"restore it"):
        await topic.ledger.read(EARLIEST, max_entries=1, max_bytes=1)
    status, answer = await here.call("GET", REST + "/manifest")
    assert (status, "restore it" in str(answer)) == (500, True)
    consumer = await here.subscribe()
    consumer.flow(100)
    for path in here.copies.iterdir():
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
    found = [bytes(payload_of((await consumer.receive()).entry)) for _ in range(25)]
    assert found == numbered(25), "delivery goes on when the objects are mended"


async def test_seeks_and_bulk_reads_go_over_copies(here: Ground) -> None:
    await here.publish(25)
    await here.call("PUT", REST)
    topic = await here.done()
    await here.call("POST", REST + "/dropHot")
    consumer = await here.subscribe()
    consumer.flow(100)
    for _ in range(25):
        consumer.ack((await consumer.receive()).message_id)
    subscription = next(iter(topic.subscriptions.values()))
    await until(lambda: subscription.backlog == 0)
    first = await topic.ledger.read(EARLIEST, max_entries=1, max_bytes=1)
    await consumer.seek(parse_metadata(first[0].data).publish_time)
    again = await here.client.subscribe(TOPIC, subscription.name, permits=100)
    assert bytes(payload_of((await again.receive()).entry)) == b"0"
    reads = Reads(here.client)
    plan = await reads.plan()
    found = await reads.read_all(place(plan.start), place(plan.end))
    assert (plan.messages, [each.payload for each in found]) == (25, numbered(25))


async def test_aborted_messages_stay_hidden_in_offloaded_copies(tmp_path: Path) -> None:
    async with ground(tmp_path) as here:
        client = TransactionClient(here.client)
        producer = await here.client.create_producer(TOPIC)
        kept, aborted = await client.begin(), await client.begin()
        for number in range(24):
            await send(producer, (None, kept, aborted)[number % 3], b"%d" % number)
        await client.end(kept)
        await client.end(aborted, pb.ABORT)
        topic = await here.topic()
        await until(lambda: topic.buffer.max_read_position == topic.ledger.last_confirmed)
        await topic.seal()
        await here.call("PUT", REST)
        await here.done()
        await here.call("POST", REST + "/dropHot")
    async with ground(tmp_path) as here:
        consumer = await here.subscribe()
        assert not any(info.hot for info in (await here.topic()).ledger.ledgers)
        consumer.flow(24)
        found = [bytes(payload_of((await consumer.receive()).entry)) for _ in range(16)]
        assert found == [b"%d" % number for number in range(24) if number % 3 < 2]
        (subscription,) = (await here.topic()).subscriptions.values()
        await until(lambda: subscription.backlog == 16)


async def test_metrics(here: Ground) -> None:
    await here.publish(25)
    await here.call("PUT", REST)
    topic = await here.done()
    await here.call("POST", REST + "/dropHot")
    await here.payloads()
    async with here.session.get(here.url + "/metrics") as answer:
        lines = dict(
            line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#"
        )
    labels = '{cluster="standalone"}'
    assert float(lines[f"magnetar_offload_ledgers_total{labels}"]) == 2
    assert float(lines[f"magnetar_offload_entries_total{labels}"]) == 20
    assert float(lines[f"magnetar_offload_ledgers_deleted_total{labels}"]) == 2
    assert float(lines[f"magnetar_offload_running{labels}"]) == 0
    assert float(lines[f"magnetar_offload_block_cache_bytes{labels}"]) > 0
    labels = f'{{cluster="standalone",namespace="public/default",topic="{TOPIC}"}}'
    assert float(lines[f"pulsar_storage_offloaded_size{labels}"]) == sum(
        info.size_bytes for info in topic.ledger.ledgers[:2]
    )


async def test_the_space_of_deleted_ledgers_comes_back(tmp_path: Path) -> None:
    async with ground(tmp_path, log_file_size_bytes=1 << 20, ledger_max_entries=100) as here:
        producer = await here.client.create_producer(TOPIC)
        for _ in range(60):
            await producer.send(b"x" * 100_000)
        topic = await here.topic()
        await producer.close()
        await topic.seal()
        await here.call("PUT", REST)
        await here.done()
        logs = tmp_path / "data" / "ledgers"

        before = sum(path.stat().st_size for path in logs.glob("*.log"))
        await here.call("POST", REST + "/dropHot")
        stores = here.broker._stores
        assert stores is not None
        assert isinstance(stores.ledgers, LocalLedgerStore)
        await stores.ledgers.reclaim()
        assert sum(path.stat().st_size for path in logs.glob("*.log")) < before / 2
        assert len(await here.payloads()) == 60
