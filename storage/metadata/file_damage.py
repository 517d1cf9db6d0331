"""Damage of the metadata file: commits that were lost, and pages that changed.

SQLite has no checksums over its pages.  So a clean end of the process leaves the checksum of each
block in a file beside the metadata file, and the next start compares them.  After a crash there are
none: then SQLite's own check of the structure runs.

What is found is kept in a third file until an operator removes it, as later starts could not find
it again.
"""

import json
import os
import sqlite3
import struct
import threading
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import structlog

from config import bounds
from storage.metadata.sqlite_file import connect

_log = structlog.get_logger(__name__)

crc32c = google_crc32c.value
BLOCK_BYTES = 4096
MAX_PROBLEMS = 20
"""Most problems of one check that are reported."""
_HEADER = struct.Struct("<8sQ")
_CRC = struct.Struct("<I")
_MAGIC = b"MGPAGES1"


@dataclass(slots=True)
class FileDamage:
    """Damage of one metadata file.

    `sentences` are for the operator.  `blocks` are the contents of blocks that changed, and
    `streams` the ledger paths of topics in such blocks.  `is_behind` says that commits were lost,
    and `checked` that the whole file is as it was left.
    """

    sentences: list[str] = field(default_factory=list)
    streams: list[str] = field(default_factory=list)
    blocks: list[bytes] = field(default_factory=list)
    is_behind: bool = False
    checked: bool = False


def sums_path(path: Path) -> Path:
    """The file with the checksums of a clean end."""
    return path.with_name(f"{path.name}.sums")


def damage_path(path: Path) -> Path:
    """The file that keeps what was found."""
    return path.with_name(f"{path.name}.damage")


def write_sums(path: Path) -> None:
    """Leave the checksums of the closed file.  A file without its log only, and not too large."""
    if _has_log(path) or path.stat().st_size > bounds.METADATA_SUMS_BYTES:
        return
    data = path.read_bytes()
    sums = b"".join(_CRC.pack(crc32c(block)) for block in _blocks(data))
    body = _HEADER.pack(_MAGIC, len(data)) + sums
    _write_whole(sums_path(path), body + _CRC.pack(crc32c(body)))


def take_sums(path: Path, damage: FileDamage) -> None:
    """Compare the file with the checksums of its clean end, and remove these.

    Call it before the file is opened, as it changes then.  Raises `OSError`.
    """
    try:
        body = sums_path(path).read_bytes()
    except FileNotFoundError:
        return
    # The removal must be durable before the file changes, or a later start would find sums of an
    # older file.
    sums_path(path).unlink()
    _sync_directory(path.parent)
    if _has_log(path) or not path.exists() or len(body) < _HEADER.size + _CRC.size:
        return
    body, crc = body[: -_CRC.size], body[-_CRC.size :]
    magic, size = _HEADER.unpack_from(body)
    if magic != _MAGIC or crc != _CRC.pack(crc32c(body)):
        return
    data = path.read_bytes()
    if len(data) != size:
        damage.sentences.append(
            f"The metadata file {path} was left with {size} bytes and has {len(data)}: it was "
            "replaced, or cut."
        )
    sums = body[_HEADER.size :]
    changed = [
        (number, block)
        for number, block in enumerate(_blocks(data[:size]))
        if _CRC.pack(crc32c(block)) != sums[number * _CRC.size : (number + 1) * _CRC.size]
    ]
    damage.checked = not changed and len(data) == size
    if changed:
        damage.blocks += [block for _, block in changed]
        numbers = ", ".join(str(number + 1) for number, _ in changed[:MAX_PROBLEMS])
        damage.sentences.append(
            f"The metadata file {path} changed while it was not in use: {len(changed)} pages "
            f"({numbers}) are damaged."
        )


def check_structure(path: Path) -> list[str]:
    """Sentences about what SQLite's check of the structure finds; [] if the file is whole."""
    return StructureCheck(path).run()


class StructureCheck:
    """One run of SQLite's check of the structure, which `stop` ends early."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path, read_only=True)
        self._stopped = False
        self._ended = threading.Lock()

    def run(self) -> list[str]:
        """Sentences about what is damaged; [] if nothing is, or it was stopped."""
        with self._ended, closing(self._connection) as connection:
            if self._stopped:
                return []
            try:
                rows = connection.execute(f"PRAGMA quick_check({MAX_PROBLEMS})").fetchall()
            except sqlite3.DatabaseError as error:
                rows = [(str(error),)]
        if self._stopped:
            return []
        problems = [line for (text,) in rows for line in str(text).splitlines() if text != "ok"]
        return [f"The metadata file {self._path} is damaged: {problem}." for problem in problems]

    def stop(self) -> None:
        """End it, and return when the connection is closed."""
        self._stopped = True
        with suppress(sqlite3.ProgrammingError):
            self._connection.interrupt()
        with self._ended:
            pass


def load_damage(path: Path, damage: FileDamage) -> None:
    """Add the findings that earlier starts kept."""
    try:
        kept = json.loads(damage_path(path).read_text("utf-8"))
        damage.sentences += [str(each) for each in kept["sentences"]]
        damage.streams += [str(each) for each in kept["streams"]]
        damage.is_behind |= bool(kept["is_behind"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError):
        damage.sentences.append(f"{damage_path(path)} is there and cannot be read.")


def keep_damage(path: Path, damage: FileDamage) -> None:
    """Keep findings for later starts."""
    value = {
        "sentences": damage.sentences,
        "streams": damage.streams,
        "is_behind": damage.is_behind,
    }
    try:
        _write_whole(damage_path(path), json.dumps(value, indent=1).encode())
    except OSError as error:
        _log.warning("metadata_damage_not_kept", file=str(damage_path(path)), error=str(error))


def _has_log(path: Path) -> bool:
    with suppress(OSError):
        return path.with_name(f"{path.name}-wal").stat().st_size > 0
    return False


def _blocks(data: bytes) -> list[bytes]:
    return [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]


def _write_whole(path: Path, body: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
