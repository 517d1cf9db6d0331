"""What a record says of a batch whose answer was lost."""

import pytest

from storage.metadata.group import Stored
from storage.metadata.store import Version
from storage.metadata.zookeeper.knowledge import Undo
from storage.metadata.zookeeper.layout import Node, encode_record
from storage.metadata.zookeeper.outcomes import Effect, Evidence, effect_of
from storage.metadata.zookeeper.plan import Plan
from storage.metadata.zookeeper.requests import Failure, Read, Stat
from storage.metadata.zookeeper.writes import PendingWrite, PlannedWrite

STORED = Stored(Version(1), 0, 1, 1, None, None, ())
MINE = encode_record(STORED, "aa", b"mine")
OLD = encode_record(STORED, "aa", b"old")
OTHER = encode_record(STORED, "bb", b"other")
BEFORE = Node(STORED, "aa", 4)
UNKNOWN = Evidence(Effect.UNKNOWN)


def planned(*, before: Node | None = BEFORE, deletes: bool = False) -> PlannedWrite:
    after = None if deletes else BEFORE
    plan = Plan((), "/a", after, b"" if deletes else MINE, 0)
    write: PendingWrite = None  # type: ignore[assignment]
    return PlannedWrite(write, plan, Undo(True, before, None))


def read(data: bytes, version: int) -> Read:
    return data, Stat(1, 50 + version, version, 0)


@pytest.mark.parametrize(
    ("item", "found", "evidence"),
    [
        (planned(), read(MINE, 5), Evidence(Effect.DONE, 55)),
        (planned(), read(OLD, 4), Evidence(Effect.NONE)),
        (planned(), read(OTHER, 4), UNKNOWN),
        (planned(), read(OLD, 6), UNKNOWN),
        (planned(), read(b"no record", 4), UNKNOWN),
        (planned(), Failure.NO_NODE, UNKNOWN),
        (planned(before=None), read(MINE, 0), Evidence(Effect.DONE, 50)),
        (planned(before=None), Failure.NO_NODE, UNKNOWN),
        (planned(before=None), read(OTHER, 0), UNKNOWN),
        (planned(deletes=True), read(OLD, 4), Evidence(Effect.NONE)),
        (planned(deletes=True), Failure.NO_NODE, UNKNOWN),
        (planned(deletes=True), read(OTHER, 4), UNKNOWN),
    ],
)
def test_one_record(item: PlannedWrite, found: Read, evidence: Evidence) -> None:
    assert effect_of([item], [found]) == evidence


def test_one_record_tells_all() -> None:
    items = [planned(before=None), planned(), planned()]
    reads = [Failure.NO_NODE, read(OTHER, 9), read(MINE, 5)]
    assert effect_of(items, reads) == Evidence(Effect.DONE, 55)
    assert effect_of(items, [Failure.NO_NODE, read(OLD, 4), Failure.NO_NODE]).effect is Effect.NONE
    assert effect_of(items, [Failure.NO_NODE] * 3) == UNKNOWN
