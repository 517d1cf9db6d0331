"""The address of a ZooKeeper, as Pulsar writes it: `zk:HOST:PORT,HOST:PORT/CHROOT`.  Pure."""

import re
from dataclasses import dataclass
from typing import ClassVar

from magnetar.protocol.server_error import OperatorError, ServerError

SCHEME = "zk:"
DEFAULT_PORT = 2181

_SERVER = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[^\s:/,\[\]]+)(?::(\d{1,5}))?", re.ASCII)
_CHROOT = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[^/\s\x00-\x1f]+)*")


class InvalidZooKeeperAddress(OperatorError):
    """The address of a ZooKeeper cannot be understood."""

    code: ClassVar[ServerError] = ServerError.METADATA_ERROR


@dataclass(frozen=True, slots=True)
class ZooKeeperAddress:
    """`servers` as `host:port,host:port`; `root` is the chroot, empty for none."""

    servers: str
    root: str = ""


def parse_address(url: str) -> ZooKeeperAddress:
    """The address in a URL, with or without its `zk:`.  Raises `InvalidZooKeeperAddress`."""
    text = url.removeprefix(SCHEME)
    servers, slash, chroot = text.partition("/")
    root = (slash + chroot).rstrip("/")
    matches = [_SERVER.fullmatch(server) for server in servers.split(",")]
    if not all(matches) or not _CHROOT.fullmatch(root):
        raise InvalidZooKeeperAddress(
            f"{url!r} names no ZooKeeper: use zk:HOST:PORT,HOST:PORT/CHROOT, such as "
            "zk:zk1:2181,zk2:2181,zk3:2181/magnetar."
        )
    found = [match[0] if match[1] else f"{match[0]}:{DEFAULT_PORT}" for match in matches if match]
    return ZooKeeperAddress(",".join(found), root)
