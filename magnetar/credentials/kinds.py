"""The kinds of credentials that a user can give.  No secret is in their `repr`."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from magnetar.errors import InvalidArgument

__all__ = [
    "BasicCredentials",
    "IssuedToken",
    "OAuth2Credentials",
    "Secret",
    "check_issuer_url",
    "check_one_kind",
    "is_text",
]

Secret = str | Callable[[], str] | Callable[[], Awaitable[str]]
"""A secret, or a function that returns it whenever a broker asks for it."""


@dataclass(frozen=True, slots=True)
class BasicCredentials:
    """A user's name and password (Pulsar's method `basic`).

    Give the password as text, as a function that is called whenever a broker asks for it, or in a
    file, which is read as often.  Raises `InvalidArgument`.
    """

    user: str
    password: Secret | None = field(default=None, repr=False)
    password_file: str | Path | None = None

    def __post_init__(self) -> None:
        # The first colon ends the name (RFC 7617).
        if not isinstance(self.user, str) or not is_text(self.user) or ":" in self.user:
            raise InvalidArgument(
                f"The user of the basic credentials is {self.user!r:.100}; give a name without ':'."
            )
        if (self.password is None) == (self.password_file is None):
            raise InvalidArgument(
                "Basic credentials need a password; give password or password_file, one of them."
            )
        if self.password == "":
            raise InvalidArgument("The password of the basic credentials is empty; give one.")


@dataclass(frozen=True, slots=True)
class OAuth2Credentials:
    """A client of an OAuth 2.0 issuer, which gives tokens to it (RFC 6749, 4.4).

    The id and the secret are given, or in a key file: Pulsar's JSON of the type
    `client_credentials`, with `client_id`, `client_secret` and `issuer_url`.  Raises
    `InvalidArgument`.
    """

    issuer_url: str | None = None
    """`https://...`, below which the issuer's `.well-known/openid-configuration` is; by default
    that of the key file."""
    client_id: str | None = None
    client_secret: str | None = field(default=None, repr=False)
    key_file: str | Path | None = None
    """A path, or `file:///PATH`; read for each token."""
    audience: str | None = None
    scope: str | None = None
    trust_file: str | Path | None = None
    """PEM of the authorities that sign the issuer's certificate; by default those of the system."""
    require_https: bool = True
    """Whether the issuer must be reached by HTTPS.  False is for tests."""

    def __post_init__(self) -> None:
        given = self.client_id is not None, self.client_secret is not None
        if self.key_file is not None:
            if any(given):
                raise InvalidArgument(
                    "OAuth2 credentials have a key file, and an id or a secret beside it; give "
                    "key_file, or client_id and client_secret."
                )
        elif not (self.client_id and self.client_secret and self.issuer_url):
            raise InvalidArgument(
                "OAuth2 credentials are incomplete; give key_file, or all of issuer_url, client_id "
                "and client_secret."
            )
        texts = (self.client_id, self.client_secret, self.audience, self.scope)
        if not all(each is None or is_text(each) for each in texts):
            raise InvalidArgument(
                "The id, secret, audience or scope of the OAuth2 credentials is no text; give "
                "each as a str that is not empty, or leave it out."
            )
        if not isinstance(self.require_https, bool):
            raise InvalidArgument(
                f"require_https is {self.require_https!r}; give it True or False."
            )
        if self.issuer_url is not None:
            check_issuer_url(self.issuer_url, require_https=self.require_https)


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token of an issuer, and for how long it says that it is valid; None if it does not."""

    text: str = field(repr=False)
    lifetime_s: float | None


def is_text(value: object) -> bool:
    """Whether it is text that is not empty and can be sent as UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        return bool(value.encode())
    except UnicodeEncodeError:  # A lone surrogate, as Python reads other encodings.
        return False


def check_issuer_url(url: str, *, require_https: bool, name: str = "issuer_url") -> None:
    """Raises `InvalidArgument` unless tokens may be asked for there; `name` is for the error."""
    schemes = ("https",) if require_https else ("https", "http")
    try:
        parts = urlsplit(url)
        well = parts.scheme in schemes and parts.hostname and (parts.port or 1) and url.isascii()
    except ValueError:
        well = False
    else:
        # A user name in the URL would be a secret in errors.
        well = well and "@" not in parts.netloc and url.isprintable() and " " not in url
    if not well:
        raise InvalidArgument(
            f"{name} is not the {' or '.join(schemes)} address of an OAuth2 issuer; give it as "
            "https://host/path, without user name and password."
        )


def check_one_kind(**kinds: object) -> None:
    """Raises `InvalidArgument` if more than one kind of credentials is given."""
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgument(
            f"Several kinds of credentials are given ({', '.join(given)}); a client shows one, so "
            "leave out the others."
        )
