"""A metadata store that hands every call on to another one: the base of those that add something.

Nothing is awaited between a call and the store's own, so the order of calls stays.
"""

from collections.abc import Coroutine, Sequence
from typing import TypeVar

from storage.metadata.store import (
    IndexEntry,
    IndexHit,
    MetadataStore,
    PutResult,
    Record,
    Session,
    Version,
    Wanted,
    Watch,
)

_T = TypeVar("_T")


class MetadataStoreWrapper(MetadataStore):
    """Hands every call on to another store; the base of those that add something.

    Each method is as in `MetadataStore`.  Override `_asked` to add something to every request for
    records, or single methods to add it to some.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    def _asked(self, request: Coroutine[object, object, _T]) -> Coroutine[object, object, _T]:
        """Return the read or write of records to await in place of `request`, not begun yet.

        Watches, sessions and closing do not pass here: override their methods.
        """
        return request

    def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> Coroutine[object, object, PutResult]:
        """See `MetadataStore`."""
        return self._asked(
            self._store.put(
                key,
                value,
                partition=partition,
                expect=expect,
                session=session,
                sequence=sequence,
                indexes=indexes,
            )
        )

    def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> Coroutine[object, object, bool]:
        """See `MetadataStore`."""
        return self._asked(self._store.delete(key, partition=partition, expect=expect))

    def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Coroutine[object, object, Record | None]:
        """See `MetadataStore`."""
        return self._asked(self._store.get(key, partition=partition, fresh=fresh))

    def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> Coroutine[object, object, list[Record | None]]:
        """See `MetadataStore`."""
        return self._asked(self._store.get_many(keys, partition=partition))

    def children(self, key: str) -> Coroutine[object, object, list[str]]:
        """See `MetadataStore`."""
        return self._asked(self._store.children(key))

    def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> Coroutine[object, object, list[Record]]:
        """See `MetadataStore`."""
        return self._asked(self._store.scan(lo, hi, partition=partition, fresh=fresh))

    def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> Coroutine[object, object, list[IndexHit]]:
        """See `MetadataStore`."""
        return self._asked(
            self._store.scan_index(
                index, lo, hi, partition=partition, fresh=fresh, limit=limit, max_bytes=max_bytes
            )
        )

    def watch_key(self, key: str, *, partition: str | None = None) -> Watch:
        """See `MetadataStore`."""
        return self._store.watch_key(key, partition=partition)

    def watch_children(self, key: str, *, wanted: Wanted | None = None) -> Watch:
        """See `MetadataStore`."""
        return self._store.watch_children(key, wanted=wanted)

    def watch_sequence(self, prefix: str, *, partition: str) -> Watch:
        """See `MetadataStore`."""
        return self._store.watch_sequence(prefix, partition=partition)

    def open_session(self, *, timeout_ms: int, identity: str) -> Coroutine[object, object, Session]:
        """See `MetadataStore`."""
        return self._store.open_session(timeout_ms=timeout_ms, identity=identity)

    def server_time_ms(self) -> Coroutine[object, object, int | None]:
        """See `MetadataStore`."""
        return self._asked(self._store.server_time_ms())

    async def close(self) -> None:
        """See `MetadataStore`."""
        await self._store.close()
