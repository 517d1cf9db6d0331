"""The offload on a real broker and real Spark: what was read before is read afterwards, by all.

Rules: a topic has rows of producers, of transactions that committed and aborted, and of attempts
that won and lost, before and after a split; its first segment is what is offloaded.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import magnetar
import magnetar.spark
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.job import audit
from magnetar.spark.audit.violations import Rule
from magnetar.spark.cli import app
from magnetar.spark.offload.job import OffloadResult, manifests_of, offload
from magnetar.spark.offload.place import TablePlace, place_of
from magnetar.spark.options import Connection
from tests.pipeline.audit.audited_topic import ROWS, AuditedTopic
from tests.pipeline.conftest import MakeDriver
from tests.pipeline.rows import Row, committed
from tests.support.broker_process import BrokerProcess
from tests.support.object_store import s3_server

SETTINGS = {
    "ledger_max_entries": 4,
    "ledger_min_age_s": 0,
    "entry_cache_bytes": 0,
    "offload_deletion_lag_s": -1,
    "retention_time_minutes": -1,
    "retention_size_mb": -1,
}
READABLE = len(ROWS) * 4
"""Of a segment: plain rows twice, a transaction that committed, an attempt that won."""
SMALL_BYTES = 4000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("offloaded")
    made = BrokerProcess(directory, {**SETTINGS, "offload_url": f"file://{directory}/copies"})
    try:
        asyncio.run(made.start())
        yield made
        assert not made.faults()
    finally:
        made.kill()


def filled(broker: BrokerProcess, name: str) -> AuditedTopic:
    topic = AuditedTopic(broker, name)
    asyncio.run(topic.fill())
    return topic


def run(spark: SparkSession, topic: AuditedTopic, place: TablePlace) -> OffloadResult:
    connection, rest = Connection(topic.url), AdminRest(topic.admin_url)
    return offload(spark, connection, rest, topic.topic, place, file_bytes=SMALL_BYTES)


def command(topic: AuditedTopic, *given: str) -> str:
    where = ["--url", topic.url, "--admin-url", topic.admin_url]
    done = CliRunner().invoke(app, [given[0], topic.topic, *given[1:], *where])
    assert done.exit_code == 0, done.output
    return done.output


def consumed(topic: AuditedTopic) -> list[Row]:
    """What consumers get, segment by segment."""

    async def read() -> list[Row]:
        async with magnetar.connect(topic.url) as client:
            found = await committed(client, topic.topic)
            return sorted(found, key=attrgetter("segment_id"))

    return asyncio.run(read())


def by_spark(spark: SparkSession, topic: AuditedTopic) -> pa.Table:
    """What the source reads, of all segments."""
    frame = spark.read.format("pulsar5").options(serviceUrl=topic.url, topic=topic.topic).load()
    return frame.toArrow().sort_by("order_key")


def table_of(directory: Path, topic: AuditedTopic, segment_id: int) -> pa.Table:
    """What the files of a segment have, read by nothing of ours, in the order they are listed."""
    found = manifests_of(place_of(str(directory)), topic.topic)[segment_id]
    return pa.concat_tables(pq.read_table(directory / file.name) for file in found.files)


def hot_ledgers(topic: AuditedTopic) -> list[bool]:
    path = topic.topic.replace("topic://", "/scalable/") + "/offload/manifest"
    _, told = asyncio.run(topic.broker.rest("GET", path))
    assert isinstance(told, dict)
    return [not each["bookkeeperDeleted"] for each in told["segments"]["0"]["ledgers"]]


def files_in(directory: Path) -> dict[str, int]:
    """Every file, and when it was written."""
    return {
        str(each.relative_to(directory)): each.stat().st_mtime_ns
        for each in directory.rglob("*")
        if each.is_file()
    }


def test_all_reads_are_the_same_when_hot_data_is_gone(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    magnetar.spark.register(spark)
    topic = filled(broker, "whole")
    rows, frame = consumed(topic), by_spark(spark, topic)
    assert len(rows) == 2 * READABLE
    assert all(hot_ledgers(topic))
    told = command(topic, "offload", "--to", str(tmp_path), "--drop-hot")
    assert f"Offloaded 1 segments with {READABLE} rows; 0 were before." in told
    assert "Segment 1 is still written to" in told
    assert len(hot_ledgers(topic)) > 1
    assert not any(hot_ledgers(topic))

    assert consumed(topic) == rows
    again = by_spark(spark, topic)
    assert again.equals(frame)
    of_segment = pa.compute.equal(frame["segment_id"], 0)
    assert table_of(tmp_path, topic, 0).equals(frame.filter(of_segment).cast(again.schema))
    assert "no violation" in command(topic, "audit", "--table", str(tmp_path), "--readers")

    before = files_in(tmp_path)
    told = command(topic, "offload", "--to", str(tmp_path), "--drop-hot")
    assert "Offloaded 0 segments with 0 rows; 1 were before." in told
    assert "Deleted 0 ledgers" in told
    assert files_in(tmp_path) == before


def test_a_job_that_is_killed_before_the_manifest_leaves_files_that_the_next_one_uses(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path, driver: MakeDriver
) -> None:
    topic, to = filled(broker, "killed"), tmp_path / "table"
    place = place_of(str(to))
    killed = driver(
        "killed",
        "tests.pipeline.offload.dying_driver",
        url=topic.url,
        admin_url=topic.admin_url,
        topic=topic.topic,
        to=place.url,
        file_bytes=SMALL_BYTES,
    )
    killed.spawn()
    assert asyncio.run(killed.finished()) == -signal.SIGKILL, killed.logs()
    orphans = files_in(to)
    assert len(orphans) > 1
    assert all(name.endswith(".parquet") for name in orphans)
    assert all(hot_ledgers(topic))
    done = run(spark, topic, place)
    assert [each.rows for each in done.now.values()] == [READABLE]
    assert {name: at for name, at in files_in(to).items() if name in orphans} == orphans
    listed = {each.name for each in done.now[0].files}
    assert listed == set(orphans)
    text = (to / "public/default/audited-killed/topic.json").read_text()
    assert json.loads(text)["segments"] == {"0": "segments/0.json"}
    _a_lost_file_is_found(spark, topic, place, to / min(listed))


def _a_lost_file_is_found(
    spark: SparkSession, topic: AuditedTopic, place: TablePlace, file: Path
) -> None:
    """By the audit: first with other rows in its place, then gone."""
    connection, rest = Connection(topic.url), AdminRest(topic.admin_url)
    whole = pq.read_table(file)
    for damage in (lambda: pq.write_table(whole.slice(1), file), file.unlink):
        damage()
        findings = audit(spark, connection, rest, topic.topic, table=place).findings
        assert {rule for rule, count in findings.counts.items() if count} == {Rule.V3}
    assert any("missing" in each.what for each in findings.violations)


def test_a_table_in_s3(
    spark: SparkSession, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled(broker, "bucket")
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        place = place_of(f"s3://{server.new_bucket()}/tables")
        done = run(spark, topic, place)
        assert len(done.now[0].files) > 1
        assert manifests_of(place, topic.topic) == done.now
        assert run(spark, topic, place).before == done.now
        report = audit(
            spark, Connection(topic.url), AdminRest(topic.admin_url), topic.topic, table=place
        )
        assert report.findings.is_clean, report.findings.violations
