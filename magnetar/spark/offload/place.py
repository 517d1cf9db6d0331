"""The place of a table: named objects below a directory or a prefix of a bucket."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Final, Literal
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from magnetar.spark.errors import InvalidOption, PipelineError

if TYPE_CHECKING:
    # These types are only in the stubs of obstore.
    from obstore.store import ClientConfig, S3Config

__all__ = ["TablePlace", "PlaceFailed", "place_of"]

WRITING: Final = ".writing"
PART_BYTES: Final = 8 * 1024 * 1024
_Key = Literal["access_key_id", "secret_access_key", "session_token", "region", "endpoint"]
_HANDED_ON: Final[Mapping[str, _Key]] = MappingProxyType(
    {
        "AWS_ACCESS_KEY_ID": "access_key_id",
        "AWS_SECRET_ACCESS_KEY": "secret_access_key",
        "AWS_SESSION_TOKEN": "session_token",
        "AWS_REGION": "region",
        "AWS_ENDPOINT_URL": "endpoint",
    }
)


class PlaceFailed(PipelineError):
    """The place of a table could not be read or written."""


@dataclass(frozen=True, slots=True)
class TablePlace:
    """A directory (`bucket` None) or a prefix of a bucket, pickled for tasks.

    An object has its name only when it is whole: a file is written beside it, synced and renamed,
    and an upload appears when it is complete.  A part of `PART_BYTES` at a time is in memory.
    Methods raise `PlaceFailed`.
    """

    url: str
    path: str
    bucket: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of S3 in the driver's environment, for tasks on other machines.

    Those that the driver lacks, such as a role of the machine, a task finds on its own machine.
    """

    def put(self, name: str, data: IO[bytes]) -> None:
        """Store a file, from its current position; it replaces the object of that name."""
        with self._explain_failure("written to"):
            if self.bucket is None:
                _write(Path(self.path, name), data)
            else:
                obstore.put(self._store(), name, data, chunk_size=PART_BYTES)

    def get(self, name: str, to: IO[bytes]) -> bool:
        """Copy an object into a file; whether it is there."""
        with self._explain_failure("read"):
            try:
                if self.bucket is None:
                    with Path(self.path, name).open("rb") as file:
                        shutil.copyfileobj(file, to, PART_BYTES)
                else:
                    for part in obstore.get(self._store(), name).stream(PART_BYTES):
                        to.write(part)
            except FileNotFoundError:
                return False
        return True

    def _store(self) -> S3Store:
        assert self.bucket is not None
        config: S3Config = {}
        for name, key in _HANDED_ON.items():
            if name in self.settings:
                config[key] = self.settings[name]
        client: ClientConfig = {}
        if self.settings.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            client["allow_http"] = True
        prefix = self.path or None
        return S3Store(self.bucket, prefix=prefix, config=config, client_options=client)

    @contextmanager
    def _explain_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise PlaceFailed(
                f"{self.url} could not be {what} ({lines[0][:300]}): check that it is there, and "
                "for a bucket the region, the endpoint and the credentials in the environment."
            ) from error


def place_of(url: str, environment: Mapping[str, str] | None = None) -> TablePlace:
    """The place of a path, `file:///PATH` or `s3://BUCKET/PREFIX`.  Raises `InvalidOption`."""
    known = os.environ if environment is None else environment
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc and not parts.query:
        settings = {name: known[name] for name in _HANDED_ON if known.get(name)}
        return TablePlace(url, parts.path.strip("/"), parts.netloc, settings)
    if parts.scheme == "file" and not parts.netloc and parts.path:
        return TablePlace(url, unquote(parts.path))
    if "://" in url or not url:
        raise InvalidOption(
            f"{url!r} is no place for a table: give a path, file:///PATH or s3://BUCKET/PREFIX."
        )
    return TablePlace(url, str(Path(url).absolute()))


def _write(path: Path, data: IO[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + WRITING)
    with beside.open("wb") as file:
        shutil.copyfileobj(data, file, PART_BYTES)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
