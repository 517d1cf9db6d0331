"""Copying a data directory while a broker runs on it.

The order makes the copy whole: first a hold, so that reclaim removes and merges nothing; then the
metadata as of one moment; then the ledger log.  The log is append-only and copied later than the
metadata, so it has every entry that the metadata may speak of, and every entry acknowledged before
the backup began.  What it has beyond that moment (a torn group at its end, ledgers without a
record) is what any start cleans up.  The format file is written last: an unfinished copy does not
open.
"""

import os
import shutil
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
from storage.ledger.local.log_files import index_name, log_name, number_of
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
    with hold_for_backup(source):
        back_up(metadata_path(source), metadata_path(target))
        _copy_log(ledgers_path(source), ledgers_path(target))
    sync_directory(target.parent)
    write_format(target)


def _copy_log(source: Path, target: Path) -> None:
    """Copy the log files there are now, and the index files of those."""
    names = {entry.name for entry in source.iterdir()}
    numbers = sorted(number for name in names if (number := number_of(name)) is not None)
    for number in dict.fromkeys(numbers):
        if log_name(number) in names:
            try:
                _copy_prefix(source / log_name(number), target / log_name(number))
            except FileNotFoundError:
                # A new file whose first group failed; nothing else goes during a hold.
                continue
            if index_name(number) in names:
                _copy_prefix(source / index_name(number), target / index_name(number))
    sync_directory(target)


def _copy_prefix(source: Path, target: Path) -> None:
    """Copy as many bytes as the file has now: it may be growing."""
    with source.open("rb") as reading, target.open("xb") as writing:
        left = os.fstat(reading.fileno()).st_size
        while left:
            data = reading.read(min(left, CHUNK_BYTES))
            if not data:
                break
            writing.write(data)
            left -= len(data)
        writing.flush()
        os.fsync(writing.fileno())
