"""`RestCredentials`: the header `Authorization` of requests to a broker's REST interface."""

import base64
from urllib.parse import urlsplit

from magnetar.credentials.exposure import Exposure
from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials, check_one_kind
from magnetar.credentials.oauth2 import OAuth2Tokens
from magnetar.credentials.secrets import file_of, read_secret, secret_now, token_source
from magnetar.errors import AuthenticationFailed

__all__ = ["RestCredentials", "password_now", "token_now"]


class RestCredentials:
    """One kind of credentials, or none.  Files are read for each request."""

    def __init__(
        self,
        token: str | None = None,
        basic: BasicCredentials | None = None,
        oauth2: OAuth2Credentials | None = None,
    ) -> None:
        """`token` is the token, `token:TOKEN`, or `file:///PATH`.  Raises `InvalidArgument`."""
        check_one_kind(token=token, basic=basic, oauth2=oauth2)
        self._token = token
        self._basic = basic
        self._oauth2 = None if oauth2 is None else OAuth2Tokens(oauth2)
        self._exposure = Exposure()

    def authorization(self, url: str) -> str | None:
        """The value of the header for a request to `url`, or None without credentials; may block.

        Raises `AuthenticationFailed`.
        """
        value = self._value()
        parts = urlsplit(url)
        if value is not None and parts.scheme == "http":
            self._exposure.warn(parts.hostname or "", f"{parts.scheme}://{parts.netloc}", "REST")
        return value

    def _value(self) -> str | None:
        if self._oauth2 is not None:
            return f"Bearer {self._oauth2.get()}"
        if self._basic is not None:
            both = f"{self._basic.user}:{password_now(self._basic)}"
            return f"Basic {base64.b64encode(both.encode()).decode()}"
        if self._token is None:
            return None
        token = token_now(self._token)
        # A header with other characters is refused by the library, with the header in the error.
        if not all("!" <= char <= "~" for char in token):
            raise AuthenticationFailed(
                "The token has characters that no HTTP header may have; give the token alone."
            )
        return f"Bearer {token}"


def token_now(text: str) -> str:
    """The token in a text, or in the file that it names; see `token_source`.

    Raises `AuthenticationFailed` and `InvalidArgument`.
    """
    source = token_source(text)
    return source if isinstance(source, str) else read_secret(source, "token").strip()


def password_now(basic: BasicCredentials) -> str:
    """The password, from its file if there is one.  Raises `AuthenticationFailed`."""
    if basic.password_file is not None:
        return read_secret(file_of(basic.password_file, "password_file"), "password")
    return secret_now(basic.password or "", "password")
