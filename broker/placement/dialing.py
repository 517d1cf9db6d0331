"""Connections to other brokers: over TLS, or plain."""

import asyncio
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

import structlog

from config.bounds import TLS_HANDSHAKE_S
from magnetar.protocol.pulsar_pb2 import AuthData
from security.errors import InvalidSecret

if TYPE_CHECKING:
    from security.own_credentials import OwnCredentials

log = structlog.get_logger(__name__)


class Reachable(Protocol):
    """The addresses of a broker; a plain one is empty, and one with TLS None, if there is none."""

    @property
    def url(self) -> str:
        """`pulsar://...`."""
        ...

    @property
    def url_tls(self) -> str | None:
        """`pulsar+ssl://...`."""
        ...

    @property
    def web_url(self) -> str:
        """`http://...`."""
        ...

    @property
    def web_url_tls(self) -> str | None:
        """`https://...`."""
        ...


class ClientTls(Protocol):
    """The TLS of this broker as a client of others."""

    @property
    def current(self) -> ssl.SSLContext:
        """The context of the next connection; it verifies chain and name."""
        ...

    @property
    def preferred(self) -> bool:
        """Whether TLS is used with brokers that have plain ports too."""
        ...


class WebAddress(NamedTuple):
    """The REST address to use, and its TLS context; None if the address is plain."""

    url: str
    tls: ssl.SSLContext | None


class Dialer:
    """Connects to other brokers.

    It uses TLS where the other broker has an address with TLS, and this one is told whom to trust,
    or the other has no plain address.  Over TLS, chain and name of the other broker are verified
    before a byte is sent.
    """

    def __init__(
        self, tls: ClientTls | None = None, credentials: "OwnCredentials | None" = None
    ) -> None:
        """Without `tls` plain addresses alone can be used, and without `credentials` none go out.

        They are for whoever connects by this: the dialer itself sends nothing.
        """
        self._tls = tls
        self._credentials = credentials

    def headers(self) -> dict[str, str]:
        """The headers of a REST request by which this broker is known.  Raises `InvalidSecret`."""
        return {} if self._credentials is None else self._credentials.headers()

    def auth_data(self) -> AuthData:
        """The credentials of this broker for CONNECT and AUTH_RESPONSE.

        Those that cannot be read are logged, and none are sent, which the other broker refuses.
        """
        if self._credentials is None:
            return AuthData()
        try:
            own = self._credentials.read()
        except InvalidSecret as error:
            log.error("own_credentials_unusable", error=str(error))
            return AuthData()
        return AuthData(auth_method_name=own.method, auth_data=own.data)

    def url_of(self, address: Reachable) -> str:
        """The address of the binary protocol to connect to."""
        return self._choose(address.url, address.url_tls)[0]

    def web_of(self, address: Reachable) -> WebAddress:
        """The REST address to send requests to."""
        return WebAddress(*self._choose(address.web_url, address.web_url_tls))

    async def connect(self, address: Reachable, make: Callable[[], asyncio.Protocol]) -> None:
        """Connect to the binary protocol of a broker.

        Raises `OSError`, certificates that are not trusted and hosts without address included, and
        `ValueError` if the broker's own address is none.
        """
        url, tls = self._choose(address.url, address.url_tls)
        parts = urlsplit(url)
        await asyncio.get_running_loop().create_connection(
            make,
            parts.hostname or "",
            parts.port or 0,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_S,
        )

    def _choose(self, plain: str, over_tls: str | None) -> tuple[str, ssl.SSLContext | None]:
        tls = self._tls
        if over_tls is not None and tls is not None and (tls.preferred or not plain):
            return over_tls, tls.current
        return plain, None
