"""Random operations against a plain model, with watches that mirror the store."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from storage.metadata.keys import children_range
from storage.metadata.store import (
    ABSENT,
    EventKind,
    IndexEntry,
    PutResult,
    Session,
    Version,
    VersionConflict,
    Watch,
)
from tests.contract.metadata.backends import (
    Backend,
)
from tests.support.waiting import TIMEOUT_S

T = TypeVar("T")

KEYS = st.sampled_from(["/a", "/b", "/a/x", "/a/y", "/a/x/z"])
INDEX_KEYS = st.lists(st.sampled_from(["k1", "k2", "k3", "m"]), max_size=3)
VALUES = st.binary(max_size=3)
EXPECT = st.sampled_from(["any", "absent", "current", "stale"])
LEVELS = ("/", "/a", "/a/x")
WANTED = "/b"
INDEX = "i"


class Row:
    """A record of the model."""

    def __init__(self, value: bytes, version: Version, index_keys: set[str], owner: int) -> None:
        self.value = value
        self.version = version
        self.index_keys = index_keys
        self.owner = owner


class StoreMachine(RuleBasedStateMachine):
    """One store, the model of it, and mirrors fed by watches alone."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.store = self.run(self.backend.open(Path(self.directory.name)))
        self.rows: dict[str, Row] = {}
        self.versions = [Version(10**9)]
        self.sessions: dict[int, Session] = {}
        self.level_watch = self.watch(lambda: self.store.watch_children("/a"))
        self.wanted_watch = self.watch(
            lambda: self.store.watch_children("/", wanted=lambda key: key == WANTED)
        )
        self.level_mirror: dict[str, bytes] = {}
        self.wanted_mirror: dict[str, bytes] = {}

    def run(self, awaitable: Awaitable[T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(awaitable, TIMEOUT_S)

        return self.runner.run(bounded())

    def watch(self, register: Callable[[], Watch]) -> Watch:
        async def registered() -> Watch:
            return register()

        return self.run(registered())

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()
        self.directory.cleanup()

    @rule(number=st.integers(1, 2))
    def toggle_session(self, number: int) -> None:
        session = self.sessions.pop(number, None)
        if session is None:
            self.sessions[number] = self.run(
                self.store.open_session(timeout_ms=100_000, identity=f"s{number}")
            )
            return
        self.run(session.close())
        self.rows = {key: row for key, row in self.rows.items() if row.owner != number}

    @rule(key=KEYS, value=VALUES, index_keys=INDEX_KEYS, expect=EXPECT, owner=st.integers(0, 2))
    def put(self, key: str, value: bytes, index_keys: list[str], expect: str, owner: int) -> None:
        if owner not in self.sessions:
            owner = 0
        wanted = self.expected_version(key, expect)
        put = self.store.put(
            key,
            value,
            expect=wanted,
            session=self.sessions.get(owner),
            indexes=[IndexEntry(INDEX, each) for each in index_keys],
        )
        if not self.holds(key, wanted):
            with pytest.raises(VersionConflict):
                self.run(put)
            return
        made: PutResult = self.run(put)
        assert made.version not in self.versions
        self.versions.append(made.version)
        self.rows[key] = Row(value, made.version, set(index_keys), owner)

    @rule(key=KEYS, expect=EXPECT)
    def delete(self, key: str, expect: str) -> None:
        wanted = self.expected_version(key, expect)
        delete = self.store.delete(key, expect=wanted)
        if not self.holds(key, wanted):
            with pytest.raises(VersionConflict):
                self.run(delete)
            return
        assert self.run(delete) == (self.rows.pop(key, None) is not None)

    @rule(keys=st.lists(KEYS, min_size=2, max_size=6), data=st.data())
    def burst(self, keys: list[str], data: st.DataObject) -> None:
        """Puts and deletes in flight together take effect in their order."""
        values = [data.draw(st.none() | VALUES) for _ in keys]

        async def issue() -> list[object]:
            return await asyncio.gather(
                *(
                    self.store.delete(key)
                    if value is None
                    else self.store.put(key, value, indexes=[IndexEntry(INDEX, "k1")])
                    for key, value in zip(keys, values, strict=True)
                )
            )

        for key, value, result in zip(keys, values, self.run(issue()), strict=True):
            if value is None:
                assert result == (self.rows.pop(key, None) is not None)
            else:
                assert isinstance(result, PutResult)
                self.versions.append(result.version)
                self.rows[key] = Row(value, result.version, {"k1"}, 0)

    @invariant()
    def reads_agree_with_the_model(self) -> None:
        self.run(self.compare())

    @invariant()
    def mirrors_converge(self) -> None:
        level = {
            key: row.value for key, row in self.rows.items() if key[:-1] == "/a/" and len(key) == 4
        }
        wanted = {key: row.value for key, row in self.rows.items() if key == WANTED}
        self.run(mirror(self.level_watch, self.level_mirror, level))
        self.run(mirror(self.wanted_watch, self.wanted_mirror, wanted))

    async def compare(self) -> None:
        for level in LEVELS:
            begin = children_range(level)[0]
            keys = sorted(
                key
                for key in self.rows
                if key.startswith(begin) and "/" not in key.removeprefix(begin)
            )
            assert await self.store.children(level) == [key.removeprefix(begin) for key in keys]
            records = await self.store.scan(*children_range(level))
            assert [(each.key, each.value, each.version, each.ephemeral) for each in records] == [
                (key, self.rows[key].value, self.rows[key].version, self.rows[key].owner > 0)
                for key in keys
            ]
        hits = await self.store.scan_index(INDEX, "a", "z")
        assert [(hit.index_key, hit.record.key) for hit in hits] == sorted(
            (each, key) for key, row in self.rows.items() for each in row.index_keys
        )

    def expected_version(self, key: str, expect: str) -> Version | None:
        row = self.rows.get(key)
        if expect == "any" or (expect == "current" and row is None):
            return None
        if expect == "absent":
            return ABSENT
        if expect == "current" and row is not None:
            return row.version
        return self.versions[-1 if row is None or self.versions[-1] != row.version else 0]

    def holds(self, key: str, wanted: Version | None) -> bool:
        row = self.rows.get(key)
        return wanted is None or wanted == (ABSENT if row is None else row.version)


async def mirror(watch: Watch, seen: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Take events until the mirror shows what is wanted (the caller bounds the wait)."""
    while seen != wanted:
        event = await anext(watch)
        if event.kind is EventKind.UPSERT and event.record is not None:
            seen[event.key] = event.record.value
        elif event.kind is EventKind.REMOVED:
            seen.pop(event.key, None)
        else:
            raise AssertionError(event)


def test_the_store_behaves_as_the_model(backend: Backend) -> None:
    class Machine(StoreMachine):
        pass

    Machine.backend = backend
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=backend.model_examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
