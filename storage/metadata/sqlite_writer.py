"""The writing side of the SQLite store: one transaction for each group.  Runs on one thread."""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from storage.durable_mark import DurableMark
from storage.metadata import group
from storage.metadata.group import Change, Group, Outcome, Stored, View
from storage.metadata.keys import LAST, level_of
from storage.metadata.known_records import KnownRecords
from storage.metadata.operations import (
    BeginSession,
    Delete,
    EndSessions,
    Operation,
    Put,
    SequencePut,
)
from storage.metadata.sqlite_file import metadata_error
from storage.metadata.store import IndexEntry, Version

_STORED = """json_array(r.key, r.version, r.modifications, r.created_ms, r.modified_ms,
    r.partition, r.session_id, json(r.indexes))"""

_LOAD = f"""
SELECT
    (SELECT json_group_array({_STORED}) FROM json_each(:keys) AS w CROSS JOIN record AS r
        ON r.depth = json_extract(w.value, '$[0]') AND r.key = json_extract(w.value, '$[1]')),
    (SELECT json_group_array({_STORED}) FROM json_each(:sessions) AS w CROSS JOIN record AS r
        ON r.session_id = w.value),
    (SELECT json_group_array(json_array(s.prefix, s.partition, s.last))
        FROM json_each(:levels) AS w CROSS JOIN sequence AS s ON s.prefix = w.value),
    (SELECT json_group_array(json_array(json_extract(w.value, '$[1]'), (
        SELECT count(*) FROM record AS r WHERE r.depth = json_extract(w.value, '$[0]')
            AND r.key > json_extract(w.value, '$[1]')
            AND r.key < json_extract(w.value, '$[1]') || :last)))
        FROM json_each(:prefixes) AS w
        WHERE json_extract(w.value, '$[1]') NOT IN (SELECT prefix FROM sequence))
"""

# A group is saved by one insert into a view of this connection, whose trigger changes the tables.
# Outside of any transaction the statement is one itself.
_SAVE_VIEW = """
CREATE TEMP VIEW saved AS SELECT NULL AS gone, NULL AS old_entries, NULL AS new_entries,
    NULL AS made_levels, NULL AS made, NULL AS records, NULL AS record_values, NULL AS sequences,
    NULL AS new_sessions, NULL AS ended_sessions, NULL AS revision
"""

_INSERT = """
    INSERT INTO record (depth, key, version, modifications, created_ms, modified_ms, partition,
        session_id, indexes, value)
    SELECT json_extract(c.value, '$[0]'), json_extract(c.value, '$[1]'),
        json_extract(c.value, '$[2]'), json_extract(c.value, '$[3]'),
        json_extract(c.value, '$[4]'), json_extract(c.value, '$[5]'),
        json_extract(c.value, '$[6]'), json_extract(c.value, '$[7]'),
        json_extract(c.value, '$[8]'),
        coalesce(substr(NEW.record_values, json_extract(c.value, '$[9]'),
            json_extract(c.value, '$[10]')), x'')"""

# The inserts of `made` fail if a record is there already, and the check of `made_levels` fails
# below a sequence: so the save verifies what `KnownRecords` assumed.
_SAVE_TRIGGER = f"""
CREATE TEMP TRIGGER save INSTEAD OF INSERT ON saved BEGIN
    DELETE FROM record WHERE id IN (
        SELECT r.id FROM json_each(NEW.gone) AS c CROSS JOIN record AS r
        ON r.depth = json_extract(c.value, '$[0]') AND r.key = json_extract(c.value, '$[1]'));
    DELETE FROM index_entry WHERE (name, index_key, key) IN (
        SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
        FROM json_each(NEW.old_entries));
    INSERT INTO index_entry (name, index_key, key, depth)
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
        json_extract(value, '$[3]') FROM json_each(NEW.new_entries);
    SELECT raise(ABORT, 'below a sequence') WHERE EXISTS (
        SELECT 1 FROM json_each(NEW.made_levels) AS c CROSS JOIN sequence AS s
        ON s.prefix = c.value);
    {_INSERT} FROM json_each(NEW.made) AS c;
    {_INSERT} FROM json_each(NEW.records) AS c WHERE TRUE
    ON CONFLICT (depth, key) DO UPDATE SET version = excluded.version,
        modifications = excluded.modifications, created_ms = excluded.created_ms,
        modified_ms = excluded.modified_ms, partition = excluded.partition,
        session_id = excluded.session_id, indexes = excluded.indexes, value = excluded.value;
    INSERT OR REPLACE INTO sequence (prefix, partition, last)
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
        FROM json_each(NEW.sequences);
    INSERT INTO session (id, identity, timeout_ms, opened_ms)
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
        json_extract(value, '$[3]') FROM json_each(NEW.new_sessions);
    DELETE FROM session WHERE id IN (SELECT value FROM json_each(NEW.ended_sessions));
    UPDATE store SET revision = NEW.revision;
END
"""

