"""Files with secrets: who may read them, and how they are written."""

import os
import stat
from pathlib import Path

import pytest

from config.bounds import KEY_SOURCE_BYTES
from security.errors import InvalidSecret
from security.secret_files import (
    is_file,
    others_may_use,
    read_public,
    read_secret,
    read_token,
    write_secret,
)


def file_of(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_secret_of_the_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    assert read_secret(file_of(tmp_path / "key", b"\x00\n hush \n", mode)) == b"\x00\n hush \n"


@pytest.mark.parametrize("mode", [0o604, 0o606, 0o644, 0o660, 0o620, 0o610, 0o601, 0o666, 0o444])
def test_secret_that_others_may_use_is_refused_with_the_next_step(
    tmp_path: Path, mode: int
) -> None:
    path = file_of(tmp_path / "key", b"hush", mode)
    with pytest.raises(InvalidSecret, match=rf"mode {mode:04o}\): run `chmod 600 {path}`"):
        read_secret(path)
    assert read_public(path) == b"hush"


def status(mode: int, owner: int, group: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))


def test_group_of_this_process_may_read_a_file_of_root() -> None:
    assert not others_may_use(status(0o440, 0, 7), {7})
    assert not others_may_use(status(0o640, 0, 7), {1, 7})
    assert others_may_use(status(0o440, 0, 8), {7})
    assert others_may_use(status(0o440, 1000, 7), {7})
    for mode in (0o460, 0o444, 0o450, 0o441, 0o404):
        assert others_may_use(status(mode, 0, 7), {7})


def test_link_to_a_secret_is_judged_by_the_file(tmp_path: Path) -> None:
    # Kubernetes mounts secrets as links.
    link = tmp_path / "link"
    link.symlink_to(file_of(tmp_path / "key", b"hush"))
    assert read_secret(link) == b"hush"
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(InvalidSecret):
        read_secret(link)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    cases = {
        tmp_path / "missing": "No such file",
        tmp_path: "is no ordinary file",
        tmp_path / "pipe": "is no ordinary file",
        Path("a\x00b"): "null byte",
        file_of(tmp_path / "long", bytes(KEY_SOURCE_BYTES + 1)): "is longer than",
    }
    for path, expected in cases.items():
        with pytest.raises(InvalidSecret, match=expected):
            read_secret(path)
    assert len(read_secret(file_of(tmp_path / "most", bytes(KEY_SOURCE_BYTES)))) == KEY_SOURCE_BYTES


def test_token_is_read_without_the_newline_at_its_end(tmp_path: Path) -> None:
    assert read_token(file_of(tmp_path / "token", b" a.b.c\r\n")) == "a.b.c"
    for data, expected in ((b" \n", "is empty"), (b"\xff", "is no text")):
        with pytest.raises(InvalidSecret, match=expected):
            read_token(file_of(tmp_path / "token", data))


def test_file_that_is_no_path_is_none(tmp_path: Path) -> None:
    assert is_file(file_of(tmp_path / "key", b""))
    assert not is_file(tmp_path)
    assert not is_file(Path("A" * 5000))


@pytest.mark.parametrize("umask", [0o000, 0o277])
def test_secret_is_written_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_secret(tmp_path / "key", b"hush")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_secret(tmp_path / "key") == b"hush"


def test_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    file_of(tmp_path / "key", b"hush")
    for name in ("key", "link"):
        with pytest.raises(InvalidSecret, match="choose another name"):
            write_secret(tmp_path / name, b"other")
    assert (tmp_path / "key").read_bytes() == b"hush"
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InvalidSecret, match="choose another place"):
        write_secret(tmp_path / "no" / "key", b"hush")


def test_file_that_was_not_written_whole_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidSecret, match="No space left"):
        write_secret(tmp_path / "key", b"hush")
    assert not (tmp_path / "key").exists()
