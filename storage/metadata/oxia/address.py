"""Where an Oxia cluster is: `oxia://HOST:PORT/NAMESPACE`, as Pulsar writes it.  Pure."""

import re
from dataclasses import dataclass
from typing import ClassVar

from protocol.server_error import OperatorError, ServerError

SCHEME = "oxia://"
DEFAULT_NAMESPACE = "default"
DEFAULT_PORT = 6648

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s:/,\[\]]+)(?::(\d{1,5}))?(?:/([^\s/]*))?", re.ASCII)


class InvalidOxiaAddress(OperatorError):
    """The address of an Oxia cluster cannot be understood."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


@dataclass(frozen=True, slots=True)
class OxiaAddress:
    """`server` is any server of the cluster, as host:port."""

    server: str
    namespace: str


def parse_address(url: str) -> OxiaAddress:
    """The address in a URL, with or without its scheme.  Raises `InvalidOxiaAddress`."""
    match = _ADDRESS.fullmatch(url.removeprefix("oxia:").removeprefix("//"))
    if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65536:
        raise InvalidOxiaAddress(
            f"{url!r} names no Oxia cluster: use oxia://HOST:PORT/NAMESPACE, such as "
            "oxia://oxia:6648/magnetar."
        )
    return OxiaAddress(f"{match[1]}:{match[2] or DEFAULT_PORT}", match[3] or DEFAULT_NAMESPACE)