_SAVE = "INSERT INTO saved VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


class CommitResult(NamedTuple):
    """The result of a group: an outcome for each operation, net changes, the revision after it."""

    outcomes: list[Outcome]
    changes: list[Change]
    revision: int


class SqliteWriter:
    """Applies groups to the file.  Not for two threads at once.

    A group takes two statements, however many records it changes: one loads the records that it
    touches, one saves the net changes and commits.  It takes only the second one if `KnownRecords`
    has all that is needed.
    """

    # Each call into SQLite lets go of the interpreter and must win it back from a busy event loop.
    # So the number of calls, not that of rows, decides how long a group takes.
    #
    # Nothing changes between the two statements: no other connection writes.

    def __init__(
        self, connection: sqlite3.Connection, path: Path, mark: DurableMark | None = None
    ) -> None:
        """Raises `MetadataError` if the file cannot be read; `mark` gets each revision."""
        self._mark = mark
        self._connection = connection
        self._path = path
        try:
            self.revision = self._stored_revision()
            rows = connection.execute("SELECT id FROM session ORDER BY id").fetchall()
            connection.execute(_SAVE_VIEW)
            connection.execute(_SAVE_TRIGGER)
        except sqlite3.Error as error:
            raise metadata_error(error, path) from error
        self._sessions: set[int] = {row[0] for row in rows}
        self._known = KnownRecords()

    def expire_sessions(self) -> int:
        """End every session there is, in one transaction, and return their number.

        For the start of the only process that owns the file: the processes that made them are gone.
        """
        expired = len(self._sessions)
        if expired:
            self.commit([EndSessions(tuple(sorted(self._sessions)))])
        return expired

    def commit(self, operations: Sequence[Operation]) -> CommitResult:
        """Apply operations in order, durably.  Raises `MetadataError`: then none took effect."""
        assumed = self._known.view(operations, self._sessions)
        if assumed is not None:
            try:
                return self._apply(operations, assumed)
            except sqlite3.IntegrityError:
                # An assumption was wrong, and nothing was changed: load the state, apply anew.
                pass
            except sqlite3.Error as error:
                raise metadata_error(error, self._path) from error
        try:
            return self._apply(operations, self._load(operations))
        except sqlite3.Error as error:
            raise metadata_error(error, self._path) from error

    def _apply(self, operations: Sequence[Operation], view: View) -> CommitResult:
        """Raises `sqlite3.Error`: then nothing took effect."""
        made = Group(view, self.revision)
        outcomes = [made.apply(operation) for operation in operations]
        changes = made.net_changes()
        if made.revision != self.revision or made.ended_sessions:
            try:
                self._save(made, changes)
            except sqlite3.Error:
                self._known.clear()
                # A commit that reports an error may have taken effect: the revision shows it.
                if not self._took_effect(made):
                    raise
        if self._mark is not None and made.revision != self.revision:
            self._mark.note(made.revision)
        self._known.take(changes)
        self.revision = made.revision
        self._sessions.update(made.new_sessions)
        self._sessions -= made.ended_sessions
        return CommitResult(outcomes, changes, self.revision)

    def close(self) -> None:
        """Close the connection; the last one to close empties the write-ahead log."""
        self._connection.close()

    def _load(self, operations: Iterable[Operation]) -> "LoadedView":
        keys: set[str] = set()
        levels: set[str] = set()
        prefixes: set[str] = set()
        sessions: set[int] = set()
        for operation in operations:
            match operation:
                case Put(key=key):
                    keys.add(key)
                    levels.add(level_of(key))
                case SequencePut(prefix=prefix):
                    levels.add(prefix)
                    prefixes.add(prefix)
                case Delete(key=key):
                    keys.add(key)
                case EndSessions(session_ids=session_ids):
                    sessions.update(session_ids)
                case BeginSession():
                    pass
        view = LoadedView(self._sessions)
        if keys or levels or sessions:
            parameters = {
                "keys": json.dumps(_with_depth(keys)),
                "levels": json.dumps(sorted(levels)),
                "prefixes": json.dumps(_with_depth(prefixes)),
                "sessions": json.dumps(sorted(sessions)),
                "last": LAST,
            }
            (row,) = self._connection.execute(_LOAD, parameters).fetchall()
            view.fill(*row)
        return view

    def _save(self, made: Group, changes: list[Change]) -> None:
        gone = [change.key for change in changes if change.after is None]
        old_entries, new_entries = _index_changes(changes)
        rows, new_rows, values = _rows(changes)
        levels = {level_of(change.key) for change in changes if change.before is None}
        self._connection.execute(
            _SAVE,
            (
                json.dumps(_with_depth(gone)),
                json.dumps(old_entries),
                json.dumps(new_entries),
                json.dumps(sorted(levels - {level_of(key) for key in made.sequences})),
                json.dumps(new_rows),
                json.dumps(rows),
                values,
                json.dumps([(prefix, *each) for prefix, each in made.sequences.items()]),
                json.dumps(
                    [
                        (session_id, begun.identity, begun.timeout_ms, begun.now_ms)
                        for session_id, begun in made.new_sessions.items()
                    ]
                ),
                json.dumps(list(made.ended_sessions)),
                made.revision,
            ),
        )

    def _took_effect(self, made: Group) -> bool:
        if made.revision == self.revision:
            return False
        try:
            return self._stored_revision() == made.revision
        except sqlite3.Error:
            return False

    def _stored_revision(self) -> int:
        return int(self._connection.execute("SELECT revision FROM store").fetchone()[0])


