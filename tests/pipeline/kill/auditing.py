"""What must hold of the copies of a topic, whatever was killed on the way.

Rules: readers of the sink see the copy of each row at most once, those of a key in the order of the
source and without a gap, and nothing else; when the query has come to its end, they see all.  The
audit of the topic finds nothing (V1 to V7), and has counted the rows that readers see.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import SparkSession

import magnetar
from magnetar.spark.admin import AdminRest
from magnetar.spark.audit.job import audit as run_audit
from magnetar.spark.audit.report import Report
from magnetar.spark.audit.snapshot import Commit
from magnetar.spark.audit.violations import Rule
from magnetar.spark.options import Connection
from tests.pipeline import rows
from tests.pipeline.rows import Pair

ON_THE_WAY: Final = (Rule.V1, Rule.V2, Rule.V3, Rule.V4)
AT_ITS_END: Final = (*ON_THE_WAY, Rule.V6, Rule.V7)
"""V5 is held against what is left of transactions: there is nothing of the kind where all ended."""


def copy_of(value: bytes) -> bytes:
    """What the query makes of a value."""
    return b"copy of " + value


def copies_of(published: Sequence[Pair]) -> dict[str, list[bytes]]:
    """The copies of each key, in their order."""
    expected: dict[str, list[bytes]] = {}
    for key, value in published:
        expected.setdefault(key, []).append(copy_of(value))
    return expected


async def audit(
    client: magnetar.Client,
    published: Sequence[Pair],
    sink: str,
    *,
    whole: bool,
    at_rest: bool = True,
) -> int:
    """How many rows readers of the sink see, also while a batch is open unless it is `at_rest`.

    Raises `AssertionError` for what must not be.
    """
    expected = copies_of(published)
    found = rows.of_key(await rows.committed(client, sink, at_rest=at_rest))
    for key, values in found.items():
        wanted = expected.get(key, [])
        assert values == wanted[: len(values)], f"of {key}: {values} are seen, not {wanted}"
    if whole:
        assert found == expected
    return sum(map(len, found.values()))


def audit_topic(
    spark: SparkSession, url: str, admin_url: str, topic: str, *, seen: int, whole: bool
) -> Report:
    """The audit of a topic that a query writes, of which readers see so many rows.

    It must have held something against each rule, unless the query is not at its end: then there
    may be one batch only.  Raises `AssertionError` for a violation.
    """
    report = run_audit(spark, Connection(url), AdminRest(admin_url), topic, readers_view=True)
    findings = report.findings
    assert findings.is_clean, findings.violations
    assert not findings.unchecked, findings.unchecked
    for rule in AT_ITS_END if whole else ON_THE_WAY:
        assert findings.checked[rule], f"{rule} was held against nothing"
    assert report.rows >= seen
    assert counted_by_winners(report) == seen, "readers see what the winners have counted"
    return report


def commits_to(report: Report) -> list[Commit]:
    """Of the groups that committed rows of the topic."""
    topics = {segment.topic for segment in report.snapshot.segments.values()}
    commits = [each.commit for each in report.snapshot.transactions.values()]
    return [
        commit
        for commit in commits
        if commit is not None
        and any(topic in topics for counts in commit.winners.values() for topic in counts)
    ]


def counted_by_winners(report: Report) -> int:
    """Rows that are to be seen, as those who wrote them told the coordinator."""
    return sum(
        messages
        for commit in commits_to(report)
        for counts in commit.winners.values()
        for messages, _ in counts.values()
    )
