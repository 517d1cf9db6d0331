"""The real disk: short writes, many pieces, a full file system, and where its jobs run."""

import asyncio
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from storage.ledger.local.disk import IOV_MAX, RealDisk, ledger_error, write_all
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.store import DiskFull, LedgerError
from tests.unit.storage.ledger.local.support import (
    append_all,
    append_each,
    new_metadata,
    opened,
    read_all,
    started,
)


async def appended(disk: RealDisk, name: str, buffers: Sequence[bytes], *, create: bool) -> None:
    outcome: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    disk.append(name, buffers, create=create, done=outcome.set_result)
    error = await outcome
    if error is not None:
        raise error


@pytest.mark.parametrize("offset", [None, 5])
@pytest.mark.parametrize("at_once", [1, 7, 1000, 10**9])
def test_short_writes_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int | None, at_once: int
) -> None:
    pieces = [b"", *(os.urandom(n % 5) for n in range(3 * IOV_MAX)), b""]
    real = os.pwritev

    def short(fd: int, buffers: Sequence[bytes], *where: int) -> int:
        data = b"".join(buffers)[:at_once]
        return real(fd, [data], *where) if where else os.write(fd, data)

    monkeypatch.setattr(os, "writev", short)
    monkeypatch.setattr(os, "pwritev", short)
    path = tmp_path / "file"
    path.write_bytes(b"\0" * (offset or 0))
    fd = os.open(path, os.O_WRONLY | (os.O_APPEND if offset is None else 0))
    write_all(fd, pieces, offset)
    os.close(fd)
    assert path.read_bytes()[offset or 0 :] == b"".join(pieces)


def disk_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name.partition("_")[0] for name in names if name.startswith("ledger")}


async def test_files(tmp_path: Path) -> None:
    before = threading.active_count()
    disk = RealDisk(tmp_path / "made" / "here")
    await appended(disk, "a", [b"one", b"two"], create=True)
    assert disk_threads() == {"ledger-log"}
    await appended(disk, "a", [b"three"], create=False)
    await appended(disk, "b", [b"x"] * (2 * IOV_MAX + 1), create=True)
    await appended(disk, "a", [b"four"], create=False)
    with pytest.raises(FileExistsError):
        await appended(disk, "b", [b"y"], create=True)
    with pytest.raises(FileNotFoundError):
        await appended(disk, "c", [b"y"], create=False)

    def job() -> str:
        assert disk.sizes() == {"a": 15, "b": 2 * IOV_MAX + 1}
        assert disk.pread("a", 3, 100) == b"twothreefour"
        assert disk.map("a")[6:11] == b"three"
        disk.truncate("a", 3)
        disk.write("a", 1, [b"NE", b"W"])
        disk.sync("a")
        disk.rename("a", "d")
        disk.unlink("b")
        disk.unlink("b")
        disk.write("empty", 0, [b""])
        assert disk.map("empty") == b""
        disk.write_whole("whole", [b"all", b"of it"])
        assert disk.pread("whole", 0, 99) == b"allof it"
        assert disk.sizes() == {"d": 4, "whole": 8, "empty": 0}
        return threading.current_thread().name

    assert (await disk.maintain(job)).startswith("ledger-maintain")
    assert (await disk.read(lambda: disk.pread("d", 0, 9))) == b"oNEW"
    assert disk_threads() == {"ledger-log", "ledger-maintain", "ledger-read"}
    await disk.close()
    assert disk_threads() == set()
    assert threading.active_count() <= before + 1, "only the loop's own executor may be left"


async def test_a_broken_request_does_not_end_the_writer_thread(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    with pytest.raises(OSError, match="TypeError"):
        await appended(disk, "a", ["text"], create=True)  # type: ignore[list-item]
    await appended(disk, "b", [b"works"], create=True)
    await disk.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    root = tmp_path / "tiny"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root; the same is tested with a simulated disk")
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted here; the same is tested with a simulated disk")
    yield root
    subprocess.run(["umount", "--lazy", str(root)], check=True)


async def test_a_full_file_system(tiny: Path) -> None:
    """Appends report DiskFull, all that was acknowledged stays, and it works again with room."""
    metadata = new_metadata()
    limits = LedgerLimits(file_bytes=300_000, reclaim_pause_s=3600, seal_retry_s=3600)
    store = await started(RealDisk(tiny), metadata, limits=limits)
    ledger = await store.create(custom={})
    entry = os.urandom(30_000)
    with pytest.raises(DiskFull):
        await append_each(ledger, [entry] * 100)
    kept = ledger.last_add_confirmed + 1
    assert kept > 20
    with pytest.raises(DiskFull):
        await append_all(await store.create(custom={}), [entry * 10])
    assert await read_all(ledger) == [entry] * kept

    gone = await store.create(custom={})
    subprocess.run(["mount", "-o", "remount,size=2m", str(tiny)], check=True)
    await append_all(gone, [entry] * 10)
    assert await read_all(await opened(store, ledger)) == [entry] * kept
    await store.close()
    again = await started(RealDisk(tiny), metadata, limits=limits)
    assert await read_all(await opened(again, ledger)) == [entry] * kept
    assert await read_all(await opened(again, gone)) == [entry] * 10
    await again.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, LedgerError)],
)
def test_error_numbers_and_what_they_become(number: int, kind: type[LedgerError]) -> None:
    error = ledger_error(OSError(number, os.strerror(number)), "Appending")
    assert type(error) is kind
    assert str(error).startswith("Appending failed")
