"""The client's credentials, for CONNECT and AUTH_CHALLENGE.  They are never logged."""

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
    """One method of authentication."""

    @property
    def method(self) -> str:
        """The name of the method on the wire (`auth_method_name`)."""
        ...

    @property
    def renewed(self) -> bool:
        """Whether `data` may return other credentials next time."""
        ...

    async def data(self) -> bytes:
        """The present credentials.  Raises `AuthenticationFailed`."""
        ...


class NoAuthentication:
    """No credentials."""

    method = "none"
    renewed = False

    async def data(self) -> bytes:
        """Empty."""
        return b""


class TlsAuthentication:
    """Authentication by the certificate of the TLS connection."""

    method = "tls"
    renewed = False

    async def data(self) -> bytes:
        """Empty: TLS has sent the certificate."""
        return b""


class TokenAuthentication:
    """Authentication by a token (JWT); a function is called each time, so tokens can be renewed."""

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
                    f"The token function failed ({error!r}); correct the function given as token."
                ) from error
        if not isinstance(token, str) or not token:
            raise AuthenticationFailed(
                f"The token is {type(token).__name__}, not text; let the function return a str "
                "that is not empty."
            )
        return token.encode()


def authentication_of(settings: ClientSettings) -> Authentication:
    """The method in these settings: the token, else the certificate, else none."""
    if settings.token is not None:
        return TokenAuthentication(settings.token)
    if settings.tls_certificate_file is not None:
        return TlsAuthentication()
    return NoAuthentication()
