"""The audit on a real broker and real Spark: clean where nothing is wrong, and each fault is found.

Rules: every fault is one that a defect could leave, put into the records or the log of a broker of
these tests' own, in a topic for itself; the audit of that topic names its rule.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

import magnetar
import magnetar.sync
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.audited import decode, encode
from magnetar.spark.audit.job import audit
from magnetar.spark.audit.report import Report, page
from magnetar.spark.audit.violations import Rule
from magnetar.spark.options import Connection
from tests.pipeline.audit.audited_topic import AuditedTopic, Records, edited, positions
from tests.support.broker_process import BrokerProcess
from txn.group import GroupCommit
from txn.records import TxnState

ROWS_OF_A_TOPIC = 60 * 2 * 6
Fault = Callable[[AuditedTopic, Records], Awaitable[None]]


async def _flip_to_aborted(topic: AuditedTopic, records: Records) -> None:
    await records.flip(topic.committed, TxnState.ABORTED)


async def _flip_to_committed(topic: AuditedTopic, records: Records) -> None:
    await records.flip(topic.aborted, TxnState.COMMITTED)


async def _unmark(topic: AuditedTopic, records: Records) -> None:
    await records.unmark(topic.segments, topic.aborted)


async def _batch_again(topic: AuditedTopic, records: Records) -> None:
    await records.copy(topic.groups[-1], topic.groups[-1].least + 100_000)


async def _other_winner(topic: AuditedTopic, records: Records) -> None:
    """The loser becomes the winner."""

    def change(commit: GroupCommit) -> GroupCommit:
        (index,) = commit.winners
        return replace(commit, winners={3 - index: commit.winners[index]})

    await _recommit(topic, records, change)


async def _positions_back(topic: AuditedTopic, records: Records) -> None:
    await _recommit(topic, records, lambda commit: replace(commit, positions=positions(0)))


async def _fewer_rows(topic: AuditedTopic, records: Records) -> None:
    """As if a row of the winner were gone: what it counted is more than is there."""

    def change(commit: GroupCommit) -> GroupCommit:
        winners = {
            index: {name: n._replace(messages=n.messages + 1) for name, n in counts.items()}
            for index, counts in commit.winners.items()
        }
        return replace(commit, winners=winners)

    await _recommit(topic, records, change)


async def _recommit(
    topic: AuditedTopic, records: Records, change: Callable[[GroupCommit], GroupCommit]
) -> None:
    header = await records.header(topic.groups[-1])
    assert header.group is not None
    assert header.group.commit is not None
    group = replace(header.group, commit=change(header.group.commit))
    await records.change(topic.groups[-1], replace(header, group=group))


async def _unclaim(topic: AuditedTopic, records: Records) -> None:
    await records.unmark(topic.segments, topic.left_open)


FAULTS: Mapping[str, tuple[Fault, Rule, set[Rule]]] = {
    "flip-to-aborted": (_flip_to_aborted, Rule.V2, set()),
    "flip-to-committed": (_flip_to_committed, Rule.V1, set()),
    "abort-unmarked": (_unmark, Rule.V2, set()),
    "open-unclaimed": (_unclaim, Rule.V5, {Rule.V2}),
    "loser-wins": (_other_winner, Rule.V2, {Rule.V1}),
    "batch-again": (_batch_again, Rule.V6, {Rule.V1}),
    "positions-back": (_positions_back, Rule.V7, set()),
    "row-lost": (_fewer_rows, Rule.V1, set()),
}
"""In the records: the fault, the rule that it breaks, and others that it breaks as well."""
CLEAN, COPIED, SWAPPED = "clean", "copied", "swapped"
COPIED_WITHOUT_KEY, SWAPPED_WITHOUT_KEY = "copied-without-key", "swapped-without-key"
AS_STORED = (COPIED, SWAPPED, COPIED_WITHOUT_KEY, SWAPPED_WITHOUT_KEY)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path_factory.mktemp("audited"))
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.kill()


@pytest.fixture(scope="module")
def audited(broker: BrokerProcess) -> Iterator[Mapping[str, AuditedTopic]]:
    """A topic for each fault, with that in it."""
    made = {name: AuditedTopic(broker, name) for name in (*FAULTS, CLEAN, *AS_STORED)}
    asyncio.run(_fill(made.values()))
    with magnetar.sync.connect(made[CLEAN].url) as client:
        made["open-unclaimed"].leave_open(client)
        made[CLEAN].leave_open(client)
        asyncio.run(_break(broker, made))
        yield made


async def _fill(topics: Iterable[AuditedTopic]) -> None:
    for topic in topics:
        await topic.fill()


async def _break(broker: BrokerProcess, made: Mapping[str, AuditedTopic]) -> None:
    async with edited(broker) as records:
        for name, (fault, _, _) in FAULTS.items():
            await fault(made[name], records)
    await made[COPIED].send_as_stored((4, 5, 5))
    await made[SWAPPED].send_as_stored((4, 6, 5))
    await made[COPIED_WITHOUT_KEY].send_as_stored((4, 5, 6, 5), key=None)
    await made[SWAPPED_WITHOUT_KEY].send_as_stored((4, 6, 5), key=None)


def run(spark: SparkSession, topic: AuditedTopic) -> Report:
    connection, rest = Connection(topic.url), AdminRest(topic.admin_url)
    return audit(spark, connection, rest, topic.topic, readers_view=True)


def test_audit_does_not_reread_ranges_proven_right(
    spark: SparkSession, audited: Mapping[str, AuditedTopic]
) -> None:
    topic = audited[CLEAN]
    connection, rest = Connection(topic.url), AdminRest(topic.admin_url)
    first = audit(spark, connection, rest, topic.topic)
    assert first.audited is not None
    sealed = {each.segment_id for each in first.snapshot.segments.values() if each.sealed}
    assert set(first.audited.segments) == sealed
    again = audit(
        spark, connection, rest, topic.topic, readers_view=True, kept=decode(encode(first.audited))
    )
    assert again.findings.is_clean, again.findings.violations
    assert set(again.before) == sealed
    assert again.rows == first.rows - sum(first.seen[each].rows for each in sealed)
    assert again.audited == first.audited
    assert "audited before" in page(again)


def broken(report: Report) -> set[Rule]:
    return {rule for rule, count in report.findings.counts.items() if count}


def test_nothing_is_found_where_nothing_is_wrong(
    spark: SparkSession, audited: Mapping[str, AuditedTopic]
) -> None:
    report = run(spark, audited[CLEAN])
    assert report.findings.is_clean, report.findings.violations
    assert report.rows == ROWS_OF_A_TOPIC + 60
    assert all(report.findings.checked.values())
    assert "no violation" in page(report)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_records_is_found(
    spark: SparkSession, audited: Mapping[str, AuditedTopic], name: str
) -> None:
    _, rule, also = FAULTS[name]
    found = broken(run(spark, audited[name]))
    assert rule in found
    assert found <= {rule, *also}


@pytest.mark.parametrize(
    ("name", "rule"), [(COPIED, Rule.V3), (SWAPPED, Rule.V4), (COPIED_WITHOUT_KEY, Rule.V3)]
)
def test_entries_that_are_copied_or_swapped(
    spark: SparkSession, audited: Mapping[str, AuditedTopic], name: str, rule: Rule
) -> None:
    report = run(spark, audited[name])
    assert broken(report) == {rule}
    (violation,) = report.findings.violations
    assert violation.segment_id is not None
    told = page(report)
    assert violation.what.replace("'", "&#x27;") in told
    assert f"{rule.name}: 1" in told


def test_keyless_rows_have_no_order(
    spark: SparkSession, audited: Mapping[str, AuditedTopic]
) -> None:
    report = run(spark, audited[SWAPPED_WITHOUT_KEY])
    assert report.findings.is_clean, report.findings.violations


async def test_schemas_do_not_matter(spark: SparkSession, broker: BrokerProcess) -> None:
    """Rows are bytes to the audit, whatever their schema."""
    topic = AuditedTopic(broker, "text")
    async with (
        magnetar.connect(topic.url) as client,
        client.producer(topic.topic, schema=str) as producer,
    ):
        await producer.send("ä", key="k")
    report = run(spark, topic)
    assert report.findings.is_clean
    assert report.rows == 1
