"""The credentials by which this broker shows other brokers who it is."""

import ssl
from pathlib import Path
from typing import Final

from config.settings import Settings
from security.errors import InvalidSecret
from security.identity import Method
from security.providers import Credentials
from security.secret_files import read_public, read_token

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


def own_certificate(settings: Settings) -> bytes | None:
    """The certificate (DER) that other brokers see of this one; None without one.

    Raises `InvalidSecret`.
    """
    path = settings.broker_client_certificate_file
    if path is None:
        return None
    try:
        return ssl.PEM_cert_to_DER_cert(_first(read_public(path).decode("ascii")))
    except ValueError as error:
        raise InvalidSecret(f"{path} has no certificate: name a PEM file with one.") from error


def _first(pem: str) -> str:
    """The first certificate of a chain: the broker's own."""
    head, end, _ = pem.partition(ssl.PEM_FOOTER)
    return head.strip() + "\n" + end
