"""Service URLs and addresses of brokers.  Pure.

pulsar://host[:6650][,host[:port]...]            pulsar+ssl://host[:6651][,...]
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from magnetar.errors import InvalidArgument

__all__ = ["BrokerAddress", "HostPort", "ServiceUrl", "parse_service_url"]

_PORTS: Final = {"pulsar": 6650, "pulsar+ssl": 6651}
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/@?#\s]+))(?::([0-9]{1,5}))?")


class HostPort(NamedTuple):
    """A TCP address; the host is as written, IPv6 without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address of one broker (`logical`), and the one to connect to (`physical`).

    They differ if there is a proxy between.
    """

    logical: HostPort
    physical: HostPort
    tls: bool = False

    @property
    def proxied(self) -> bool:
        """Whether the connection goes through a proxy."""
        return self.logical != self.physical

    def __str__(self) -> str:
        scheme = "pulsar+ssl" if self.tls else "pulsar"
        through = f" through {self.physical}" if self.proxied else ""
        return f"{scheme}://{self.logical}{through}"


@dataclass(frozen=True, slots=True)
class ServiceUrl:
    """One or more hosts of the same cluster."""

    hosts: tuple[HostPort, ...]
    tls: bool


def parse_service_url(text: str) -> ServiceUrl:
    """The hosts of a URL.  Raises `InvalidArgument`."""
    scheme, separator, rest = text.partition("://") if isinstance(text, str) else ("", "", "")
    if not separator or scheme not in _PORTS:
        raise InvalidArgument(
            f"{text!r} is no address of a Pulsar broker; "
            "begin it with pulsar:// or pulsar+ssl://, for example pulsar://localhost:6650."
        )
    hosts: list[HostPort] = []
    for part in rest.removesuffix("/").split(","):
        found = _HOST.fullmatch(part)
        port = int(found[3] or _PORTS[scheme]) if found else 0
        if found is None or not 0 < port < 65536 or not _is_encodable(found[1] or found[2]):
            raise InvalidArgument(
                f"{part!r} in {text!r} is no host; write host or host:port, separated by commas."
            )
        hosts.append(HostPort(found[1] or found[2], port))
    return ServiceUrl(tuple(hosts), scheme == "pulsar+ssl")


def _is_encodable(host: str) -> bool:
    """Whether a host can be looked up at all.

    The event loop raises no error of the network for one with an empty or too long label.
    """
    try:
        return host.isprintable() and bool(host.encode("idna"))
    except UnicodeError:
        return False
