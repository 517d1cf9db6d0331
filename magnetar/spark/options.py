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
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from magnetar.settings import ClientOptions, Token
from magnetar.spark.errors import InvalidOption

__all__ = ["CONNECTION_OPTIONS", "Connection", "Options"]

E = TypeVar("E", bound=enum.Enum)

CONNECTION_OPTIONS: Final = (
    "serviceUrl",
    "operationTimeoutMs",
    "token",
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

_FILE: Final = "file:"
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

    The file is one of each machine, and is read whenever a token is needed.
    """
    tls_trust_file: str | None = None
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    tls_check_certificate: bool = True
    tls_check_hostname: bool = True
    listener_name: str | None = None

    @classmethod
    def of(cls, options: Options) -> "Connection":
        """Take the options of a connection.  Raises `InvalidOption`."""
        return cls(
            service_url=options.required("serviceUrl", "pulsar://127.0.0.1:6650"),
            operation_timeout_ms=options.number("operationTimeoutMs") or 30_000,
            token=_checked_token(options.text("token")),
            tls_trust_file=options.text("tlsTrustFile"),
            tls_certificate_file=options.text("tlsCertificateFile"),
            tls_key_file=options.text("tlsKeyFile"),
            tls_check_certificate=options.flag("tlsCheckCertificate", default=True),
            tls_check_hostname=options.flag("tlsCheckHostname", default=True),
            listener_name=options.text("listenerName"),
        )

    def options(self) -> dict[str, str]:
        """The connection as options of sources and sinks; `of` makes an equal one of them."""
        texts: dict[str, str | int | None] = {
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
        return {name: str(value) for name, value in texts.items() if value is not None}

    def client_options(self) -> ClientOptions:
        """The connection as options of `magnetar.connect`."""
        return ClientOptions(
            operation_timeout_s=self.operation_timeout_ms / 1000,
            token=_token_of(self.token),
            tls_trust_file=self.tls_trust_file,
            tls_certificate_file=self.tls_certificate_file,
            tls_key_file=self.tls_key_file,
            tls_check_certificate=self.tls_check_certificate,
            tls_check_hostname=self.tls_check_hostname,
            listener_name=self.listener_name,
            description="magnetar pipeline",
        )


def _checked_token(text: str | None) -> str | None:
    if text is not None and text.startswith(_FILE):
        where = urlsplit(text)
        if where.netloc or not where.path.startswith("/") or where.path == "/":
            raise InvalidOption(
                f"The option token is {text!r}; give a file as file:///PATH, which is on every "
                "machine of the query, or the token itself."
            )
    return text


def _token_of(text: str | None) -> Token | None:
    """The token as the client takes it: a text, or a function that reads the file."""
    if text is None or not text.startswith(_FILE):
        return text
    file = Path(unquote(urlsplit(text).path))

    def token() -> str:
        try:
            return file.read_text("utf-8").strip()
        except OSError as error:
            raise InvalidOption(
                f"The file {str(file)!r} of the option token cannot be read ({error.strerror}); it "
                "must be on every machine of the query."
            ) from error

    return token
