"""Options of sources and sinks, as Spark hands them over: texts by names that ignore case.

Pure.  Every wrong option raises `InvalidOption`.  Durations and sizes have their units in their
names.  Options of a source and of a sink may be given to both.
"""

import difflib
import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypedDict, TypeVar

from magnetar.credentials.kinds import BasicCredentials, OAuth2Credentials, check_one_kind
from magnetar.credentials.secrets import file_of, token_source
from magnetar.errors import InvalidArgument
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from magnetar.settings import ClientOptions
from magnetar.spark.errors import InvalidOption

__all__ = ["CONNECTION_OPTIONS", "Connection", "Options"]

E = TypeVar("E", bound=enum.Enum)

CONNECTION_OPTIONS: Final = (
    "serviceUrl",
    "operationTimeoutMs",
    # Spark hides the values of options whose names have "token", "password" or "secret".
    "token",
    "tokenFile",
    "basicUser",
    "basicPassword",
    "basicPasswordFile",
    "oauth2KeyFile",
    "oauth2IssuerUrl",
    "oauth2ClientId",
    "oauth2ClientSecret",
    "oauth2Audience",
    "oauth2Scope",
    "oauth2TrustFile",
    "oauth2RequireHttps",
    "tlsTrustFile",
    "tlsCertificateFile",
    "tlsKeyFile",
    "tlsCheckCertificate",
    "tlsCheckHostname",
    "listenerName",
)
"""Options of everything that connects to brokers."""
OF_OTHERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kafka.bootstrap.servers": "serviceUrl",
        "service.url": "serviceUrl",
        "subscribe": "topic",
        "topics": "topic",
        "startingoffsets": "start",
        "startingtimestamp": "start",
        "startingtime": "start",
        "endingoffsets": "end",
        "endingtimestamp": "end",
        "endingtime": "end",
        "maxoffsetspertrigger": "maxRowsPerTrigger",
    }
)
"""Our names for options of other sources, which are in lower case here."""

_FLAGS: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "false": False})


class Options:
    """The options that a user gave to one source or sink, with methods that convert them.

    Names ignore case.  Methods raise `InvalidOption` with the name, the text and the valid ones.
    """

    __slots__ = ("_given",)

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuse an option that is not in `known`, and name the nearest one.

        Raises `InvalidOption`.
        """
        # An unknown option may be a misspelt limit, which must not become no limit at all.
        by_lower = {name.lower(): name for name in known}
        for name in sorted(self._given):
            if name not in by_lower:
                near = difflib.get_close_matches(name, by_lower, n=1)
                meant = OF_OTHERS.get(name) or (by_lower[near[0]] if near else None)
                hint = (
                    f"; do you mean {meant}?" if meant in by_lower.values() else "; leave it out."
                )
                raise InvalidOption(f"There is no option {name}{hint}")

    def text(self, name: str) -> str | None:
        """The option without space around it; None if it is missing or empty."""
        value = self._given.get(name.lower())
        return None if value is None else (str(value).strip() or None)

    def secret(self, name: str) -> str | None:
        """The option as it was given; None if it is missing or empty."""
        return self._given.get(name.lower()) or None

    def required(self, name: str, example: str) -> str:
        """See `text`; raises `InvalidOption` if the option is missing or empty."""
        value = self.text(name)
        if value is None:
            raise InvalidOption(f"The option {name} is missing; give it, for example {example}.")
        return value

    def topic(self) -> str:
        """The full name of the option `topic`; one without a domain is a scalable topic."""
        text = self.required("topic", "topic://public/default/orders")
        whole = text if "/" in text else f"public/default/{text}"
        try:
            return str(parse_topic_name(text if "://" in text else f"topic://{whole}"))
        except MagnetarError as error:
            raise InvalidOption(f"The option topic is {text!r}: {error}") from error

    def number(self, name: str, *, at_least: int = 1) -> int | None:
        """The option as a whole number of `at_least` or more; None if it is missing."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise InvalidOption(
                f"The option {name} is {text!r}; give it a whole number of {at_least} or more."
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """The option as `true` or `false`."""
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in _FLAGS:
            raise InvalidOption(f"The option {name} is {text!r}; it is true or false.")
        return _FLAGS[text.lower()]

    def choice(self, name: str, kind: type[E], default: E) -> E:
        """The option as a member of an enum whose values are texts in lower case."""
        text = self.text(name)
        if text is None:
            return default
        for member in kind:
            if member.value == text.lower():
                return member
        known = ", ".join(str(member.value) for member in kind)
        raise InvalidOption(f"The option {name} is {text!r}; it is one of {known}.")


