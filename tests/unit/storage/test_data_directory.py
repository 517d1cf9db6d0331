"""Layout, lock and format of the data directory, and what a refusal says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from storage.data_directory import (
    FORMAT_VERSION,
    DataDirectory,
    DataDirectoryInUse,
    DataDirectoryTooNew,
    DataDirectoryUnusable,
    NotADataDirectory,
    hold_for_backup,
)

HOLDER = """
import sys
from pathlib import Path
from storage.data_directory import DataDirectory
directory = DataDirectory.open(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there"
    directory = DataDirectory.open(path)
    assert (path / "FORMAT").read_text() == f"magnetar-data {FORMAT_VERSION}\n"
    assert (path / "LOCK").read_text() == f"{os.getpid()}\n"
    assert directory.metadata_path.parent.is_dir()
    assert directory.ledgers_path.is_dir()
    directory.close()
    directory.close()
    DataDirectory.open(path).close()


def test_another_process_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(DataDirectoryInUse) as refusal:
            DataDirectory.open(tmp_path)
        assert f"{tmp_path} is in use by process {holder.pid}" in str(refusal.value)
        holder.kill()
        holder.wait(20)
    DataDirectory.open(tmp_path).close()


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    directory = DataDirectory.open(tmp_path)
    with pytest.raises(DataDirectoryInUse, match=str(os.getpid())):
        DataDirectory.open(tmp_path)
    directory.close()


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text(f"magnetar-data {FORMAT_VERSION + 41}\n")
    with pytest.raises(DataDirectoryTooNew, match=f"data format {FORMAT_VERSION + 41}"):
        DataDirectory.open(tmp_path)
    (tmp_path / "FORMAT").write_text(f"magnetar-data {FORMAT_VERSION}\n")
    DataDirectory.open(tmp_path).close()


@pytest.mark.parametrize("text", ["", "something else", "magnetar-data x", "magnetar-data -1"])
def test_a_format_that_is_none(tmp_path: Path, text: str) -> None:
    DataDirectory.open(tmp_path).close()
    (tmp_path / "FORMAT").write_text(text)
    with pytest.raises(NotADataDirectory, match="no format of Magnetar"):
        DataDirectory.open(tmp_path)


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(NotADataDirectory, match="is not empty"):
        DataDirectory.open(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["LOCK", "letters.txt"]


def test_an_unfinished_backup_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledgers").mkdir()
    (tmp_path / "ledgers" / "0000000001.log").write_bytes(b"half")
    with pytest.raises(NotADataDirectory, match="backup that was not finished"):
        DataDirectory.open(tmp_path)


def test_a_first_start_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path).close()
    (tmp_path / "FORMAT").unlink()
    (tmp_path / "lost+found").mkdir()
    DataDirectory.open(tmp_path).close()
    assert (tmp_path / "FORMAT").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirectoryUnusable, match=r"Not a directory.*--data-dir"):
        DataDirectory.open(tmp_path / "file" / "data")

    def refuse(path: object, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DataDirectoryUnusable, match=r"Permission denied.*LOCK"):
        DataDirectory.open(tmp_path)


def test_removals_and_backups_exclude_each_other(tmp_path: Path) -> None:
    directory = DataDirectory.open(tmp_path)
    with directory.deletion_guard() as allowed:
        assert allowed
    with (
        hold_for_backup(tmp_path),
        hold_for_backup(tmp_path),
        directory.deletion_guard() as allowed,
    ):
        assert not allowed
    with directory.deletion_guard() as allowed:
        assert allowed
    directory.close()
