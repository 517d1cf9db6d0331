"""The address of an Oxia cluster: `oxia://HOST:PORT/NAMESPACE`, as Pulsar writes it.  Pure.

Several servers may be named, with commas between: any of them knows the shards of all.
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from magnetar.protocol.server_error import OperatorError, ServerError

SCHEME = "oxia://"
DEFAULT_NAMESPACE = "default"
DEFAULT_PORT = 6648

_SERVER = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/,\[\]]+)(?::(\d{1,5}))?", re.ASCII)
_NAMESPACE = re.compile(r"[^\s/]*", re.ASCII)


class InvalidOxiaAddress(OperatorError):
    """The address of an Oxia cluster cannot be understood."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


@dataclass(frozen=True, slots=True)
class OxiaAddress:
    """A namespace, and some servers of its cluster as host:port."""

    servers: tuple[str, ...]
    namespace: str


def parse_address(url: str) -> OxiaAddress:
    """The address in a URL, with or without its scheme.  Raises `InvalidOxiaAddress`."""
    named, _, namespace = url.removeprefix("oxia:").removeprefix("//").partition("/")
    servers = tuple(map(_server, named.split(",")))
    if None in servers or _NAMESPACE.fullmatch(namespace) is None:
        raise InvalidOxiaAddress(
            f"{url!r} names no Oxia cluster: use oxia://HOST:PORT,HOST:PORT/NAMESPACE, such as "
            "oxia://oxia:6648/magnetar."
        )
    return OxiaAddress(tuple(filter(None, servers)), namespace or DEFAULT_NAMESPACE)


def _server(text: str) -> str | None:
    """HOST:PORT; None if it is no address."""
    match = _SERVER.fullmatch(text)
    if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65536:
        return None
    return f"{match[1]}:{match[2] or DEFAULT_PORT}"
