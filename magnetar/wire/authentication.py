"""The client's credentials, for CONNECT and AUTH_CHALLENGE.  They are never logged."""

import asyncio
from pathlib import Path
from typing import Protocol

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials, Secret
from magnetar.credentials.oauth2 import OAuth2Tokens
from magnetar.credentials.rest import password_now
from magnetar.credentials.secrets import call_secret, read_secret, token_source
from magnetar.errors import AuthenticationFailed
from magnetar.settings import ClientSettings, Token

__all__ = [
    "Authentication",
    "BasicAuthentication",
    "NoAuthentication",
    "OAuth2Authentication",
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
    def is_secret(self) -> bool:
        """Whether `data` is a secret, which others must not see on its way."""
        ...

    @property
    def renewed(self) -> bool:
        """Whether `data` may return other credentials next time."""
        ...

    async def data(self, *, anew: bool = False) -> bytes:
        """The present credentials.  Raises `AuthenticationFailed`.

        `anew`: the broker has the last ones, and asks for others.
        """
        ...

    def refused(self) -> None:
        """Note that a broker refused the credentials."""
        ...


class NoAuthentication:
    """No credentials."""

    method = "none"
    is_secret = False
    renewed = False

    async def data(self, *, anew: bool = False) -> bytes:
        """Empty."""
        return b""

    def refused(self) -> None:
        """Do nothing."""


class TlsAuthentication(NoAuthentication):
    """Authentication by the certificate of the TLS connection, which has sent it."""

    method = "tls"


class TokenAuthentication:
    """Authentication by a token (JWT).

    A function is called, and a file is read, each time, so tokens can be renewed.
    """

    method = "token"
    is_secret = True

    def __init__(self, token: Token) -> None:
        """Raises `InvalidArgument`."""
        self._token: Secret | Path = token_source(token) if isinstance(token, str) else token
        self.renewed = not isinstance(self._token, str)

    async def data(self, *, anew: bool = False) -> bytes:
        """The token."""
        if isinstance(self._token, Path):
            token = read_secret(self._token, "token")
        else:
            token = await call_secret(self._token, "token")
        token = token.strip()
        if not token:
            raise AuthenticationFailed("The token is empty; let the function return one.")
        return token.encode()

    def refused(self) -> None:
        """Do nothing: it is asked for each time."""


class BasicAuthentication:
    """Authentication by a user's name and password."""

    method = "basic"
    is_secret = True

    def __init__(self, credentials: BasicCredentials) -> None:
        self._credentials = credentials
        self.renewed = not isinstance(credentials.password, str)

    async def data(self, *, anew: bool = False) -> bytes:
        """`user:password`."""
        basic = self._credentials
        if callable(basic.password):
            password = await call_secret(basic.password, "password")
        else:
            password = password_now(basic)
        return f"{basic.user}:{password}".encode()

    def refused(self) -> None:
        """Do nothing: the password is asked for each time."""


class OAuth2Authentication:
    """Authentication by tokens that an OAuth 2.0 issuer gives to this client."""

    method = "token"
    is_secret = True
    renewed = True

    def __init__(self, credentials: OAuth2Credentials, tokens: OAuth2Tokens | None = None) -> None:
        self._tokens = tokens or OAuth2Tokens(credentials)
        self._fetching = asyncio.Lock()

    async def data(self, *, anew: bool = False) -> bytes:
        """The token; a new one is fetched in a thread."""
        # The lock keeps connections that are made at the same time from a thread each.
        async with self._fetching:
            token = self._tokens.kept(anew=anew)
            if token is None:
                token = await asyncio.to_thread(self._tokens.get, anew=anew)
        return token.encode()

    def refused(self) -> None:
        """Fetch another token next time."""
        self._tokens.refused()


def authentication_of(settings: ClientSettings) -> Authentication:
    """The method in these settings: the credentials, else the certificate, else none.

    Raises `InvalidArgument`.
    """
    if settings.token is not None:
        return TokenAuthentication(settings.token)
    if settings.basic is not None:
        return BasicAuthentication(settings.basic)
    if settings.oauth2 is not None:
        return OAuth2Authentication(settings.oauth2)
    if settings.tls_certificate_file is not None:
        return TlsAuthentication()
    return NoAuthentication()
