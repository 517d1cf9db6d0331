"""A metadata store that counts the writes of this process and how long they take.

Rules:

- A write counts when it is asked for, whatever comes of it; its time counts when it ends, apart by
  success and failure.  A failed condition is a failure, as in Pulsar.  A cancelled one has no time.
- Reads and watches pass straight through.  Order is kept: nothing is awaited before the store is.
- What a store of ledgers writes for itself is not counted: on BookKeeper that is another client.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from storage.metadata.store import (
    IndexEntry,
    MetadataStore,
    PutResult,
    Session,
    Version,
)
from storage.metadata.wrapped import WrappedMetadataStore
from txn.counters import Histogram

WRITE_BUCKETS_MS: Final = (1.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3)
"""Pulsar's."""

_T = TypeVar("_T")


def _histogram() -> Histogram:
    return Histogram(WRITE_BUCKETS_MS)


@dataclass(slots=True)
class WriteCounters:
    """Of one kind of write, in ms."""

    asked: int = 0
    succeeded: Histogram = field(default_factory=_histogram)
    failed: Histogram = field(default_factory=_histogram)


class CountedMetadata(WrappedMetadataStore):
    """See the module's rules.  `elapsed_s` is a clock that never goes back."""

    def __init__(self, store: MetadataStore, elapsed_s: Callable[[], float]) -> None:
        super().__init__(store)
        self.puts = WriteCounters()
        self.deletes = WriteCounters()
        self._elapsed_s = elapsed_s

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        """See `MetadataStore`."""
        write = super().put(
            key,
            value,
            partition=partition,
            expect=expect,
            session=session,
            sequence=sequence,
            indexes=indexes,
        )
        return await self._counted(self.puts, write)

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """See `MetadataStore`."""
        write = super().delete(key, partition=partition, expect=expect)
        return await self._counted(self.deletes, write)

    async def _counted(self, counters: WriteCounters, write: Awaitable[_T]) -> _T:
        counters.asked += 1
        began_s = self._elapsed_s()
        try:
            result = await write
        except Exception:
            counters.failed.observe(1000 * (self._elapsed_s() - began_s))
            raise
        counters.succeeded.observe(1000 * (self._elapsed_s() - began_s))
        return result
