"""The settings of a client, and checks of settings.

Settings are frozen, and raise `InvalidArgument` when they are made with an invalid value.
"""

import enum
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, TypeVar

from magnetar.bounds import MAX_DESCRIPTION
from magnetar.credentials.kinds import (
    BasicCredentials,
    OAuth2Credentials,
    Secret,
    check_one_kind,
)
from magnetar.credentials.secrets import token_source
from magnetar.errors import InvalidArgument

__all__ = ["ClientOptions", "ClientSettings", "Token", "check_flag", "check_positive", "member_of"]

E = TypeVar("E", bound=enum.Enum)
Token = Secret
"""A token, or a function that returns one whenever a broker asks for it."""


def check_positive(name: str, value: float, *, finite: bool = True) -> None:
    """Raises `InvalidArgument` unless `value` is a number above 0."""
    number = isinstance(value, int | float)
    if not number or not value > 0 or (finite and not math.isfinite(value)):
        raise InvalidArgument(f"{name} is {value!r}; give it a number above 0.")


def check_flag(name: str, value: object) -> None:
    """Raises `InvalidArgument` unless `value` is True or False: any text would count as true."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {value!r}; give it True or False.")


def member_of(kind: type[E], value: E | str) -> E:
    """The member of `kind`, given itself or by its name in any case.  Raises `InvalidArgument`."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    known = ", ".join(repr(name.lower()) for name in kind.__members__)
    raise InvalidArgument(f"{value!r} is no {kind.__name__}; it is one of {known}.")


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of `magnetar.connect`."""

    operation_timeout_s: float = 30.0
    """How long a request to a broker may take, retries included."""
    connect_timeout_s: float = 10.0
    """How long a connection may take, TLS and handshake included."""
    keep_alive_s: float = 30.0
    """Silence after which the client sends a PING; after as much again the connection is closed."""
    close_timeout_s: float = 10.0
    """How long each step of `close` may take, such as flushing producers."""
    token: Token | None = field(default=None, repr=False)
    """Authenticates by token: text, `file:///PATH`, or a function; the file is read, and the
    function called, again whenever a broker wants a new token."""
    basic: BasicCredentials | None = None
    """Authenticates by a user's name and password."""
    oauth2: OAuth2Credentials | None = None
    """Authenticates by tokens that an OAuth 2.0 issuer gives to this client."""
    tls_trust_file: str | Path | None = None
    """PEM of the authorities that sign brokers' certificates; by default those of the system."""
    tls_certificate_file: str | Path | None = None
    """PEM of this client's certificate, with which it authenticates unless it has credentials of
    another kind."""
    tls_key_file: str | Path | None = None
    """PEM of the certificate's key."""
    tls_check_certificate: bool = True
    """Whether the broker's certificate must be trusted.  False is for tests."""
    tls_check_hostname: bool = True
    """Whether the broker's certificate must be for the host to which the client connects."""
    listener_name: str | None = None
    """The listener whose addresses brokers return (`advertisedListeners`)."""
    description: str = ""
    """Text that brokers' statistics show beside the client's version; 64 characters at most."""

    def __post_init__(self) -> None:
        for name in ("operation_timeout_s", "connect_timeout_s", "keep_alive_s", "close_timeout_s"):
            check_positive(name, getattr(self, name))
        check_flag("tls_check_certificate", self.tls_check_certificate)
        check_flag("tls_check_hostname", self.tls_check_hostname)
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise InvalidArgument(
                "A TLS certificate needs its key; "
                "give both tls_certificate_file and tls_key_file, or neither."
            )
        if len(self.description) > MAX_DESCRIPTION or not self.description.isprintable():
            raise InvalidArgument(
                f"The description is {self.description!r:.100}; "
                f"give it {MAX_DESCRIPTION} printable characters at most."
            )
        for name, value, kind in (
            ("basic", self.basic, BasicCredentials),
            ("oauth2", self.oauth2, OAuth2Credentials),
        ):
            if value is not None and not isinstance(value, kind):
                raise InvalidArgument(
                    f"{name} is {type(value).__name__}; give it a magnetar.{kind.__name__}."
                )
        check_one_kind(token=self.token, basic=self.basic, oauth2=self.oauth2)
        if isinstance(self.token, str):
            token_source(self.token)


class ClientOptions(TypedDict, total=False):
    """`ClientSettings` as keyword arguments."""

    operation_timeout_s: float
    connect_timeout_s: float
    keep_alive_s: float
    close_timeout_s: float
    token: Token | None
    basic: BasicCredentials | None
    oauth2: OAuth2Credentials | None
    tls_trust_file: str | Path | None
    tls_certificate_file: str | Path | None
    tls_key_file: str | Path | None
    tls_check_certificate: bool
    tls_check_hostname: bool
    listener_name: str | None
    description: str
