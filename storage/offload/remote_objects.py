"""Objects in S3, or in the object stores of Google and Azure, by the library `obstore`.

Credentials, and settings that the operator left out, come from the environment, as for the tools of
those stores (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, a role of the machine and so on).
"""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from config.bounds import (
    OFFLOAD_PART_BYTES,
    OFFLOAD_PARTS_AT_ONCE,
    OFFLOAD_PARTS_MAX,
    OFFLOAD_REQUEST_S,
    OFFLOAD_RETRIES,
)
from storage.offload.context import Location
from storage.offload.errors import OffloadedDataLost, OffloadFailed
from storage.offload.objects import Objects, StoredObject

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_ATTRIBUTES: Final = {
    "Content-Type": "application/octet-stream",
    "s3managedledgeroffloaderformatversion": "1",
}
"""Pulsar reads no object without the second one."""
_REASON_CHARS: Final = 300
_FAILURES: Final = (BaseError, OSError, ValueError)


class RemoteObjects(Objects):
    """`Objects` in an object store: an upload in parts is visible only when it is complete."""

    def __init__(self, location: Location, *, size_hint_bytes: int) -> None:
        self._location = location
        self._part_bytes = max(OFFLOAD_PART_BYTES, size_hint_bytes // OFFLOAD_PARTS_MAX)
        try:
            self._store = _open(location)
        except _FAILURES as error:
            raise self._failed("opened", error) from error

    async def put(self, key: str, parts: AsyncIterator[bytes]) -> None:
        """See `Objects`."""
        try:
            await obstore.put_async(
                self._store,
                key,
                parts,
                attributes=dict(_ATTRIBUTES),
                use_multipart=True,
                chunk_size=self._part_bytes,
                max_concurrency=OFFLOAD_PARTS_AT_ONCE,
            )
        except _FAILURES as error:
            raise self._failed("written to", error) from error

    async def put_whole(self, key: str, data: bytes) -> None:
        """See `Objects`."""
        try:
            await obstore.put_async(self._store, key, data, attributes=dict(_ATTRIBUTES))
        except _FAILURES as error:
            raise self._failed("written to", error) from error

    async def read(self, key: str, start: int, length: int) -> bytes:
        """See `Objects`."""
        try:
            found = await obstore.get_range_async(self._store, key, start=start, length=length)
        except _FAILURES as error:
            raise self._not_read(key, error) from error
        return bytes(found)

    async def size(self, key: str) -> int:
        """See `Objects`."""
        try:
            return (await obstore.head_async(self._store, key))["size"]
        except _FAILURES as error:
            raise self._not_read(key, error) from error

    async def delete(self, key: str) -> None:
        """See `Objects`."""
        try:
            await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise self._failed("deleted from", error) from error

    async def list(self) -> AsyncIterator[StoredObject]:
        """See `Objects`."""
        try:
            async for some in obstore.list(self._store):
                for meta in some:
                    modified_ms = int(meta["last_modified"].timestamp() * 1000)
                    yield StoredObject(meta["path"], meta["size"], modified_ms)
        except _FAILURES as error:
            raise self._failed("listed", error) from error

    def _not_read(self, key: str, error: Exception) -> OffloadFailed | OffloadedDataLost:
        if isinstance(error, FileNotFoundError):
            return OffloadedDataLost(
                f"The object {key} with offloaded entries is not in {self._location.url}: "
                "restore it there."
            )
        return self._failed("read", error)

    def _failed(self, action: str, error: Exception) -> OffloadFailed:
        lines = str(error).strip().splitlines()
        reason = lines[0][:_REASON_CHARS] if lines else type(error).__name__
        return OffloadFailed(
            f"{self._location.url} could not be {action} ({reason}): check the bucket, its "
            "endpoint and the credentials in the environment of the broker."
        )


def _open(location: Location) -> S3Store | GCSStore | AzureStore:
    client: ClientConfig = {"timeout": timedelta(seconds=OFFLOAD_REQUEST_S)}
    if location.endpoint.startswith("http://"):
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": OFFLOAD_RETRIES,
        "retry_timeout": timedelta(seconds=OFFLOAD_REQUEST_S),
    }
    prefix = location.prefix or None
    if location.scheme == "gs":
        return GCSStore(location.bucket, prefix=prefix, client_options=client, retry_config=retry)
    if location.scheme == "az":
        return AzureStore(location.bucket, prefix=prefix, client_options=client, retry_config=retry)
    config: S3Config = {}
    if location.region:
        config["region"] = location.region
    if location.endpoint:
        config["endpoint"] = location.endpoint
    return S3Store(
        location.bucket, prefix=prefix, config=config, client_options=client, retry_config=retry
    )
