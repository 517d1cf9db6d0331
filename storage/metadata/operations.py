"""Writes as data.  Keys, sizes and combinations are checked when an operation is made.

Conditions on stored state are checked in `group.py`.  The `size` of an operation is the number of
bytes that it counts in queues and commits.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from config import bounds
from storage.metadata.keys import UNPRINTABLE, level_of
from storage.metadata.store import IndexEntry, InvalidMetadataRequest, RecordTooLarge, Version

_KEY = re.compile(rf"(?:/(?!\.{{1,2}}(?:/|\Z))[^/{UNPRINTABLE}]+)+")
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff\U0010ffff]+")
_INDEX_NAME = re.compile(r"[^/\x00-\x1f\x7f-\x9f\ud800-\udfff\U0010ffff]+")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_SURELY_SHORT = bounds.METADATA_KEY_BYTES // 4
"""Texts of this many characters are within the bound of keys, whatever their encoding."""
_OPERATION_BYTES = 256
"""Memory that an operation takes beside its own bytes, roughly."""


@dataclass(frozen=True, slots=True)
class Put:
    """Store a record.  `session_id` makes it ephemeral."""

    key: str
    value: bytes
    partition: str | None
    expect: Version | None
    session_id: int | None
    indexes: tuple[IndexEntry, ...]
    now_ms: int
    size: int


@dataclass(frozen=True, slots=True)
class SequencePut:
    """Store a record under the next number of a prefix."""

    prefix: str
    value: bytes
    partition: str
    indexes: tuple[IndexEntry, ...]
    now_ms: int
    size: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a record."""

    key: str
    partition: str | None
    expect: Version | None
    size: int = _OPERATION_BYTES


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Make a session."""

    identity: str
    timeout_ms: int
    now_ms: int
    size: int = _OPERATION_BYTES


@dataclass(frozen=True, slots=True)
class EndSessions:
    """End sessions and remove their ephemerals; sessions that have ended already are ignored."""

    session_ids: tuple[int, ...]
    size: int = _OPERATION_BYTES


Operation = Put | SequencePut | Delete | BeginSession | EndSessions


def checked_put(
    key: str,
    value: bytes,
    *,
    partition: str | None,
    expect: Version | None,
    session_id: int | None,
    indexes: Sequence[IndexEntry],
    now_ms: int,
) -> Put:
    """A put within all bounds.  Raises `InvalidMetadataRequest`, `RecordTooLarge`."""
    check_key(key)
    check_partition(partition)
    entries = checked_indexes(indexes)
    size = _checked_size(key, value, entries)
    return Put(key, value, partition, expect, session_id, entries, now_ms, size)


def checked_sequence_put(
    prefix: str,
    value: bytes,
    *,
    partition: str | None,
    expect: Version | None,
    session_id: int | None,
    indexes: Sequence[IndexEntry],
    now_ms: int,
) -> SequencePut:
    """A sequence put within all bounds.  Raises `InvalidMetadataRequest`, `RecordTooLarge`."""
    check_sequence_prefix(prefix)
    if partition is None:
        raise InvalidMetadataRequest(
            f"A put on the sequence {prefix!r} names no partition: pass the sequence's one."
        )
    if expect is not None or session_id is not None:
        raise InvalidMetadataRequest(
            f"A put on the sequence {prefix!r} can be neither conditional nor ephemeral: "
            "leave `expect` and `session` out."
        )
    check_partition(partition)
    entries = checked_indexes(indexes)
    size = _checked_size(prefix, value, entries)
    return SequencePut(prefix, value, partition, entries, now_ms, size)


def checked_delete(key: str, *, partition: str | None, expect: Version | None) -> Delete:
    """A delete of a valid key.  Raises `InvalidMetadataRequest`."""
    check_key(key)
    check_partition(partition)
    return Delete(key, partition, expect)


def checked_session(identity: str, timeout_ms: int, now_ms: int) -> BeginSession:
    """A session with a valid timeout.  Raises `InvalidMetadataRequest`."""
    if not 0 < timeout_ms <= bounds.METADATA_SESSION_TIMEOUT_MAX_MS:
        raise InvalidMetadataRequest(
            f"A session timeout of {timeout_ms} ms is out of range: "
            f"use 1 to {bounds.METADATA_SESSION_TIMEOUT_MAX_MS}."
        )
    if not _TEXT.fullmatch(identity):
        raise InvalidMetadataRequest(
            f"The session identity {identity!r} is empty or not printable: name the process."
        )
    return BeginSession(identity, timeout_ms, now_ms)


def check_key(key: str) -> None:
    """Refuse a key that is too long or no path of printable, non-empty parts."""
    if not _KEY.fullmatch(key):
        raise InvalidMetadataRequest(
            f"{key[:200]!r} is not a key: use a path such as /a/b, and escape_part for its parts."
        )
    if len(key) > _SURELY_SHORT:
        _check_length("key", key)


def check_level(key: str) -> None:
    """Refuse an invalid parent of keys: as `check_key`, but the root is allowed."""
    if key != "/":
        check_key(key)


def check_sequence_prefix(prefix: str) -> None:
    """Refuse a prefix that does not own its level (numbers of two sequences would mix)."""
    if not prefix.endswith("/") or prefix == "/":
        raise InvalidMetadataRequest(
            f"The sequence prefix {prefix[:200]!r} must be a path that ends in a slash: add it."
        )
    check_key(prefix[:-1])


def check_partition(partition: str | None) -> None:
    """Refuse an empty, unprintable or overlong partition key."""
    if partition is None:
        return
    if not _TEXT.fullmatch(partition):
        raise InvalidMetadataRequest(
            f"{partition[:200]!r} is not a partition key: use printable text, or none at all."
        )
    if len(partition) > _SURELY_SHORT:
        _check_length("partition key", partition)


def check_scan(lo: str, hi: str) -> None:
    """Refuse bounds that are not of one level (stores order other keys in different ways)."""
    _check_bounds(lo, hi)
    level = level_of(lo)
    if not level.startswith("/") or not (
        hi == f"{level}/" or (hi.startswith(level) and "/" not in hi[len(level) :])
    ):
        raise InvalidMetadataRequest(
            f"The scan bounds {lo[:200]!r} and {hi[:200]!r} are not of one level: "
            "let them share everything up to the last slash (see children_range)."
        )


def check_index_range(index: str, lo: str, hi: str) -> None:
    """Refuse an invalid index name, and an empty upper bound (which stores read differently)."""
    _check_index_name(index)
    _check_bounds(lo, hi)
    if not hi:
        raise InvalidMetadataRequest(
            f"A range of index {index!r} from {lo[:200]!r} has no upper bound: "
            "pass one (see prefix_range)."
        )


def checked_indexes(indexes: Sequence[IndexEntry]) -> tuple[IndexEntry, ...]:
    """The entries, once each.  Raises for invalid ones (stores break on some of them)."""
    if not indexes:
        return ()
    for entry in indexes:
        _check_index_name(entry.index)
        key = entry.key
        if not _TEXT.fullmatch(key):
            raise InvalidMetadataRequest(
                f"The secondary key {key[:200]!r} of index {entry.index!r} is empty or not "
                "printable: leave the entry out, or use escape_part."
            )
        if len(key) > _SURELY_SHORT:
            _check_length("secondary key", key)
    if len(indexes) > bounds.METADATA_INDEX_ENTRIES:
        raise RecordTooLarge(
            f"A record has {len(indexes)} index entries: "
            f"keep it to {bounds.METADATA_INDEX_ENTRIES}."
        )
    return tuple(indexes) if len(indexes) == 1 else tuple(dict.fromkeys(indexes))


def _check_bounds(lo: str, hi: str) -> None:
    if _UNSTORABLE.search(lo) or _UNSTORABLE.search(hi):
        raise InvalidMetadataRequest(
            f"The bounds {lo[:200]!r} and {hi[:200]!r} hold characters that no key has: "
            "use escape_part."
        )


def _check_index_name(index: str) -> None:
    if not _INDEX_NAME.fullmatch(index):
        raise InvalidMetadataRequest(
            f"{index[:200]!r} is not an index name: use printable text without slashes."
        )
    if len(index) > _SURELY_SHORT:
        _check_length("index name", index)


def _check_length(what: str, text: str) -> None:
    if len(text) > bounds.METADATA_KEY_BYTES or len(text.encode()) > bounds.METADATA_KEY_BYTES:
        raise RecordTooLarge(
            f"The {what} {text[:100]!r}... is longer than {bounds.METADATA_KEY_BYTES} bytes: "
            "use a shorter one."
        )


def _checked_size(key: str, value: bytes, indexes: tuple[IndexEntry, ...]) -> int:
    if len(value) > bounds.METADATA_VALUE_BYTES:
        raise RecordTooLarge(
            f"The value of {key!r} has {len(value)} bytes: "
            f"keep it to {bounds.METADATA_VALUE_BYTES}."
        )
    size = _OPERATION_BYTES + len(key) + len(value)
    for entry in indexes:
        size += len(entry.index) + len(entry.key)
    if size > bounds.METADATA_REQUEST_BYTES:
        raise RecordTooLarge(
            f"The put of {key!r} has {size} bytes with its index entries: "
            f"keep it to {bounds.METADATA_REQUEST_BYTES}."
        )
    return size
