"""Group commit: operations applied in order to the state before them.  Pure."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from storage.metadata.keys import level_of, sequence_key
from storage.metadata.operations import (
    BeginSession,
    Delete,
    EndSessions,
    Operation,
    Put,
    SequencePut,
)
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    PartitionMismatch,
    PutResult,
    Record,
    SessionLost,
    Version,
    VersionConflict,
)


class Stored(NamedTuple):
    """A record without its value, with its session and index entries."""

    version: Version
    modifications: int
    created_ms: int
    modified_ms: int
    partition: str | None
    session_id: int | None
    indexes: tuple[IndexEntry, ...]


class Sequence(NamedTuple):
    """The state of a sequence: its partition and the last number given out."""

    partition: str
    last: int


class Change:
    """The net change of one key: from `before` to `after` (None: not there) and `value`."""

    __slots__ = ("after", "before", "key", "value")

    def __init__(self, key: str, before: Stored | None, after: Stored | None, value: bytes) -> None:
        self.key = key
        self.before = before
        self.after = after
        self.value = value

    @property
    def record(self) -> Record | None:
        """The record after the change."""
        return None if self.after is None else record_of(self.key, self.after, self.value)


class View(Protocol):
    """The committed state, as far as the operations of a group touch it."""

    def stored(self, key: str) -> Stored | None:
        """The record of a key."""
        ...

    def sequence(self, prefix: str) -> Sequence | None:
        """The sequence of a prefix."""
        ...

    def count_children(self, level: str) -> int:
        """Number of records of this level, which is not a sequence's."""
        ...

    def session_exists(self, session_id: int) -> bool:
        """Whether the session is alive."""
        ...

    def session_keys(self, session_id: int) -> Iterable[str]:
        """The keys of a living session's ephemerals."""
        ...


Outcome = PutResult | bool | int | Exception
"""A put's result, whether a delete removed something, a session's id, or the error."""


