"""Copies a data directory while a broker runs on it."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from storage.clock import SystemClock
from storage.data_directory import (
    DataDirectoryError,
    check_format,
    copied_s,
    hold_for_backup,
    ledgers_path,
    make_layout,
    metadata_path,
    sync_directory,
    write_copied,
    write_format,
)
from storage.ledger.local.log_files import INDEX_SUFFIX, LOG_SUFFIX, number_of
from storage.metadata.sqlite_file import back_up

CHUNK_BYTES = 1024 * 1024


class BackupRefused(DataDirectoryError):
    """The target directory cannot take a backup."""


def backup(source: Path, target: Path) -> None:
    """Copy the data directory `source` to `target`, which must not exist or be empty.

    The copy is of one moment, and opens as a data directory.  If it fails, the files copied so far
    are removed again.

    Raises `DataDirectoryError`, of which `NotADataDirectory`, `DataDirectoryTooNew` and
    `BackupRefused` are some, `MetadataError`, `OSError`.
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
    # Before anything is copied: what the broker writes from now on may be missing in the copy.
    # One of a copy that no broker has started on is as old as that copy.
    made_s = copied_s(source)
    write_copied(target, SystemClock().now_ms() // 1000 if made_s is None else made_s)
    lengths: dict[str, int] = {}
    # While the hold lasts, reclaim removes and merges no file of the log.
    with hold_for_backup(source):

        def note_lengths() -> None:
            lengths.update(_lengths(ledgers_path(source)))

        # The lengths are noted while no metadata can be committed.  So the log in the copy has all
        # entries that the metadata name.  It has no more: messages that a transaction wrote later
        # would have no claim in these metadata, and be read as committed.  A group that was being
        # written at that moment is torn in the copy; any start cleans that up.
        back_up(metadata_path(source), metadata_path(target), note_lengths)
        _copy_log(ledgers_path(source), ledgers_path(target), lengths)
    sync_directory(target.parent)
    # Last: an unfinished copy does not open.
    write_format(target)


def _lengths(directory: Path) -> dict[str, int]:
    """The present lengths of the log and index files, by name."""
    found: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            if number_of(entry.name) is not None:
                # A new file whose first group failed is removed; no other file is, during a hold.
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat().st_size
    return found


def _copy_log(source: Path, target: Path, lengths: Mapping[str, int]) -> None:
    """Copy the log files up to these lengths, and those of their index files that are listed."""
    for name in sorted(name for name in lengths if name.endswith(LOG_SUFFIX)):
        try:
            _copy_prefix(source / name, target / name, lengths[name])
        except FileNotFoundError:
            # A new file whose first group failed.
            continue
        index = Path(name).with_suffix(INDEX_SUFFIX).name
        if index in lengths:
            _copy_prefix(source / index, target / index, lengths[index])
    sync_directory(target)


def _copy_prefix(source: Path, target: Path, length: int) -> None:
    """Copy the first `length` bytes; the file may grow meanwhile."""
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
