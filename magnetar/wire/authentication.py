"""Who this client says it is: in CONNECT, and again whenever a broker asks (AUTH_CHALLENGE).

Rules:

- A token that is callable is called anew each time, so what expires can be refreshed.  What it
  raises fails the connection as `AuthenticationFailed`.
- Once brokers have believed such a token, the next ones may be missing or refused for a while: that
  is no reason to give up what the client has made (`TokenNotRenewed`).
- Tokens are never logged.
"""

import inspect
from typing import Protocol

from magnetar.errors import AuthenticationFailed
from magnetar.settings import ClientSettings, Token

__all__ = [
    "Authentication",
    "NoAuthentication",
    "TlsAuthentication",
    "TokenAuthentication",
    "authentication_of",
]


class Authentication(Protocol):
    """One way to prove it."""

    @property
    def method(self) -> str:
        """Its name on the wire (`auth_method_name`)."""
        ...

    @property
    def renewed(self) -> bool:
        """Whether `data` may give something else next time."""
        ...

    async def data(self) -> bytes:
        """The proof, fresh.  Raises `AuthenticationFailed`."""
        ...


class NoAuthentication:
    """Anonymous."""

    method = "none"
    renewed = False

    async def data(self) -> bytes:
        """Nothing."""
        return b""


class TlsAuthentication:
    """By the certificate of the TLS connection."""

    method = "tls"
    renewed = False

    async def data(self) -> bytes:
        """Nothing: TLS has shown it."""
        return b""


class TokenAuthentication:
    """By a token (JWT)."""

    method = "token"

    def __init__(self, token: Token) -> None:
        self._token = token
        self.renewed = callable(token)

    async def data(self) -> bytes:
        """The token."""
        token: object = self._token
        if callable(token):
            try:
                token = token()
                if inspect.isawaitable(token):
                    token = await token
            except Exception as error:
                raise AuthenticationFailed(
                    f"No token could be had ({error!r}); look at the function that gives it."
                ) from error
        if not isinstance(token, str) or not token:
            raise AuthenticationFailed(
                f"The token is {type(token).__name__}, not text; let the function return a str "
                "that is not empty."
            )
        return token.encode()


def authentication_of(settings: ClientSettings) -> Authentication:
    """The way that these settings choose: the token, else the certificate, else none."""
    if settings.token is not None:
        return TokenAuthentication(settings.token)
    if settings.tls_certificate_file is not None:
        return TlsAuthentication()
    return NoAuthentication()
