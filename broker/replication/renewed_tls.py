"""`RenewedTls`: the TLS of connections to another cluster, whose files may be replaced."""

from pathlib import Path
from ssl import SSLContext

import structlog

from magnetar.errors import InvalidArgument
from magnetar.settings import ClientSettings
from magnetar.wire.tls import tls_context
from security.errors import InvalidSecret
from security.loaded_files import LoadedFiles

log = structlog.get_logger(__name__)


class RenewedTls:
    """Makes a TLS context, and a new one for the next connection once a file has changed."""

    def __init__(self, settings: ClientSettings) -> None:
        """Reads no file yet."""
        self._settings = settings
        files = settings.tls_trust_file, settings.tls_certificate_file, settings.tls_key_file
        self._paths = [Path(file) for file in files if file is not None]
        self._files: LoadedFiles | None = None
        self._context: SSLContext | None = None

    def context(self) -> SSLContext:
        """The context of the next connection: the last one while the files cannot be used.

        Raises `InvalidArgument` if they cannot be used the first time.
        """
        try:
            if self._files is None:
                files = LoadedFiles("TLS to another cluster", self._paths, self._load)
                self._load()
                self._files = files
            else:
                self._files.reload()
        except (InvalidSecret, InvalidArgument) as error:
            if self._context is not None:
                log.warning("replication_tls_files_unusable", error=str(error))
        # Without any, this raises an error that names the file.
        return self._context or tls_context(self._settings)

    def _load(self) -> None:
        self._context = tls_context(self._settings)
