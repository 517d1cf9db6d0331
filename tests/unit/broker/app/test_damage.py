"""Files damaged while the broker is stopped: every loss is reported, everything else is served."""

import asyncio
import random
import shutil
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import parse_topic_name
from storage.damage import DamagedData, DamageKind
from storage.ledger.local.codec import crc32c
from storage.ledger.local.index import FLAG_DAMAGED, INDEX_HEAD_BYTES, decode_index_header
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.store import LedgerError
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import TIMEOUT_S, until

MESSAGES = 300
EXTRAS = 60
"""More topics, so that records fill several pages."""
TABLE_LEAF = 0x0D
"""First byte of a page with rows, in SQLite's format."""
OLD, NEW = "persistent://public/default/old", "persistent://public/default/new"


class Files(NamedTuple):
    """The files of a data directory; `old_*` have the messages of OLD, the newest those of NEW."""

    data: Path
    old_log: Path
    old_index: Path
    new_log: Path
    metadata: Path
    wal: Path


def payload(topic: str, index: int) -> bytes:
    return f"{topic} {index} ".encode() + random.Random(index).randbytes(80)


async def fill(broker: Broker, topic: str) -> None:
    client = await RawClient.open("127.0.0.1", broker.port)
    await client.subscribe(topic, "s")
    producer = await client.create_producer(topic)
    for index in range(MESSAGES):
        await producer.send(payload(topic, index))
    await producer.close()
    await client.close()


