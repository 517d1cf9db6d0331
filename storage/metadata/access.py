"""Credentials for a shared metadata store: paths of a token and of TLS files."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from magnetar.protocol.server_error import OperatorError, ServerError


class UnusableAccessFile(OperatorError):
    """A token, key or certificate cannot be read, or only one file of a pair is named."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Paths of the files that prove our identity and name the authorities that we trust.

    All of them may be left out.  `token_file` holds a bearer token; `trust_certs_file` the
    certificates (PEM) of authorities that sign servers, those of the system if it is left out;
    `cert_file` and `key_file` are our own.  `server_name` is the name in the server's certificate,
    if it is another than the host's.
    """

    # Paths, not contents: files are read where a connection is made, so that the next connection
    # uses a token or certificate that was replaced.

    token_file: Path | None = None
    tls: bool = False
    trust_certs_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Raise `UnusableAccessFile` for half a pair."""
        if (self.cert_file is None) != (self.key_file is None):
            raise UnusableAccessFile(
                "Of the client's certificate and its key only one file is named: name both."
            )

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted: `tls` is set, or a certificate file is named."""
        return self.tls or self.trust_certs_file is not None or self.cert_file is not None

    def read_token(self) -> str | None:
        """The token in the file; None if no file is named.  Raises `UnusableAccessFile`."""
        data = read_access_file(self.token_file)
        if data is None:
            return None
        token = data.decode("ascii", "replace").strip()
        if not token or not token.isprintable() or " " in token:
            raise UnusableAccessFile(
                f"{self.token_file} holds no token: write the bearer token into it, on one line."
            )
        return token


def read_access_file(path: Path | None) -> bytes | None:
    """The bytes of the file; None if no file is named.  Raises `UnusableAccessFile`."""
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableAccessFile(
            f"{path} cannot be read ({error.strerror}): check its path and its permissions."
        ) from error
