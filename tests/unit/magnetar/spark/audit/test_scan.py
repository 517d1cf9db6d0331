"""What tasks do: rows of suspect producers, one by one; and what a worker has to import."""

import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from magnetar.errors import TopicNotFound
from magnetar.protocol.ids import Position
from magnetar.reads import StoredEntry
from magnetar.spark.audit import scan
from magnetar.spark.audit.order_checks import suspects
from magnetar.spark.audit.scan_tasks import count_readable, scan_raw
from magnetar.spark.audit.suspect_job import check_keys, rows_by_place
from magnetar.spark.audit.violations import Findings, Rule
from magnetar.spark.options import Connection
from tests.unit.magnetar.spark.audit.topic_facts import entry, snapshot
from tests.unit.magnetar.spark.stored import batch, pieces, single


def test_damaged_entry_does_not_end_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [entry((10, at), [("a", b"1")], first=at) for at in range(3)]
    damaged = whole[1]._replace(data=whole[1].data[:-1] + b"?")

    def entries(*_: object) -> Iterator[Sequence[StoredEntry]]:
        yield [whole[0], damaged, whole[2]]

    monkeypatch.setattr(scan, "_entries", entries)
    part = scan.AuditedRange(0, "t", Position(10, 0), Position(10, 3))
    found = scan.suspect_rows(Connection("pulsar://unused"), frozenset({"p"}), part)
    assert [sent.stamp.sequence_id for (sent, _), _ in found] == [0, 2]


def stored(parts: Sequence[bytes]) -> list[StoredEntry]:
    return [StoredEntry(10, at, data) for at, data in enumerate(parts)]


@pytest.mark.parametrize(
    "parts",
    [
        [batch(0, [b"1", b"2"]), batch(2, [b"3"]), batch(0, [b"1", b"2"])],
        [single(0, b"1"), single(2, b"3"), single(0, b"1")],
        [*pieces(0, b"123456", 3), single(2, b"3"), *pieces(0, b"123456", 3)],
    ],
    ids=["a batch", "alone", "in pieces"],
)
def test_keyless_entry_stored_twice_is_found(
    monkeypatch: pytest.MonkeyPatch, parts: Sequence[bytes]
) -> None:
    entries = stored(parts)
    monkeypatch.setattr(scan, "_entries", lambda *_: iter([entries]))
    part = scan.AuditedRange(0, "t", Position(10, 0), Position(10, len(entries)))
    findings = Findings()
    connection = Connection("pulsar://unused")
    seen = scan.scan(connection, part).producers.values()
    producers = frozenset(suspects(seen, snapshot(), findings))
    rows = sorted(scan.suspect_rows(connection, producers, part))
    for each in check_keys(sorted(rows_by_place(rows))):
        findings.merge(each)
    copied = len(rows) // 2
    assert [each.rule for each in findings.violations] == [Rule.V3] * copied
    assert "without key is there twice" in findings.violations[0].what


class Pruned:
    """A client of a topic of which retention takes a segment after its first entries were read."""

    def iterate(self, items: object) -> Iterator[Sequence[StoredEntry]]:
        yield [entry((10, 0), [("a", b"1")])]
        raise TopicNotFound("There is no segment of that name.")


def test_segment_deleted_meanwhile_does_not_end_the_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "process_client", lambda connection: Pruned())
    part = scan.AuditedRange(0, "t", Position(10, 0), Position(10, 3))
    assert scan.scan(Connection("pulsar://unused"), part).rows == 1


def test_workers_import_what_a_scan_needs() -> None:
    """A task's function is found by its module, which each worker imports with all it needs."""
    modules = sorted(
        {each.__module__ for each in (scan_raw, count_readable, rows_by_place, check_keys)}
    )
    told = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert set(modules) <= loaded
    assert not loaded & {"magnetar.spark.audit.job", "obstore", "pydantic", "pyarrow.parquet"}
