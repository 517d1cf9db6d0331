"""A broker of this machine, found by its data directory.

A running broker writes a note there of where it serves REST.  By it commands on the same machine
find the broker without an address: the health check of the image, and an operator's shell in a
container.
"""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

import structlog

from broker.placement import BrokerAddress
from config.settings import Settings
from security.first_start_files import HTTP_PORT_TLS, SecurityFiles
from storage.data_directory import ADDRESS_FILE

log = structlog.get_logger(__name__)

ADDRESS_NOTE_BYTES: Final = 64 * 1024
"""Longest file that is read."""
_LOOPBACK: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""The address by which to reach a broker that listens on all addresses."""


class AddressNote:
    """The note of one broker: the file `ADDRESS` in its data directory."""

    def __init__(self, settings: Settings, me: BrokerAddress) -> None:
        self._path = settings.data_dir / ADDRESS_FILE
        host = _LOOPBACK.get(settings.bind_host, settings.bind_host)
        host = f"[{host}]" if ":" in host else host
        broker = LocalBroker(
            _local_url(me.web_url, host),
            _local_url(me.web_url_tls, host),
            bool(settings.authentication_providers),
            _absolute(settings.tls_certificate_file),
            _absolute(settings.broker_client_certificate_file),
            _absolute(settings.broker_client_key_file),
        )
        self._text = json.dumps(broker._asdict()) + "\n"

    def write(self) -> None:
        """Write the note, unless there is no data directory: a broker of a cluster needs none."""
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.unlink(missing_ok=True)
            # O_EXCL follows no link that somebody else has put there.
            with open(temporary, "x", encoding="utf-8", opener=_private) as file:
                file.write(self._text)
            temporary.replace(self._path)
        except OSError as error:
            # Only commands without --admin-url need it.
            log.debug("address_not_noted", path=str(self._path), reason=str(error))

    def remove(self) -> None:
        """Remove the note, unless another broker has written it since."""
        with suppress(OSError, UnicodeDecodeError):
            if self._path.read_text("utf-8") == self._text:
                self._path.unlink()


def _private(path: str, flags: int) -> int:
    """Open a new file that its owner alone may write, whatever the umask."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    os.fchmod(descriptor, 0o644)
    return descriptor


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _local_url(url: str | None, host: str) -> str | None:
    if not url:
        return None
    parts = urlsplit(url)
    return f"{parts.scheme}://{host}:{parts.port}"


class LocalBroker(NamedTuple):
    """The content of the note.  Addresses are of REST; paths are absolute."""

    http: str | None
    https: str | None
    authentication: bool
    certificate: str | None
    """The broker's own certificate."""
    client_certificate: str | None
    client_key: str | None

    @property
    def client_files(self) -> tuple[Path | None, Path | None]:
        """The certificate and key that the broker shows to others, and commands to it."""
        if self.client_certificate is None or self.client_key is None:
            return None, None
        return Path(self.client_certificate), Path(self.client_key)

    @classmethod
    def read(cls, data_dir: Path) -> Self | None:
        """Read the note; None if no broker with this data directory runs, or we may not read it."""
        try:
            # A named pipe would wait for a writer.
            descriptor = os.open(data_dir / ADDRESS_FILE, os.O_RDONLY | os.O_NONBLOCK)
            with open(descriptor, encoding="utf-8") as file:
                if not _is_trusted(os.fstat(descriptor), data_dir):
                    log.warning("address_note_of_another_user", path=str(data_dir / ADDRESS_FILE))
                    return None
                return cls(**json.loads(file.read(ADDRESS_NOTE_BYTES)))
        except (OSError, ValueError, TypeError):
            return None


def _is_trusted(note: os.stat_result, data_dir: Path) -> bool:
    """Whether nobody can have written the file but root, its reader, or the directory's owner.

    A superuser's token is sent to the address that it names.  Where a group may write into the data
    directory, as with `fsGroup` of Kubernetes, another user could put a file there.
    """
    owners = (os.geteuid(), 0, data_dir.stat().st_uid)
    return stat.S_ISREG(note.st_mode) and not note.st_mode & 0o022 and note.st_uid in owners


class LocalAccess(NamedTuple):
    """The address of the broker of this machine, and the files with which commands reach it."""

    url: str
    token: Path | None
    """The superuser's token of the first start; it is sent over TLS alone."""
    certificate: Path | None
    """The broker's own certificate; no other one is trusted."""
    broker: LocalBroker | None
    """None: there is no note, and `url` is a guess, as there are files of `--secure`."""

    @classmethod
    def of(cls, data_dir: Path | None) -> Self | None:
        """Access to the broker with this data directory; None if nothing is known of one."""
        if data_dir is None:
            return None
        broker, files = LocalBroker.read(data_dir), _files_of_first_start(data_dir)
        if broker is None and files is not None:
            port = os.environ.get("MAGNETAR_HTTP_PORT_TLS") or HTTP_PORT_TLS
            return cls(f"https://127.0.0.1:{port}", files.admin_token, files.certificate, None)
        if broker is None:
            return None
        certificate = Path(broker.certificate) if broker.certificate else None
        if broker.https and files is not None:
            return cls(broker.https, files.admin_token, certificate, broker)
        url = broker.http or broker.https
        return None if url is None else cls(url, None, certificate, broker)


def _files_of_first_start(data_dir: Path) -> SecurityFiles | None:
    """The files of `--secure`; None if the broker was never started so, or we may not see them."""
    files = SecurityFiles.of(data_dir)
    # Not `Path.is_file`, which raises for a directory that others may not enter.
    found = os.path.isfile(files.certificate) and os.path.isfile(files.admin_token)
    return files if found else None