class LoadedView(group.View):
    """The records, sequences and sessions that a group touches, loaded by one statement."""

    __slots__ = ("_children", "_sequences", "_session_keys", "_sessions", "_stored")

    def __init__(self, sessions: set[int]) -> None:
        self._sessions = sessions
        self._stored: dict[str, Stored] = {}
        self._session_keys: dict[int, list[str]] = {}
        self._sequences: dict[str, group.Sequence] = {}
        self._children: dict[str, int] = {}

    def fill(self, records: str, ephemerals: str, sequences: str, children: str) -> None:
        """Take the columns of the load statement (JSON arrays)."""
        for key, *columns in json.loads(records):
            self._stored[key] = _stored(*columns)
        for key, *columns in json.loads(ephemerals):
            stored = _stored(*columns)
            self._stored[key] = stored
            if stored.session_id is not None:
                self._session_keys.setdefault(stored.session_id, []).append(key)
        for prefix, partition, last in json.loads(sequences):
            self._sequences[prefix] = group.Sequence(partition, last)
        self._children.update(json.loads(children))

    def stored(self, key: str) -> Stored | None:
        """See `View.stored`."""
        return self._stored.get(key)

    def sequence(self, prefix: str) -> group.Sequence | None:
        """See `View.sequence`."""
        return self._sequences.get(prefix)

    def count_children(self, level: str) -> int:
        """See `View.count_children`."""
        return self._children.get(level, 0)

    def session_exists(self, session_id: int) -> bool:
        """See `View.session_exists`."""
        return session_id in self._sessions

    def session_keys(self, session_id: int) -> Iterable[str]:
        """See `View.session_keys`."""
        return self._session_keys.get(session_id, ())


def _stored(
    version: int,
    modifications: int,
    created_ms: int,
    modified_ms: int,
    partition: str | None,
    session_id: int | None,
    indexes: list[list[str]] | None,
) -> Stored:
    return Stored(
        Version(version),
        modifications,
        created_ms,
        modified_ms,
        partition,
        session_id,
        tuple(IndexEntry(*entry) for entry in indexes or ()),
    )


_Row = tuple[object, ...]


def _rows(changes: Iterable[Change]) -> tuple[list[_Row], list[_Row], bytes]:
    """A row for each record that is put, another list for those made, their values in one piece."""
    rows: list[_Row] = []
    new_rows: list[_Row] = []
    values: list[bytes] = []
    offset = 1
    for change in changes:
        after = change.after
        if after is None:
            continue
        size = len(change.value)
        (new_rows if change.before is None else rows).append(
            (
                change.key.count("/"),
                change.key,
                after.version,
                after.modifications,
                after.created_ms,
                after.modified_ms,
                after.partition,
                after.session_id,
                [(each.index, each.key) for each in after.indexes] or None,
                offset,
                size,
            )
        )
        values.append(change.value)
        offset += size
    return rows, new_rows, b"".join(values)


def _with_depth(keys: Iterable[str]) -> list[tuple[int, str]]:
    return sorted((key.count("/"), key) for key in keys)


def _index_changes(
    changes: Iterable[Change],
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str, int]]]:
    old_entries: list[tuple[str, str, str]] = []
    new_entries: list[tuple[str, str, str, int]] = []
    for change in changes:
        listed_before = () if change.before is None else change.before.indexes
        listed_after = () if change.after is None else change.after.indexes
        if listed_before == listed_after:
            continue
        key, depth = change.key, change.key.count("/")
        before = frozenset(listed_before if listed_after else ())
        after = frozenset(listed_after if listed_before else ())
        old_entries += [(each.index, each.key, key) for each in listed_before if each not in after]
        new_entries += [
            (each.index, each.key, key, depth) for each in listed_after if each not in before
        ]
    return old_entries, new_entries
