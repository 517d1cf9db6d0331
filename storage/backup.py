"""Copying a data directory while a broker runs on it.

The copy is of one moment.  First a hold, so that reclaim removes and merges nothing; then, while no
metadata may be committed, the lengths of the log files are noted; then the metadata are copied as
of that moment, and of the ledger log what it had then.  Whatever the metadata speak of was in the
log before; and what the log has of transactions had its claims in the metadata before.  With a
longer log, messages of transactions that began or went on during the backup would have no claim in
the copy, and be read as committed.  What was being written in that moment is a torn group, which
any start cleans up.  The format file is written last: an unfinished copy does not open.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from storage.data_directory import (
    DataDirectoryError,
    check_format,
    hold_for_backup,
    ledgers_path,
    make_layout,
    metadata_path,
    sync_directory,
    write_format,
)
from storage.ledger.local.log_files import INDEX_SUFFIX, LOG_SUFFIX, number_of
from storage.metadata.sqlite_file import back_up

CHUNK_BYTES = 1024 * 1024


class BackupRefused(DataDirectoryError):
    """The target is not a place for a backup."""


def backup(source: Path, target: Path) -> None:
    """Copy the data directory `source` to `target`, which must not exist or be empty.

    The copy opens as a data directory.  If it fails, what was copied is removed again.
    Raises `NotADataDirectory`, `DataDirectoryTooNew`, `BackupRefused`, `MetadataError`, `OSError`.
    """
    source, target = source.absolute(), target.absolute()
    check_format(source)
    if target.resolve().is_relative_to(source.resolve()):
        raise BackupRefused(f"{target} is inside of {source}: name a directory outside of it.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupRefused(f"{target} is there and not an empty directory: name a new one.")
    target.mkdir(parents=True, exist_ok=True)
    try:
        _copy(source, target)
    except BaseException:
        for entry in target.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        raise


def _copy(source: Path, target: Path) -> None:
    make_layout(target)
    lengths: dict[str, int] = {}
    with hold_for_backup(source):

        def note_lengths() -> None:
            lengths.update(_lengths(ledgers_path(source)))

        back_up(metadata_path(source), metadata_path(target), note_lengths)
        _copy_log(ledgers_path(source), ledgers_path(target), lengths)
    sync_directory(target.parent)
    write_format(target)


def _lengths(directory: Path) -> dict[str, int]:
    """How long the log and index files are now, by name."""
    found: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if number_of(entry.name) is not None:
                # A new file whose first group failed goes at once; nothing else does.
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat().st_size
    return found


def _copy_log(source: Path, target: Path, lengths: Mapping[str, int]) -> None:
    """Copy these log files as far as they went, and the index files that there were of those."""
    for name in sorted(name for name in lengths if name.endswith(LOG_SUFFIX)):
        try:
            _copy_prefix(source / name, target / name, lengths[name])
        except FileNotFoundError:
            # A new file whose first group failed; nothing else goes during a hold.
            continue
        index = Path(name).with_suffix(INDEX_SUFFIX).name
        if index in lengths:
            _copy_prefix(source / index, target / index, lengths[index])
    sync_directory(target)


def _copy_prefix(source: Path, target: Path, length: int) -> None:
    """Copy the first `length` bytes: the file may be growing."""
    with source.open("rb") as reading, target.open("xb") as writing:
        left = length
        while left:
            data = reading.read(min(left, CHUNK_BYTES))
            if not data:
                break
            writing.write(data)
            left -= len(data)
        writing.flush()
        os.fsync(writing.fileno())
