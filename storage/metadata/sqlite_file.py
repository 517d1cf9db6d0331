"""The SQLite file of the metadata store: schema, versions, connections, errors, backup.

One process owns the file, by the lock of the data directory that it lies in.
"""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

from config import bounds
from magnetar.protocol.server_error import OperatorError, ServerError
from storage.metadata.store import MetadataError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x4D61676E
OLDEST_SQLITE = (3, 38, 0)
"""STRICT tables (3.37) and JSON functions that are always there (3.38)."""
BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for another process that reads the file."""

# `depth` is the number of slashes in the key.  It comes first in the order of records, so that the
# direct children of a path are one range, whatever is below them.
_SCHEMA = f"""
CREATE TABLE record (
    id INTEGER PRIMARY KEY,
    depth INTEGER NOT NULL,
    key TEXT NOT NULL,
    version INTEGER NOT NULL,
    modifications INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    partition TEXT,
    session_id INTEGER,
    indexes TEXT,
    value BLOB NOT NULL,
    UNIQUE (depth, key)
) STRICT;
CREATE INDEX record_by_session ON record (session_id) WHERE session_id IS NOT NULL;
CREATE TABLE index_entry (
    name TEXT NOT NULL,
    index_key TEXT NOT NULL,
    key TEXT NOT NULL,
    depth INTEGER NOT NULL,
    PRIMARY KEY (name, index_key, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE sequence (
    prefix TEXT NOT NULL PRIMARY KEY,
    partition TEXT NOT NULL,
    last INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE session (
    id INTEGER PRIMARY KEY,
    identity TEXT NOT NULL,
    timeout_ms INTEGER NOT NULL,
    opened_ms INTEGER NOT NULL
) STRICT;
CREATE TABLE store (revision INTEGER NOT NULL) STRICT;
INSERT INTO store (revision) VALUES (0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full: free space, writes work again then",
    sqlite3.SQLITE_IOERR: "the disk failed: look at the kernel log and the disk's health",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: stop, restore the newest backup",
    sqlite3.SQLITE_NOTADB: "this is not a metadata file: look at the data directory, or restore "
    "the newest backup",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: look at the directory and its permissions",
    sqlite3.SQLITE_READONLY: "the file is read-only: look at its permissions and the mount",
    sqlite3.SQLITE_BUSY: "another process holds the file: end it, only the broker may write here",
}


class UnknownMetadataFile(OperatorError):
    """The file is of a newer version, or of another program.  Nothing was changed."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


def open_file(path: Path) -> sqlite3.Connection:
    """The writing connection, with the schema made if the file is new.

    Raises `UnknownMetadataFile`, `MetadataError`.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise UnknownMetadataFile(
            f"This Python has SQLite {sqlite3.sqlite_version}, and {oldest} is the oldest that "
            "works: use a Python built with a newer one."
        )
    try:
        connection = connect(path)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise metadata_error(error, path) from error
    return connection


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection that any one thread at a time may use, without implicit transactions."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=BUSY_TIMEOUT_S
    )
    connection.execute(f"PRAGMA cache_size = {-bounds.METADATA_PAGE_CACHE_BYTES // 1024}")
    connection.execute("PRAGMA temp_store = MEMORY")
    # With the write-ahead log, a commit returns when the log is synced.
    connection.execute("PRAGMA synchronous = FULL")
    if read_only:
        connection.execute("PRAGMA query_only = TRUE")
    return connection


def metadata_error(error: sqlite3.Error, path: Path) -> MetadataError:
    """The error of SQLite as a sentence with a next step."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    advice = _ADVICE.get(code, "look at the broker's log, then try again")
    return MetadataError(f"The metadata file {path} reports {str(error)!r}: {advice}.")


def back_up(path: Path, target: Path, at_moment: Callable[[], None] = lambda: None) -> None:
    """Copy the file as of one moment, while it is in use, to a new or replaced `target`.

    `at_moment` is called in that moment: it sees every commit that is in the copy, and no later
    commit has been acknowledged yet.  Writers wait for it, so it must be quick.
    `target` appears whole and durable, or not at all.  Raises `MetadataError`.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with (
            closing(connect(path, read_only=True)) as source,
            closing(sqlite3.connect(partial)) as destination,
        ):
            _hold_moment(path, source, at_moment)
            # In one step: stepwise backups start anew with every commit in between.
            source.backup(destination)
        _sync(partial)
        partial.replace(target)
        _sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise MetadataError(
            f"The metadata file {path} could not be copied to {target} ({error}): "
            "look at the target's directory and its space, then try again."
        ) from error


def _hold_moment(path: Path, source: sqlite3.Connection, at_moment: Callable[[], None]) -> None:
    """Begin a read on `source` while nobody may commit, and call `at_moment` before they may."""
    with closing(connect(path)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        source.execute("BEGIN")
        # The first read takes the snapshot, and the backup reads in it.
        source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        at_moment()
        lock.execute("ROLLBACK")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version = _pragma(connection, "user_version")
    application = _pragma(connection, "application_id")
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise UnknownMetadataFile(
            f"{path} is a database of another program: look at the data directory's path."
        )
    if version > SCHEMA_VERSION:
        raise UnknownMetadataFile(
            f"{path} has schema version {version}, and this program knows up to "
            f"{SCHEMA_VERSION}: start the newer version that wrote it, or restore a backup."
        )
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise UnknownMetadataFile(
            f"{path} cannot have a write-ahead log (journal mode {mode!r}): "
            "put the data directory on a local file system."
        )
    connection.execute(f"PRAGMA journal_size_limit = {bounds.METADATA_WAL_KEEP_BYTES}")
    if not tables:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
