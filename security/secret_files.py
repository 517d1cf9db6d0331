"""Files with secrets: read only where nobody else may read them, written with mode 0600."""

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Final

from config.bounds import KEY_SOURCE_BYTES
from security.errors import InvalidSecret

_MODE: Final = 0o600


def read_secret(path: Path, *, limit_bytes: int = KEY_SOURCE_BYTES) -> bytes:
    """Read a file with a secret.

    The file may be readable by its owner alone.  One exception: a file of root that its group may
    read, if this process is in that group; so Kubernetes mounts secrets under `fsGroup`
    (`defaultMode: 0440`, or 0400).  Raises `InvalidSecret`.
    """
    return _read(path, limit_bytes, private=True)


def read_public(path: Path, *, limit_bytes: int = KEY_SOURCE_BYTES) -> bytes:
    """Read a file without secrets, such as a public key.  Raises `InvalidSecret`."""
    return _read(path, limit_bytes, private=False)


def read_token(path: Path) -> str:
    """Read a file with a token or password, without the blanks and newlines at its ends.

    Raises `InvalidSecret`.
    """
    data = read_secret(path)
    try:
        text = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        # Not chained: the error has the bytes of the file.
        raise InvalidSecret(f"{path} is no text: name a file with one token.") from None
    if not text:
        raise InvalidSecret(f"{path} is empty: write the token into it.")
    return text


def others_may_use(status: os.stat_result, groups: Collection[int]) -> bool:
    """Whether the mode lets others than the owner read or write a file.

    A file of root that one of `groups`, those of this process, may read counts as its own.
    """
    others = status.st_mode & 0o077
    if others == stat.S_IRGRP:
        return status.st_uid != 0 or status.st_gid not in groups
    return others != 0


def is_file(path: Path) -> bool:
    """Whether there is such a file; a text that can be no path names none."""
    # Path.is_file raises if the name is too long, as base64 of a key is.
    return os.path.isfile(path)


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600, durably.  Raises `InvalidSecret`, also if there is one."""
    try:
        # O_EXCL follows no link that somebody else has put there, and replaces no key in use.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    except FileExistsError:
        raise InvalidSecret(
            f"{path} exists, and what it protects may be in use: choose another name."
        ) from None
    except OSError as error:
        raise _not_written(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), _MODE)  # Whatever the umask.
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _fsync_directory(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)  # A part of a key would pass for a key.
        raise _not_written(path, error) from error


def _fsync_directory(directory: Path) -> None:
    """Make the name of a new file durable: without it the file may be gone after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_written(path: Path, error: OSError) -> InvalidSecret:
    return InvalidSecret(f"{path} cannot be written ({error.strerror}): choose another place.")


def _read(path: Path, limit_bytes: int, *, private: bool) -> bytes:
    try:
        # A named pipe would wait for a writer; O_NONBLOCK opens it, and _check refuses it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            # Of the open file, not of the path: that may be another file by now.
            _check(path, os.fstat(descriptor), private=private)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(limit_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidSecret(
            f"{path} cannot be read ({error.strerror}): name a file that this process may read."
        ) from error
    except ValueError as error:  # A null byte in the path.
        raise InvalidSecret("The path of a file has a null byte: correct it.") from error
    if len(data) > limit_bytes:
        raise InvalidSecret(
            f"{path} is longer than {limit_bytes} bytes, so it is no key, token or list of "
            "passwords of a size that is read: name another file."
        )
    return data


def _check(path: Path, status: os.stat_result, *, private: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InvalidSecret(f"{path} is no ordinary file: name one.")
    if not private or not others_may_use(status, {os.getegid(), *os.getgroups()}):
        return
    raise InvalidSecret(
        f"{path} has a secret, but others than its owner may use the file (mode "
        f"{stat.S_IMODE(status.st_mode):04o}): run `chmod 600 {path}`."
    )
