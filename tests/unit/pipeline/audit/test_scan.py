"""Rows of suspect producers, one by one."""

from collections.abc import Iterator, Sequence

import pytest

from magnetar.errors import TopicNotFound
from magnetar.reads import StoredEntry
from pipeline.audit import scan
from pipeline.options import Connection
from protocol.ids import Position
from tests.unit.pipeline.audit.topic_facts import entry


def test_an_entry_that_is_damaged_does_not_end_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [entry((10, at), [("a", b"1")], first=at) for at in range(3)]
    damaged = whole[1]._replace(data=whole[1].data[:-1] + b"?")

    def entries(*_: object) -> Iterator[Sequence[StoredEntry]]:
        yield [whole[0], damaged, whole[2]]

    monkeypatch.setattr(scan, "_entries", entries)
    part = scan.AuditedRange(0, "t", Position(10, 0), Position(10, 3))
    found = scan.suspect_rows(Connection("pulsar://unused"), frozenset({"p"}), part)
    assert [stamp.sequence_id for _, (_, stamp, _) in found] == [0, 2]


class Pruned:
    """A client of a topic of which retention takes a segment after its first entries were read."""

    def iterate(self, items: object) -> Iterator[Sequence[StoredEntry]]:
        yield [entry((10, 0), [("a", b"1")])]
        raise TopicNotFound("There is no segment of that name.")


def test_a_segment_that_is_taken_meanwhile_does_not_end_the_audit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scan, "connected", lambda connection: Pruned())
    part = scan.AuditedRange(0, "t", Position(10, 0), Position(10, 3))
    assert scan.scan(Connection("pulsar://unused"), part).rows == 1
