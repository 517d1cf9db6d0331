"""Groups: how operations are cut into commits makes no difference."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.group import Group
from storage.metadata.memory import MemoryTables
from storage.metadata.operations import (
    BeginSession,
    EndSessions,
    Operation,
    checked_delete,
    checked_put,
    checked_sequence_put,
)
from storage.metadata.store import ABSENT, IndexEntry, PutResult, Version

KEYS = st.sampled_from(["/a", "/b", "/s/x", "/s/y"])
EXPECT = st.none() | st.just(ABSENT) | st.builds(Version, st.integers(1, 8))
PARTITIONS = st.sampled_from([None, None, None, "p"])
INDEXES = st.lists(st.builds(IndexEntry, st.just("i"), st.sampled_from("xyz")), max_size=2)
SESSIONS = st.none() | st.integers(1, 6)

PUTS = st.builds(
    checked_put,
    KEYS,
    st.binary(max_size=2),
    partition=PARTITIONS,
    expect=EXPECT,
    session_id=SESSIONS,
    indexes=INDEXES,
    now_ms=st.just(1),
)
SEQUENCE_PUTS = st.builds(
    checked_sequence_put,
    st.sampled_from(["/s/", "/q/"]),
    st.binary(max_size=2),
    partition=st.sampled_from(["p", "p", "q"]),
    expect=st.none(),
    session_id=st.none(),
    indexes=INDEXES,
    now_ms=st.just(1),
)
DELETES = st.builds(checked_delete, KEYS, partition=PARTITIONS, expect=EXPECT)
BEGINS = st.builds(BeginSession, st.just("test"), st.just(1000), st.just(1))
ENDS = st.builds(EndSessions, st.lists(st.integers(1, 6), max_size=2).map(tuple))
OPERATIONS = st.lists(PUTS | PUTS | SEQUENCE_PUTS | DELETES | BEGINS | ENDS, max_size=25)


def apply(tables: MemoryTables, operations: Sequence[Operation]) -> list[object]:
    made = Group(tables, tables.revision)
    outcomes = [made.apply(operation) for operation in operations]
    tables.save(made, made.net_changes())
    return [type(each) if isinstance(each, Exception) else each for each in outcomes]


def everything(tables: MemoryTables) -> list[object]:
    found: list[object] = [tables.revision]
    for level in ("/", "/s/", "/q/"):
        found += [tables.existing_record(key) for key in tables.keys(level, f"{level}/")]
    found.append(tables.index_entries("i", "a", "~"))
    found += [(number, tables.session_exists(number)) for number in range(30)]
    return found


@given(OPERATIONS, st.lists(st.integers(1, 5), min_size=1))
def test_cuts_make_no_difference(operations: list[Operation], sizes: list[int]) -> None:
    together, apart = MemoryTables(), MemoryTables()
    expected = apply(together, operations)
    outcomes: list[object] = []
    rest, turn = operations, 0
    while rest:
        size = sizes[turn % len(sizes)]
        outcomes += apply(apart, rest[:size])
        rest, turn = rest[size:], turn + 1
    assert outcomes == expected
    assert everything(apart) == everything(together)


@given(OPERATIONS)
def test_net_changes_tell_the_whole_difference(operations: list[Operation]) -> None:
    tables = MemoryTables()
    half = len(operations) // 2
    apply(tables, operations[:half])
    before = {key: tables.record(key) for key in ("/a", "/b", "/s/x", "/s/y")}
    made = Group(tables, tables.revision)
    for operation in operations[half:]:
        made.apply(operation)
    changes = {change.key: change for change in made.net_changes()}
    tables.save(made, changes.values())
    for key, record in before.items():
        after = tables.record(key)
        if key in changes:
            assert (changes[key].before is None) == (record is None)
            assert changes[key].record == after
        else:
            assert after == record


def test_a_failure_changes_nothing() -> None:
    tables = MemoryTables()
    (made,) = apply(
        tables,
        [
            checked_put(
                "/a",
                b"1",
                partition=None,
                expect=None,
                session_id=None,
                indexes=[IndexEntry("i", "x")],
                now_ms=1,
            )
        ],
    )
    assert isinstance(made, PutResult)
    before = everything(tables)
    apply(
        tables,
        [
            checked_put(
                "/a",
                b"2",
                partition=None,
                expect=ABSENT,
                session_id=None,
                indexes=[],
                now_ms=2,
            ),
            checked_delete("/a", partition="p", expect=None),
            checked_delete("/a", partition=None, expect=Version(made.version + 1)),
        ],
    )
    assert everything(tables) == before