@dataclass(frozen=True, slots=True)
class Connection:
    """The address of the brokers, and how to connect to them.  Equal ones share a client."""

    service_url: str
    operation_timeout_ms: int = 30_000
    token: str | None = field(default=None, repr=False)
    """The token itself, which stays the same for as long as a query runs, or `file:///PATH`.

    This file, as those of the other credentials, is one of each machine, and is read whenever it
    is needed.
    """
    tls_trust_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    tls_check_certificate: bool = True
    tls_check_hostname: bool = True
    listener_name: str | None = None
    basic: BasicCredentials | None = None
    oauth2: OAuth2Credentials | None = None

    @classmethod
    def of(cls, options: Options) -> "Connection":
        """Take the options of a connection.  Raises `InvalidOption`."""
        return cls(
            service_url=options.required("serviceUrl", "pulsar://127.0.0.1:6650"),
            operation_timeout_ms=options.number("operationTimeoutMs") or 30_000,
            **_credentials(options),
            tls_trust_file=options.text("tlsTrustFile"),
            tls_certificate_file=options.text("tlsCertificateFile"),
            tls_key_file=options.text("tlsKeyFile"),
            tls_check_certificate=options.flag("tlsCheckCertificate", default=True),
            tls_check_hostname=options.flag("tlsCheckHostname", default=True),
            listener_name=options.text("listenerName"),
        )

    def options(self) -> dict[str, str]:
        """The connection as options of sources and sinks; `of` makes an equal one of them."""
        basic, oauth2 = self.basic, self.oauth2
        texts: dict[str, object] = {
            "serviceUrl": self.service_url,
            "operationTimeoutMs": self.operation_timeout_ms,
            "token": self.token,
            "tlsTrustFile": self.tls_trust_file,
            "tlsCertificateFile": self.tls_certificate_file,
            "tlsKeyFile": self.tls_key_file,
            "tlsCheckCertificate": str(self.tls_check_certificate).lower(),
            "tlsCheckHostname": str(self.tls_check_hostname).lower(),
            "listenerName": self.listener_name,
        }
        if basic is not None:
            texts["basicUser"] = basic.user
            texts["basicPassword"] = basic.password
            texts["basicPasswordFile"] = basic.password_file
        if oauth2 is not None:
            texts["oauth2KeyFile"] = oauth2.key_file
            texts["oauth2IssuerUrl"] = oauth2.issuer_url
            texts["oauth2ClientId"] = oauth2.client_id
            texts["oauth2ClientSecret"] = oauth2.client_secret
            texts["oauth2Audience"] = oauth2.audience
            texts["oauth2Scope"] = oauth2.scope
            texts["oauth2TrustFile"] = oauth2.trust_file
            texts["oauth2RequireHttps"] = str(oauth2.require_https).lower()
        return {name: str(value) for name, value in texts.items() if value is not None}

    def client_options(self) -> ClientOptions:
        """The connection as options of `magnetar.connect`."""
        return ClientOptions(
            operation_timeout_s=self.operation_timeout_ms / 1000,
            token=self.token,
            basic=self.basic,
            oauth2=self.oauth2,
            tls_trust_file=self.tls_trust_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
            tls_check_certificate=self.tls_check_certificate,
            tls_check_hostname=self.tls_check_hostname,
            listener_name=self.listener_name,
            description="magnetar pipeline",
        )


class _Credentials(TypedDict):
    token: str | None
    basic: BasicCredentials | None
    oauth2: OAuth2Credentials | None


def _credentials(options: Options) -> _Credentials:
    """The options of one kind of credentials, or of none.  Raises `InvalidOption`."""
    token = _file(options, "tokenFile")
    if token is not None and options.text("token") is not None:
        raise InvalidOption("The options token and tokenFile are both given; leave one out.")
    token = options.text("token") if token is None else Path(token).as_uri()
    try:
        if token is not None:
            token_source(token)
        found = _Credentials(token=token, basic=_basic(options), oauth2=_oauth2(options))
        check_one_kind(**found)
    except InvalidArgument as error:
        raise InvalidOption(f"The options of credentials cannot be used: {error}") from None
    return found


def _basic(options: Options) -> BasicCredentials | None:
    user, password = options.text("basicUser"), options.secret("basicPassword")
    file = _file(options, "basicPasswordFile")
    if user is None and password is None and file is None:
        return None
    return BasicCredentials(user or "", password, file)


def _oauth2(options: Options) -> OAuth2Credentials | None:
    names = ("oauth2IssuerUrl", "oauth2ClientId", "oauth2Audience", "oauth2Scope")
    issuer, client, audience, scope = map(options.text, names)
    key_file, secret = _file(options, "oauth2KeyFile"), options.secret("oauth2ClientSecret")
    if all(each is None for each in (key_file, issuer, client, secret, audience, scope)):
        return None
    return OAuth2Credentials(
        issuer_url=issuer,
        client_id=client,
        client_secret=secret,
        key_file=key_file,
        audience=audience,
        scope=scope,
        trust_file=_file(options, "oauth2TrustFile"),
        require_https=options.flag("oauth2RequireHttps", default=True),
    )


def _file(options: Options, name: str) -> str | None:
    """The option as a path that means the same on every machine.  Raises `InvalidOption`."""
    text = options.text(name)
    if text is None:
        return None
    try:
        path = file_of(text, name)
    except InvalidArgument as error:
        raise InvalidOption(f"The option {error}") from None
    if not path.is_absolute():
        raise InvalidOption(
            f"The option {name} is {text!r}; give a whole path, as the file is read on every "
            "machine of the query."
        )
    return str(path)
