"""Pure: the entry of a copy in the record of a stream, and the locations of copies.

A copy is two objects, `<uid>-ledger-<id>` and `<uid>-ledger-<id>-index`: Pulsar's names.  Each
attempt has a uid of its own, so two attempts never write the same object.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar, Final
from urllib.parse import quote, unquote, urlsplit
from uuid import UUID

from magnetar.protocol.server_error import PeerError, ServerError

FILE: Final = "file"
_DRIVERS: Final[Mapping[str, tuple[str, str]]] = {
    "s3": ("aws-s3", "AWS_S3"),
    "gs": ("google-cloud-storage", "GOOGLE_CLOUD_STORAGE"),
    "az": ("azureblob", "AZURE_BLOB"),
    FILE: (FILE, "FILE"),
}
"""URL scheme to the name of Pulsar's driver and of its provider.  `file` is ours."""
_SCHEMES: Final = {driver: scheme for scheme, (driver, _) in _DRIVERS.items()} | {"s3": "s3"}
_NAME: Final = re.compile(
    r"(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-ledger-(?P<ledger>\d+)(?:-index)?"
)


class InvalidOffloadUrl(PeerError):
    """The URL names no location for copies."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


@dataclass(frozen=True, slots=True)
class Location:
    """A directory, or a bucket with a prefix.  `bucket` of a directory is its absolute path."""

    scheme: str
    bucket: str
    prefix: str = ""
    region: str = ""
    endpoint: str = ""

    @property
    def url(self) -> str:
        """The URL of the location, as operators write it."""
        if self.scheme == FILE:
            return "file://" + quote(self.bucket)
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    @property
    def driver(self) -> str:
        """Pulsar's name of the driver."""
        return _DRIVERS[self.scheme][0]

    @property
    def properties(self) -> dict[str, str]:
        """Pulsar's driver metadata; `prefix` is ours."""
        # No credentials: these come from the environment.
        found = {
            "managedLedgerOffloadDriver": _DRIVERS[self.scheme][1],
            "bucket": self.bucket,
            "region": self.region,
            "serviceEndpoint": self.endpoint,
        }
        return {**found, "prefix": self.prefix} if self.prefix else found


def parse_location(url: str, *, region: str = "", endpoint: str = "") -> Location:
    """Parse `s3://bucket/prefix` (also `gs`, `az`), `file:///path` or a path.

    Raises `InvalidOffloadUrl`.
    """
    parts = urlsplit(url if "://" in url else "file://" + quote(url))
    if parts.scheme == FILE:
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/") or path == "/":
            raise InvalidOffloadUrl(
                f"{url!r} is no directory for copies: write file:///an/absolute/path."
            )
        return Location(FILE, str(PurePosixPath(path)))
    if parts.scheme not in _DRIVERS or not parts.netloc or parts.query or parts.fragment:
        raise InvalidOffloadUrl(
            f"{url!r} is no place for copies: write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "az://CONTAINER/PREFIX or file:///PATH."
        )
    return Location(parts.scheme, parts.netloc, parts.path.strip("/"), region, endpoint)


@dataclass(frozen=True, slots=True)
class OffloadContext:
    """The entry of one copy, or of an attempt to make one, in the record of a stream.

    `driver` and `properties` give the location, so that a copy is found after settings have
    changed.  `complete`: the copy was read again and is whole.  `hot_deleted`: the ledger itself
    was deleted.  `offloaded_ms`: time of completion, ms since the epoch.
    """

    uid: UUID
    driver: str
    properties: Mapping[str, str] = field(default_factory=dict)
    complete: bool = False
    hot_deleted: bool = False
    offloaded_ms: int = 0

    @property
    def location(self) -> Location:
        """The location of its objects.  Raises `InvalidOffloadUrl` for unknown drivers."""
        scheme = _SCHEMES.get(self.driver.lower())
        bucket = self.properties.get("bucket", "")
        if scheme is None or not bucket:
            raise InvalidOffloadUrl(
                f"A ledger was offloaded by the driver {self.driver!r} to {bucket!r}, which is not "
                f"read here: known are {', '.join(sorted(_SCHEMES))}."
            )
        return Location(
            scheme,
            bucket,
            self.properties.get("prefix", ""),
            self.properties.get("region", ""),
            self.properties.get("serviceEndpoint", ""),
        )


def data_key(uid: UUID, ledger_id: int) -> str:
    """Name of the object with the entries."""
    return f"{uid}-ledger-{ledger_id}"


def index_key(uid: UUID, ledger_id: int) -> str:
    """Name of the object with the offsets of the entries."""
    return f"{uid}-ledger-{ledger_id}-index"


def copy_of(key: str) -> tuple[UUID, int] | None:
    """The attempt and the ledger to which an object belongs; None for other objects."""
    found = _NAME.fullmatch(key)
    return None if found is None else (UUID(found["uid"]), int(found["ledger"]))