Prepare = Callable[[str], Awaitable[Files]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two data directories with the same messages, once made: of a clean end, and of a crash."""
    return {}


@pytest.fixture
def prepare(
    directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> Prepare:
    """Returns a function that copies the data directory of a "clean" end or of a "crash"."""

    async def copy(end: str) -> Files:
        if not directories:
            directories.update(await make_directories(tmp_path_factory.mktemp("damage")))
        shutil.copytree(directories[end], tmp_path / "data")
        return files_of(tmp_path / "data")

    return copy


async def make_directories(parent: Path) -> dict[str, Path]:
    clean, crash = parent / "data", parent / "crash"
    async with running(clean) as broker:
        await fill(broker, OLD)
        for number in range(EXTRAS):
            name = parse_topic_name(f"persistent://public/default/extra-{number}")
            await broker.topics.get(name, create=True)
    async with running(clean) as broker:
        await fill(broker, NEW)
        # What the kernel has is what a killed process leaves.
        shutil.copytree(clean, crash)
    return {"clean": clean, "crash": crash}


def files_of(data: Path) -> Files:
    logs = sorted((data / "ledgers").glob("*.log"))
    metadata = data / "metadata" / "metadata.db"
    wal = metadata.with_name("metadata.db-wal")
    return Files(data, logs[0], logs[0].with_suffix(".index"), logs[-1], metadata, wal)


def flip(path: Path, at: int) -> None:
    """Change four bytes; `at` may count from the end."""
    with path.open("r+b") as file:
        at %= path.stat().st_size
        file.seek(at)
        data = file.read(4)
        file.seek(at)
        file.write(bytes(byte ^ 0x5A for byte in data))


def truncate(path: Path, size: int) -> None:
    """Cut the file to `size` bytes, or by as many if it is negative."""
    data = path.read_bytes()
    path.write_bytes(data[:size])


def flip_row(files: Files) -> None:
    header = decode_index_header(files.old_index.read_bytes()[:INDEX_HEAD_BYTES])
    flip(files.old_index, header.rows_at + 8 * 150)


def page_of(files: Files, topic: str) -> tuple[int, int]:
    """Where the table page with the record of a topic begins, and the record's key in it."""
    key = f"/managed-ledgers/public/default/persistent/{topic}".encode()
    data = files.metadata.read_bytes()
    (start,) = [
        at
        for at in range(0, len(data), 4096)
        if data[at] == TABLE_LEAF and key in data[at : at + 4096]
    ]
    return start, data.index(key, start) + len(key)


def zero_page(files: Files) -> None:
    data = bytearray(files.metadata.read_bytes())
    start, _ = page_of(files, "extra-30")
    data[start : start + 4096] = bytes(4096)
    files.metadata.write_bytes(data)


def flip_page(files: Files) -> None:
    """In the columns of a record, which SQLite does not check."""
    flip(files.metadata, page_of(files, "new")[1] + 40)


def remove_old_files(files: Files) -> None:
    files.old_log.unlink()
    files.old_index.unlink()


def halve_wal(files: Files) -> None:
    truncate(files.wal, files.wal.stat().st_size // 2)


class Case(NamedTuple):
    """A damage; `kind` of the metric; `lost` are topics that may lack messages or be refused.

    `refused`: they are, once it is found.  Lost changes of metadata are of no known topic.
    """

    name: str
    ends: tuple[str, ...]
    kind: DamageKind
    damage: Callable[[Files], object]
    lost: tuple[str, ...] = ()
    refused: bool = True


BOTH = ("clean", "crash")
LEDGER, INDEX, METADATA = DamageKind.LEDGER, DamageKind.INDEX, DamageKind.METADATA
CASES = (
    Case("log-flip", BOTH, LEDGER, lambda f: flip(f.old_log, 20_000), (OLD,)),
    Case("log-cut", BOTH, LEDGER, lambda f: truncate(f.old_log, 20_000), (OLD,)),
    Case("log-removed", BOTH, LEDGER, lambda f: f.old_log.unlink(), (OLD,)),
    Case(
        "log-and-index-removed",
        BOTH,
        LEDGER,
        remove_old_files,
        (OLD,),
    ),
    Case("index-flip", BOTH, INDEX, flip_row),
    Case("index-head-flip", BOTH, INDEX, lambda f: flip(f.old_index, 30)),
    Case("index-cut", BOTH, INDEX, lambda f: truncate(f.old_index, 1000)),
    Case("index-removed", BOTH, INDEX, lambda f: f.old_index.unlink()),
    Case("log-end-flip", BOTH, LEDGER, lambda f: flip(f.new_log, -20), (NEW,)),
    Case("log-end-cut", BOTH, LEDGER, lambda f: truncate(f.new_log, -20), (NEW,)),
    Case("log-end-groups-cut", BOTH, LEDGER, lambda f: truncate(f.new_log, -10_000), (NEW,)),
    Case("log-newest-removed", BOTH, LEDGER, lambda f: f.new_log.unlink(), (NEW,)),
    Case("log-emptied", BOTH, LEDGER, lambda f: truncate(f.new_log, 0), (NEW,)),
    Case("page-flip", ("clean",), METADATA, flip_page, (NEW,)),
    Case("page-zeroed", ("clean",), METADATA, zero_page),
    Case("wal-flip", ("crash",), METADATA, lambda f: flip(f.wal, -4000), (NEW,), False),
    Case("wal-cut", ("crash",), METADATA, lambda f: truncate(f.wal, -4000), (NEW,), False),
    Case("wal-half", ("crash",), METADATA, halve_wal, (NEW,), False),
    Case("wal-removed", ("crash",), METADATA, lambda f: f.wal.unlink(), (NEW,), False),
)
ALL = [pytest.param(case, end, id=f"{case.name}-{end}") for case in CASES for end in case.ends]


async def received(broker: Broker, topic: str) -> list[bytes] | BrokerError:
    """The messages of a topic until its backlog is received, or the error of the subscription.

    It ends early if the topic is closed meanwhile.
    """
    client = await RawClient.open("127.0.0.1", broker.port)
    options = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    found: list[bytes] = []

    def is_complete() -> bool:
        # Lost entries leave the backlog when they are found.
        loaded = broker.topics.loaded().get(topic)
        return loaded is None or len(found) >= loaded.subscriptions["all"].backlog

    try:
        async with asyncio.timeout(TIMEOUT_S):
            consumer = await client.subscribe(topic, "all", options, permits=2 * MESSAGES)
            while not is_complete():
                with suppress(TimeoutError):
                    found.append((await consumer.receive(0.1)).payload)
    except BrokerError as error:
        return error
    finally:
        await client.close()
    return found


async def metric(broker: Broker, name: str, kind: str) -> float:
    text = await metrics_text(broker)
    (line,) = [
        line for line in text.splitlines()
        if line.startswith(name + "{") and f'kind="{kind}"' in line
    ]  # fmt: skip
    return float(line.rpartition(" ")[2])


@contextmanager
def logged() -> Iterator[list[str]]:
    """The reasons of errors logged meanwhile."""
    found: list[str] = []
    with capture_logs() as logs:
        yield found
    found += [str(each["reason"]) for each in logs if each["event"] == "data_damaged"]


@pytest.mark.parametrize(("case", "end"), ALL)
async def test_damage_is_reported_and_everything_else_is_served(
    case: Case,
    end: str,
    prepare: Prepare,
) -> None:
    files = await prepare(end)
    before = {path.name for path in (files.data / "ledgers").iterdir()}
    case.damage(files)
    left = before & {path.name for path in (files.data / "ledgers").iterdir()}
    with logged() as reasons:
        async with running(files.data) as broker:
            await until(lambda: broker.damage.counts.get(case.kind, 0) > 0)
            assert await metric(broker, "magnetar_damaged", case.kind) > 0
            assert broker.damage.has_loss == (case.kind is not DamageKind.INDEX)
            sentences = broker.damage.sentences()
            for topic in (OLD, NEW):
                found = await received(broker, topic)
                wanted = [payload(topic, index) for index in range(MESSAGES)]
                if topic not in case.lost:
                    assert found == wanted
                elif isinstance(found, list):
                    assert not case.refused
                    assert set(found) <= set(wanted), "never a wrong message"
                else:
                    assert found.code == pb.PersistenceError
                    assert 'damaged_data = "serve_what_is_left"' in str(found)
        assert left <= {path.name for path in (files.data / "ledgers").iterdir()}
    assert sentences
    assert set(reasons) >= set(sentences[:1])


@pytest.mark.parametrize("end", BOTH)
async def test_without_damage_nothing_is_reported(
    end: str,
    prepare: Prepare,
) -> None:
    files = await prepare(end)
    async with running(files.data) as broker:
        for topic in (OLD, NEW):
            wanted = [payload(topic, index) for index in range(MESSAGES)]
            assert await received(broker, topic) == wanted
        assert broker.damage.sentences() == []
        assert await metric(broker, "magnetar_damaged", "ledger") == 0
    async with running(files.data) as broker:
        assert broker.damage.sentences() == []


def lose_half_of_old(files: Files) -> None:
    truncate(files.old_log, files.old_log.stat().st_size // 2)


@pytest.mark.parametrize("end", BOTH)
async def test_what_is_left_is_served_on_demand(
    end: str,
    prepare: Prepare,
) -> None:
    files = await prepare(end)
    lose_half_of_old(files)
    flip(files.old_log, 5000)
    for _ in range(2):
        async with running(files.data, damaged_data="serve_what_is_left") as broker:
            found = await received(broker, OLD)
            wanted = [payload(OLD, index) for index in range(MESSAGES)]
            assert isinstance(found, list)
            (lost,) = set(wanted[: len(found) + 1]) - set(found)
            assert found == [each for each in wanted[: len(found) + 1] if each != lost]
            assert MESSAGES // 3 < len(found) < MESSAGES
            assert broker.damage.entries_missing == MESSAGES - len(found)
            topic = await broker.topics.get(parse_topic_name(OLD), create=False)
            for subscription in topic.subscriptions.values():
                assert subscription.backlog == len(found), "lost ones are in no backlog"
            await topic.subscriptions["all"].cursor.reset(EARLIEST)
            assert topic.subscriptions["all"].backlog == len(found)


@pytest.mark.parametrize(("case", "end"), ALL)
async def test_a_start_is_refused_on_demand_for_each_loss(
    case: Case, end: str, prepare: Prepare
) -> None:
    files = await prepare(end)
    case.damage(files)
    lost = case.kind is not INDEX
    for _ in range(2):
        with pytest.raises(DamagedData, match="Nothing was deleted") if lost else nullcontext():
            async with running(files.data, damaged_data="refuse_start"):
                pass


@pytest.mark.parametrize(("case", "end"), ALL)
async def test_what_is_left_after_each_loss_is_served_on_demand(
    case: Case, end: str, prepare: Prepare
) -> None:
    files = await prepare(end)
    case.damage(files)
    async with running(files.data, damaged_data="serve_what_is_left") as broker:
        await until(lambda: broker.damage.counts.get(case.kind, 0) > 0)
        for topic in (OLD, NEW):
            wanted = [payload(topic, index) for index in range(MESSAGES)]
            found = await received(broker, topic)
            assert isinstance(found, list)
            assert found == [each for each in wanted if each in set(found)]
            assert found == wanted or topic in case.lost


async def test_a_start_is_refused_on_demand_and_deletes_nothing(prepare: Prepare) -> None:
    files = await prepare("clean")
    files.old_log.unlink()
    before = sorted((files.data / "ledgers").iterdir())
    for _ in range(2):
        with pytest.raises(DamagedData, match=r"0000000001\.log is missing.*Nothing was deleted"):
            async with running(files.data, damaged_data="refuse_start"):
                pass
    assert sorted((files.data / "ledgers").iterdir()) == before


async def test_loaded_topic_is_refused_as_soon_as_a_reader_finds_a_loss(prepare: Prepare) -> None:
    files = await prepare("clean")
    async with running(files.data, entry_cache_bytes=0) as broker:
        other = await broker.topics.get(parse_topic_name(NEW), create=False)
        await broker.topics.get(parse_topic_name(OLD), create=False)
        flip(files.old_log, 20_000)
        await received(broker, OLD)
        await until(lambda: OLD not in broker.topics.loaded())
        refusal = await received(broker, OLD)
        assert isinstance(refusal, BrokerError)
        assert "old has lost 1 entries (99)" in str(refusal)
        assert broker.topics.loaded()[NEW] is other, "it is whole"


async def test_loaded_topic_is_refused_as_soon_as_verification_finds_a_loss(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = await prepare("clean")
    flip(files.old_log, 20_000)
    # The newest file is verified first, so that the topic is loaded when the flip is found.
    slow = partial(LedgerLimits, verify_step_bytes=20_000, verify_bytes_per_s=40_000)
    monkeypatch.setattr("broker.app.stores.LedgerLimits", slow)
    async with running(files.data) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe(OLD, "s")
        assert not broker.damage.has_loss
        await until(lambda: OLD not in broker.topics.loaded())
        assert broker.damage.entries_missing == 1
        assert isinstance(await received(broker, OLD), BrokerError)
        await client.close()


async def test_loaded_topic_goes_on_without_lost_entries_on_demand(prepare: Prepare) -> None:
    files = await prepare("clean")
    async with running(
        files.data, entry_cache_bytes=0, damaged_data="serve_what_is_left"
    ) as broker:
        topic = await broker.topics.get(parse_topic_name(OLD), create=False)
        flip(files.old_log, 20_000)
        found = await received(broker, OLD)
        assert found == [payload(OLD, each) for each in range(MESSAGES) if each != 99]
        assert broker.topics.loaded()[OLD] is topic


async def test_start_verifies_all_entries_before_it_serves_on_demand(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.app.stores.LedgerLimits", partial(LedgerLimits, verify_log_s=0))
    files = await prepare("clean")
    with capture_logs() as logs:
        async with running(files.data, damaged_data="refuse_start"):
            events = [each for each in logs if each["event"].startswith("ledger_logs_")]
    begun, *between, ended = events
    assert {each["event"] for each in between} == {"ledger_logs_verified_so_far"}
    assert begun["event"] == "ledger_logs_being_verified"
    assert ended["event"] == "ledger_logs_verified"
    assert begun["bytes"] == sum(path.stat().st_size for path in (files.old_log, files.new_log))
    assert 2 * MESSAGES * 80 < ended["bytes"] <= begun["bytes"]
    assert ended["bytes_per_s"] > 0


async def test_loss_in_a_ledger_of_health_checks_is_no_loss(tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    async with running(tmp_path / "data") as broker:
        await broker.check_health()
        await broker.check_health()
        shutil.copytree(tmp_path / "data", crash)
    flip(files_of(crash).new_log, 100)
    async with running(crash, damaged_data="refuse_start") as broker:
        assert not broker.damage.has_loss


async def test_large_metadata_file_is_checked_before_the_start_on_demand(
    prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "METADATA_CHECK_BYTES", 0)
    files = await prepare("clean")
    files.metadata.with_name("metadata.db.sums").unlink()
    zero_page(files)
    with pytest.raises(DamagedData, match="metadata file"):
        async with running(files.data, damaged_data="refuse_start"):
            pass


async def test_damage_stays_reported_until_the_topic_is_deleted(prepare: Prepare) -> None:
    files = await prepare("clean")
    files.old_log.unlink()
    for _ in range(2):
        async with running(files.data) as broker:
            assert isinstance(await received(broker, OLD), BrokerError)
            assert any("old has lost 300 entries" in each for each in broker.damage.sentences())
    async with running(files.data) as broker:
        await broker.topics.delete(parse_topic_name(OLD), force=False)
        assert broker.damage.entries_missing == 0
    async with running(files.data) as broker:
        assert not broker.damage.has_loss
        await until(lambda: not files.old_index.exists())
        assert await received(broker, OLD) == []


async def test_a_flip_that_was_found_is_known_to_the_next_start(prepare: Prepare) -> None:
    files = await prepare("clean")
    flip(files.old_log, 20_000)
    async with running(files.data) as broker:
        await until(lambda: broker.damage.entries_missing == 1)
        await until(lambda: decode_index_header(files.old_index.read_bytes()).flags == FLAG_DAMAGED)
    async with running(files.data) as broker:
        assert broker.damage.entries_missing == 1
        assert isinstance(await received(broker, OLD), BrokerError)


async def test_an_index_without_checksum_over_its_rows_is_no_obstacle(prepare: Prepare) -> None:
    """Version 1: every row is wrong, and readers have taken places from it already."""
    files = await prepare("clean")
    data = files.old_index.read_bytes()
    header = decode_index_header(data)
    old = struct.pack(
        "<8sIIQQQQQqII", b"MGLEDIDX", 1, 0, header.number, header.nonce, header.covers,
        header.records, 0, header.max_ledger, header.runs, header.runs_crc,
    )  # fmt: skip
    rows = bytes(byte ^ 0x11 for byte in data[header.rows_at :])
    table = data[header.runs_at : header.rows_at]
    files.old_index.write_bytes(old + struct.pack("<I", crc32c(old)) + table + rows)
    async with running(files.data, entry_cache_bytes=0) as broker:
        assert await received(broker, OLD) == [payload(OLD, each) for each in range(MESSAGES)]
        assert not broker.damage.has_loss


async def test_a_large_metadata_file_is_checked_in_the_background(
    prepare: Prepare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "METADATA_CHECK_BYTES", 0)
    files = await prepare("clean")
    files.metadata.with_name("metadata.db.sums").unlink()
    zero_page(files)
    async with running(files.data) as broker:
        await until(lambda: broker.damage.counts.get(DamageKind.METADATA, 0) > 0)
        assert await received(broker, NEW) == [payload(NEW, each) for each in range(MESSAGES)]


@pytest.mark.parametrize("cut", [20, 10_000])
async def test_a_lost_end_is_said_at_each_start(cut: int, prepare: Prepare) -> None:
    files = await prepare("crash")
    truncate(files.new_log, -cut)
    for _ in range(3):
        async with running(files.data) as broker:
            assert isinstance(await received(broker, NEW), BrokerError)
            assert any("new may have lost" in each for each in broker.damage.sentences())
            assert await received(broker, OLD) == [payload(OLD, n) for n in range(MESSAGES)]


async def test_damage_beside_living_ledgers_is_over_when_its_topic_is_deleted(
    prepare: Prepare,
) -> None:
    other = "persistent://public/default/beside"
    files = await prepare("clean")
    async with running(files.data) as broker:
        await fill(broker, "persistent://public/default/gone")
        await fill(broker, other)
    log = files_of(files.data).new_log
    flip(log, 20_000)
    async with running(files.data) as broker:
        await until(lambda: broker.damage.entries_missing == 1)
        await broker.topics.delete(parse_topic_name("persistent://public/default/gone"), force=True)
    async with running(files.data) as broker:
        assert not broker.damage.has_loss
        assert await received(broker, other) == [payload(other, n) for n in range(MESSAGES)]


async def test_lost_commits_stay_reported(prepare: Prepare) -> None:
    files = await prepare("crash")
    files.wal.unlink()
    for _ in range(2):
        async with running(files.data) as broker:
            assert any("has lost its newest" in each for each in broker.damage.sentences())
            assert broker.damage.has_loss


UNKNOWN = "The log has 300 entries of 1 ledgers that the metadata store does not know"


@pytest.mark.parametrize("is_noted", [True, False])
async def test_entries_of_ledgers_that_metadata_lost_stay_reported_and_kept(
    is_noted: bool, prepare: Prepare
) -> None:
    files = await prepare("crash")
    files.wal.unlink()
    if not is_noted:
        files.metadata.with_name("metadata.db.commit").unlink()
    for number in range(3):
        async with running(files.data) as broker:
            said = [each for each in broker.damage.sentences() if UNKNOWN in each]
            assert len(said) == 1
            # It gets a higher ledger id than the lost ones had.
            await fill(broker, f"persistent://public/default/later-{number}")
        assert files.new_log.exists()


@pytest.mark.parametrize("end", BOTH)
async def test_a_removed_metadata_file_is_no_new_start(end: str, prepare: Prepare) -> None:
    files = await prepare(end)
    files.metadata.unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="restore the metadata"):
            async with running(files.data):
                pass


def halve_metadata(files: Files) -> None:
    truncate(files.metadata, files.metadata.stat().st_size // 2)


@pytest.mark.parametrize(
    ("end", "damage"),
    [("crash", zero_page), ("clean", halve_metadata), ("crash", halve_metadata)],
)
async def test_a_start_that_needs_a_damaged_page_fails_and_says_so(
    end: str, damage: Callable[[Files], None], prepare: Prepare
) -> None:
    files = await prepare(end)
    damage(files)
    for _ in range(2):
        with pytest.raises(MetadataError, match=r"metadata\.db .*restore the newest backup"):
            async with running(files.data):
                pass


@pytest.mark.parametrize("end", BOTH)
async def test_all_ledgers_removed(
    end: str,
    prepare: Prepare,
) -> None:
    files = await prepare(end)
    shutil.rmtree(files.data / "ledgers")
    async with running(files.data) as broker:
        assert isinstance(await received(broker, OLD), BrokerError)
        assert isinstance(await received(broker, NEW), BrokerError)
        await fill(broker, "persistent://public/default/other")
