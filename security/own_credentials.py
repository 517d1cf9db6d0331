"""The credentials by which this broker shows other brokers who it is."""

from pathlib import Path
from typing import Final

from security.identity import Method
from security.providers import Credentials
from security.secret_files import read_token

BEARER: Final = "Bearer "


class OwnCredentials:
    """A token from a file, which is read at each use; else the certificate of this broker.

    A token file that expires soon can be replaced while the broker runs.
    """

    def __init__(self, token_file: Path | None, *, has_certificate: bool = False) -> None:
        self._token_file = token_file
        self._has_certificate = has_certificate

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return self._token_file is not None or self._has_certificate

    def read(self) -> Credentials:
        """Return the credentials for CONNECT.  Raises `InvalidSecret`.

        A certificate is not in them: TLS shows it.
        """
        if self._token_file is not None:
            return Credentials(Method.TOKEN, read_token(self._token_file).encode())
        return Credentials(Method.TLS if self._has_certificate else Method.NONE)

    def headers(self) -> dict[str, str]:
        """Return the headers of a REST request.  Raises `InvalidSecret`."""
        if self._token_file is None:
            return {}
        return {"Authorization": BEARER + read_token(self._token_file)}