class Group:
    """Operations on their way into one commit.

    An operation sees the changes of the earlier ones of its group.  One that fails (a condition, a
    wrong partition, a lost session) changes nothing, and the others apply all the same.  There is
    one net change for each touched key, so a key that changes often is written once.
    """

    __slots__ = ("_view", "changes", "ended_sessions", "new_sessions", "revision", "sequences")

    def __init__(self, view: View, revision: int) -> None:
        self._view = view
        self.revision = revision
        self.changes: dict[str, Change] = {}
        self.sequences: dict[str, Sequence] = {}
        self.new_sessions: dict[int, BeginSession] = {}
        self.ended_sessions: set[int] = set()

    def apply(self, operation: Operation) -> Outcome:
        """Apply one operation; an exception returned means that it changed nothing."""
        match operation:
            case Put():
                return self._put(operation)
            case SequencePut():
                return self._sequence_put(operation)
            case Delete():
                return self._delete(operation)
            case BeginSession():
                self.revision += 1
                self.new_sessions[self.revision] = operation
                return self.revision
            case EndSessions():
                return self._end_sessions(operation.session_ids)

    def net_changes(self) -> list[Change]:
        """The changes, without keys that were made and removed within the group."""
        return [
            change
            for change in self.changes.values()
            if change.before is not None or change.after is not None
        ]

    def _put(self, put: Put) -> Outcome:
        current = self._current(put.key)
        error = (
            _wrong_partition(put.key, current, put.partition)
            or _conflict(put.key, current, put.expect)
            or self._lost(put.session_id)
        )
        if error is None and current is None:
            error = self._foreign_in_sequence(put.key)
        if error is not None:
            return error
        return self._store(put.key, put, current, put.session_id)

    def _sequence_put(self, put: SequencePut) -> Outcome:
        sequence = self.sequences.get(put.prefix) or self._view.sequence(put.prefix)
        if sequence is None:
            if self._has_children(put.prefix):
                return InvalidMetadataRequest(
                    f"The prefix {put.prefix!r} has other keys under it: "
                    "give the sequence a level of its own."
                )
            sequence = Sequence(put.partition, 0)
        elif sequence.partition != put.partition:
            return _mismatch(f"The sequence {put.prefix!r}", sequence.partition, put.partition)
        sequence = Sequence(put.partition, sequence.last + 1)
        self.sequences[put.prefix] = sequence
        key = sequence_key(put.prefix, sequence.last)
        return self._store(key, put, None, None)

    def _store(
        self, key: str, put: Put | SequencePut, current: Stored | None, session_id: int | None
    ) -> PutResult:
        # Revisions only rise, so a version never recurs, not even for a key that was deleted and
        # made again.
        self.revision += 1
        after = Stored(
            version=Version(self.revision),
            modifications=0 if current is None else current.modifications + 1,
            created_ms=put.now_ms if current is None else current.created_ms,
            modified_ms=put.now_ms,
            partition=put.partition,
            session_id=session_id,
            indexes=put.indexes,
        )
        self._change(key, after, put.value)
        return PutResult(key, after.version, after.modifications)

    def _delete(self, delete: Delete) -> Outcome:
        current = self._current(delete.key)
        error = _wrong_partition(delete.key, current, delete.partition) or _conflict(
            delete.key, current, delete.expect
        )
        if error is not None:
            return error
        if current is None:
            return False
        self._remove(delete.key)
        return True

    def _remove(self, key: str) -> None:
        self.revision += 1
        self._change(key, None, b"")

    def _end_sessions(self, session_ids: tuple[int, ...]) -> bool:
        ending = {each for each in session_ids if self._session_exists(each)}
        known = filter(self._view.session_exists, ending)
        keys = {key for each in known for key in self._view.session_keys(each)}
        keys.update(key for key, change in self.changes.items() if change.after is not None)
        for key in sorted(keys):
            current = self._current(key)
            if current is not None and current.session_id in ending:
                self._remove(key)
        self.ended_sessions |= ending
        return bool(ending)

    def _current(self, key: str) -> Stored | None:
        change = self.changes.get(key)
        return self._view.stored(key) if change is None else change.after

    def _change(self, key: str, after: Stored | None, value: bytes) -> None:
        change = self.changes.get(key)
        if change is None:
            self.changes[key] = Change(key, self._view.stored(key), after, value)
        else:
            change.after = after
            change.value = value

    def _session_exists(self, session_id: int) -> bool:
        if session_id in self.ended_sessions:
            return False
        return session_id in self.new_sessions or self._view.session_exists(session_id)

    def _lost(self, session_id: int | None) -> Exception | None:
        if session_id is None or self._session_exists(session_id):
            return None
        return SessionLost("The session has ended: open a new one and put the ephemerals again.")

    def _has_children(self, level: str) -> bool:
        children = self._view.count_children(level)
        for key, change in self.changes.items():
            if level_of(key) == level:
                children += (change.after is not None) - (change.before is not None)
        return children > 0

    def _foreign_in_sequence(self, key: str) -> Exception | None:
        level = level_of(key)
        if level not in self.sequences and self._view.sequence(level) is None:
            return None
        return InvalidMetadataRequest(
            f"{key!r} cannot be made under the sequence {level!r}: only the sequence makes keys "
            "there, put it elsewhere."
        )


def record_of(key: str, stored: Stored, value: bytes) -> Record:
    """The record as the interface shows it."""
    return Record(
        key,
        value,
        stored.version,
        stored.modifications,
        stored.created_ms,
        stored.modified_ms,
        stored.session_id is not None,
        stored.partition,
    )


def check_partition_of(key: str, actual: str | None, given: str | None) -> None:
    """Raise `PartitionMismatch` unless the record lives in the partition that the caller gave."""
    if actual != given:
        raise _mismatch(f"The record {key!r}", actual, given)


def _wrong_partition(key: str, current: Stored | None, given: str | None) -> Exception | None:
    if current is None or current.partition == given:
        return None
    return _mismatch(f"The record {key!r}", current.partition, given)


def _mismatch(subject: str, actual: str | None, given: str | None) -> PartitionMismatch:
    return PartitionMismatch(
        f"{subject} lives in partition {actual!r} and was asked for in {given!r}: "
        "derive the partition from its key family."
    )


def _conflict(key: str, current: Stored | None, expect: Version | None) -> Exception | None:
    if expect is None:
        return None
    actual = ABSENT if current is None else current.version
    if actual == expect:
        return None
    return VersionConflict(
        f"{key!r} is at version {actual}, not {expect} ({ABSENT}: absent): "
        "read it again and decide anew."
    )
