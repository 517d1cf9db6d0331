"""All access of transactions to the metadata store.

Rules (T, G, W, A: `docs/transactions.md`):

- T1: a header is created by a create-only put; numbers are reserved by a conditional write.
- T2, G2, G8: a header is ended, and an open group's changed, by a put on the version read.
- G1: the header of an attempt is its group's, with the attempt's own state.
- G9: a listing of a group has the records of all its attempts.
- W5: an aborted record only rises, by a conditional write.
- W6: a claim or acknowledgement record is deleted by its exact key.
- W7, W8, W10, A3: scans that decide what may be delivered or collected are fresh.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from config.bounds import TXN_PAGE, TXN_PAGE_BYTES, TXN_SLICE_ENDS
from magnetar.protocol.ids import Position
from magnetar.protocol.names import encode_name
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.keys import exact_range, number, prefix_range
from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    IndexHit,
    MetadataStore,
    Record,
    Version,
    VersionConflict,
    is_cut,
)
from txn import records
from txn.counters import TransactionCounters
from txn.epoch_floor import raise_floor, read_floor
from txn.errors import CorruptTransactionRecord
from txn.header import header_of
from txn.records import AckRecord, Claim, Header, OwnerRecord, TxnState

log = structlog.get_logger(__name__)

_FOR_EVER_MS = 10**15
_FIRST_KEY, _LAST_KEY = " ", "\x7f"
"""Bounds around all URL-encoded names."""


@dataclass(frozen=True, slots=True)
class StoredHeader:
    """A header and the version that a conditional write names."""

    txn: TxnId
    header: Header
    version: Version


@dataclass(frozen=True, slots=True)
class StoredOwner:
    """An owner record and the version that proves ownership."""

    owner: OwnerRecord
    version: Version


class TransactionStore:
    """The records of transactions in the metadata store.

    All methods raise `MetadataError` when the store fails.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        counters: TransactionCounters,
        *,
        elapsed_s: Callable[[], float] = time.perf_counter,
        page_bytes: int = TXN_PAGE_BYTES,
    ) -> None:
        self.metadata = metadata
        self.counters = counters
        self._elapsed_s = elapsed_s
        self._page_bytes = page_bytes

    # Headers

    async def create_header(self, txn: TxnId, header: Header) -> Version:
        """Begin a transaction (T1).  Raises `VersionConflict` if it has a header."""
        # T1: never over another header.
        return await self._put_header(txn, header, ABSENT)

    async def read_header(self, txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        """Read a header; None if there is none.

        With `fresh` the read shows every end that any broker answered before it began (A8).  For an
        attempt the group's header is read; None if there is no such attempt (G1).
        """
        partition = records.partition_of(txn)
        record = await self.metadata.get(records.header_key(txn), partition=partition, fresh=fresh)
        if record is None:
            return None
        stored = stored_header(record)
        # G1: with the state of the attempt.
        header = header_of(stored.header, txn)
        return None if header is None else StoredHeader(txn, header, stored.version)

    async def read_headers(
        self, txns: Iterable[TxnId], *, fresh: bool = False
    ) -> AsyncIterator[tuple[TxnId, Header | None]]:
        """As `read_header` for each; a group's header is read and decoded once for its attempts.

        It yields to the loop between slices of TXN_SLICE_ENDS.
        """
        wanted: dict[TxnId, list[TxnId]] = {}
        for txn in txns:
            wanted.setdefault(txn.group, []).append(txn)
        groups = list(wanted)
        for start in range(0, len(groups), TXN_PAGE):
            page = groups[start : start + TXN_PAGE]
            reads = (self.read_header(group, fresh=fresh) for group in page)
            for group, stored in zip(page, await asyncio.gather(*reads), strict=True):
                for count, txn in enumerate(wanted[group], start=1):
                    yield txn, None if stored is None else header_of(stored.header, txn)
                    if count % TXN_SLICE_ENDS == 0:
                        await asyncio.sleep(0)

    async def end_header(self, txn: TxnId, header: Header, expect: Version) -> Version:
        """Write the end of a transaction on the version read (T2).  Raises `VersionConflict`."""
        # T2: so one end is not written over another.
        return await self._put_header(txn, header, expect)

    async def change_header(self, txn: TxnId, header: Header, expect: Version) -> Version:
        """Write an open group on the version read (G2, G8).  Raises `VersionConflict`."""
        # G2, G8: so neither a reserved block nor a later deadline is lost.
        return await self._put_header(txn, header, expect)

    async def delete_header(self, stored: StoredHeader) -> bool:
        """Delete a header on the version read; False if there was none.

        Raises `VersionConflict`.
        """
        key = records.header_key(stored.txn)
        return await self.metadata.delete(
            key, partition=records.partition_of(stored.txn), expect=stored.version
        )

    async def _put_header(self, txn: TxnId, header: Header, expect: Version) -> Version:
        assert not txn.attempt_index, f"{txn} has no header of its own"
        result = await self.metadata.put(
            records.header_key(txn),
            records.encode_header(header),
            partition=records.partition_of(txn),
            expect=expect,
            indexes=records.header_indexes(header),
        )
        return result.version

    async def open_headers(self, up_to_ms: int | None = None) -> AsyncIterator[list[StoredHeader]]:
        """Open transactions in pages, by deadline; with a time, those due at or before it."""
        hi = number(_FOR_EVER_MS if up_to_ms is None else up_to_ms + 1)
        async for page in self._header_pages(records.DEADLINE_INDEX, number(0), hi):
            yield page

    async def ended_headers(
        self, state: TxnState, up_to_ms: int
    ) -> AsyncIterator[list[StoredHeader]]:
        """Headers that ended so at a time or before, the oldest first, in pages."""
        lo, hi = f"{state.value}:{number(0)}", f"{state.value}:{number(up_to_ms + 1)}"
        async for page in self._header_pages(records.FINAL_STATE_INDEX, lo, hi):
            yield page

    async def _header_pages(
        self, index: str, lo: str, hi: str
    ) -> AsyncIterator[list[StoredHeader]]:
        """Headers in pages, in order of their secondary keys."""
        # A page begins at the last secondary key of the page before, which several headers may
        # have.  If all of a page have one key, the page is read again at twice the size.
        times, seen = 1, set[str]()
        while True:
            limit, max_bytes = times * TXN_PAGE, times * self._page_bytes
            hits = await self._index(index, lo, hi, limit=limit, max_bytes=max_bytes)
            fresh = [hit.record for hit in hits if hit.record.key not in seen]
            if fresh:
                yield _headers(fresh)
            if not is_cut(hits, limit, max_bytes):
                return
            last = hits[-1].index_key
            if last > lo:
                times, lo, seen = 1, last, set()
            else:
                times *= 2
            seen.update(hit.record.key for hit in hits if hit.index_key == last)

    # Claims and acknowledgement records

    async def put_claim(self, claim: Claim) -> None:
        """Store a claim (W1)."""
        await self._put_operation(
            claim.txn,
            records.claim_key(claim.txn, claim.segment, claim.epoch),
            records.encode_claim(claim),
            records.claim_indexes(claim.segment),
        )

    async def put_ack(self, record: AckRecord) -> None:
        """Store the acknowledgement record of one command (A1)."""
        await self._put_operation(
            record.txn,
            records.ack_key(record),
            records.encode_ack(record),
            records.ack_indexes(record.segment, record.subscription),
        )

    async def _put_operation(
        self, txn: TxnId, key: str, value: bytes, indexes: tuple[IndexEntry, ...]
    ) -> None:
        """Store a claim or acknowledgement record, over one that an earlier try may have left."""
        put = partial(
            self.metadata.put, key, value, partition=records.partition_of(txn), indexes=indexes
        )
        # The record is nearly always new, and a store that expects none saves a read.  It exists
        # only after a put whose outcome was unknown.
        try:
            result = await put(expect=ABSENT)
        except VersionConflict:
            result = await put()
        self.counters.op_writes += 1
        if result.modifications == 0:
            self.counters.op_records += 1

    async def delete_operation(self, txn: TxnId, key: str) -> None:
        """Delete one claim or acknowledgement record, if it is there (W6)."""
        # W6: by exact key, never by range, so that a successor's claim stays.
        if await self.metadata.delete(key, partition=records.partition_of(txn)):
            self.counters.op_deletes += 1
            self.counters.op_records = max(0, self.counters.op_records - 1)

    async def transactions_with_records(self, limit: int) -> set[TxnId] | None:
        """List the transactions that have a claim or acknowledgement record, fresh (W10).

        A group stands for its attempts (G9).  None if there are `limit` records of a kind or more:
        then the records of each transaction have to be listed.
        """
        found: set[TxnId] = set()
        # W10: a scan that is not fresh might lack a record.
        for index in (records.WRITES_INDEX, records.ACKS_INDEX):
            hits = await self._index(index, _FIRST_KEY, _LAST_KEY, fresh=True, limit=limit)
            if len(hits) >= limit:
                return None
            found.update(records.txn_of_operation(hit.record.key).group for hit in hits)
        return found

    async def recount(self) -> None:
        """Count the stored records and set `op_records`, unless records came or went meanwhile.

        It corrects the count after writes whose outcome was unknown.
        """
        counters = self.counters
        before = counters.op_writes, counters.op_deletes
        found = await self.count_operations()
        if before == (counters.op_writes, counters.op_deletes):
            counters.op_records = found

    async def count_operations(self) -> int:
        """The number of stored claims and acknowledgement records.  For metrics: not fresh."""
        count = 0
        for index in (records.WRITES_INDEX, records.ACKS_INDEX):
            lo, limit, last_keys = _FIRST_KEY, TXN_PAGE, 0
            while True:
                hits = await self._index(index, lo, _LAST_KEY, limit=limit)
                count += len(hits) - last_keys
                if len(hits) < limit:
                    break
                last = hits[-1].index_key
                limit = TXN_PAGE if last > lo else limit * 2
                lo, last_keys = last, sum(hit.index_key == last for hit in hits)
        return count

    async def operations_of(self, txn: TxnId) -> list[Claim | AckRecord]:
        """Every claim and acknowledgement record of a transaction: a fresh listing (W10).

        Of a group, those of all its attempts (G9).
        """
        # G9: the range of a group has the records of its attempts.
        lo, hi = records.operations_range(txn)
        found = await self.metadata.scan(lo, hi, partition=records.partition_of(txn), fresh=True)
        decoded = (records.decode_operation(record.key, record.value) for record in found)
        return [each for each in decoded if not txn.attempt_index or each.txn == txn]

    async def claims_on(self, segment: str) -> list[Claim]:
        """Every claim on a segment: a fresh scan (W7)."""
        # W7: fresh, so that no claim that was stored before the log was fenced is missing.
        return await self._claims_on(segment, fresh=True)

    async def some_claims_on(self, segment: str, limit: int) -> list[Claim]:
        """At most `limit` claims on a segment, by transaction.  For operators: not fresh."""
        return await self._claims_on(segment, limit=limit)

    async def _claims_on(
        self, segment: str, *, fresh: bool = False, limit: int | None = None
    ) -> list[Claim]:
        found = exact_range(encode_name(segment))
        hits = await self._index(records.WRITES_INDEX, *found, fresh=fresh, limit=limit)
        return [each async for each in _operations(hits) if isinstance(each, Claim)]

    async def acks_on(self, segment: str, subscription: str) -> list[AckRecord]:
        """Every acknowledgement record of a subscription: a fresh scan (A3)."""
        # A3: fresh, so that no record that was answered is missing.
        key = records.acks_index_key(segment, subscription)
        hits = await self._index(records.ACKS_INDEX, *exact_range(key), fresh=True)
        return [each async for each in _operations(hits) if isinstance(each, AckRecord)]

    async def acks_on_segment(self, segment: str) -> list[AckRecord]:
        """Every acknowledgement record of a segment: a fresh scan."""
        prefix = f"{encode_name(segment)}:"
        hits = await self._index(records.ACKS_INDEX, *prefix_range(prefix), fresh=True)
        return [each async for each in _operations(hits) if isinstance(each, AckRecord)]

    # Segments

    async def read_owner(self, segment: str, *, fresh: bool = False) -> StoredOwner | None:
        """Read a segment's owner record; None if no epoch was ever taken there."""
        key = records.owner_key(segment)
        record = await self.metadata.get(key, partition=encode_name(segment), fresh=fresh)
        if record is None:
            return None
        return StoredOwner(records.decode_owner(record.key, record.value), record.version)

    async def put_owner(self, segment: str, owner: OwnerRecord, expect: Version) -> Version:
        """Take an epoch (W7), or prove that this owner still has it.  Raises `VersionConflict`."""
        # W7: on the version read, so that a lower epoch never replaces a higher.
        result = await self.metadata.put(
            records.owner_key(segment),
            records.encode_owner(owner),
            partition=encode_name(segment),
            expect=expect,
        )
        return result.version

    async def aborted_on(self, segment: str) -> dict[TxnId, Position]:
        """The aborted set of a segment: a position at or after the last entry of each (W8)."""
        # W8: fresh, as a stale owner may have recorded an abort just now.
        prefix = f"{encode_name(segment)}:"
        hits = await self._index(records.ABORTED_INDEX, *prefix_range(prefix), fresh=True)
        return dict(
            [
                records.decode_aborted(hit.record.key, hit.record.value)
                async for hit in _in_turns(hits)
            ]
        )

    async def read_aborted(self, segment: str, txn: TxnId) -> Position | None:
        """Read the aborted record of one transaction (W9); None if there is none."""
        record = await self._aborted(segment, txn)
        return None if record is None else records.decode_aborted(record.key, record.value)[1]

    async def record_aborted(self, segment: str, txn: TxnId, up_to: Position) -> Position:
        """Raise an aborted record to a position at least (W5); return the stored position."""
        key, partition = records.aborted_key(segment, txn), encode_name(segment)
        while True:
            record = await self._aborted(segment, txn)
            if record is not None:
                _, stored = records.decode_aborted(key, record.value)
                # W5: never lowered, as by a late put of a stale owner.
                if stored >= up_to:
                    return stored
            try:
                await self.metadata.put(
                    key,
                    records.encode_aborted(up_to),
                    partition=partition,
                    expect=ABSENT if record is None else record.version,
                    indexes=records.aborted_indexes(segment, up_to),
                )
            except VersionConflict:
                continue
            return up_to

    async def forget_aborted(self, segment: str, txn: TxnId) -> None:
        """Delete an aborted record: the ledgers of its entries are deleted."""
        key = records.aborted_key(segment, txn)
        await self.metadata.delete(key, partition=encode_name(segment))

    async def delete_owner(self, segment: str) -> None:
        """Delete the owner record of a deleted segment (W3, W6)."""
        # W3, W6: the floor makes the epochs of a later segment of that name higher.
        key, partition = records.owner_key(segment), encode_name(segment)
        while (stored := await self.read_owner(segment, fresh=True)) is not None:
            await raise_floor(self.metadata, records.EPOCH_FLOOR, stored.owner.epoch)
            with contextlib.suppress(VersionConflict):
                await self.metadata.delete(key, partition=partition, expect=stored.version)

    async def read_epoch_floor(self) -> int:
        """The highest epoch that a deleted segment had; 0 if none was deleted."""
        return await read_floor(self.metadata, records.EPOCH_FLOOR, fresh=True) or 0

    async def _aborted(self, segment: str, txn: TxnId) -> Record | None:
        key = records.aborted_key(segment, txn)
        return await self.metadata.get(key, partition=encode_name(segment))

    # Cleanup requests

    async def request_cleanup(self, segment: str, at_ms: int) -> None:
        """Ask the owner of a segment to clean up records of ended transactions (W11)."""
        await self.metadata.put(records.cleanup_request_key(segment), str(at_ms).encode())

    async def delete_cleanup_request(self, segment: str, seen: Version) -> None:
        """Delete a cleanup request that the segment's owner has answered; a newer one stays."""
        try:
            await self.metadata.delete(records.cleanup_request_key(segment), expect=seen)
        except VersionConflict:
            return

    # Coordinators

    async def reserve_numbers(self, coordinator: CoordinatorId, count: int) -> range:
        """Reserve numbers that nobody else ever gets (T1).  Unused ones are lost."""
        # T1: by a write on the version read.
        key = records.sequence_key(coordinator)
        while True:
            record = await self.metadata.get(key)
            first = 0 if record is None else records.decode_sequence(key, record.value)
            try:
                await self.metadata.put(
                    key,
                    records.encode_sequence(first + count),
                    expect=ABSENT if record is None else record.version,
                )
            except VersionConflict:
                continue
            return range(first, first + count)

    async def _index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> Sequence[IndexHit]:
        began_s = self._elapsed_s()
        hits = await self.metadata.scan_index(
            index, lo, hi, fresh=fresh, limit=limit, max_bytes=max_bytes
        )
        self.counters.index_query.observe(self._elapsed_s() - began_s)
        return hits


def stored_header(record: Record) -> StoredHeader:
    """Decode the record of a header.  Raises `CorruptTransactionRecord`."""
    txn = records.txn_of_header(record.key)
    return StoredHeader(txn, records.decode_header(record.key, record.value), record.version)


def _headers(found: Iterable[Record]) -> list[StoredHeader]:
    """Decode headers.  A corrupt header is logged and left out, and does not stop the others."""
    headers = []
    for record in found:
        try:
            headers.append(stored_header(record))
        except CorruptTransactionRecord as error:
            log.error("transaction_header_corrupt", error=str(error))
    return headers


async def _operations(hits: Iterable[IndexHit]) -> AsyncIterator[Claim | AckRecord]:
    async for hit in _in_turns(hits):
        yield records.decode_operation(hit.record.key, hit.record.value)


async def _in_turns(hits: Iterable[IndexHit]) -> AsyncIterator[IndexHit]:
    """Yield each hit, and yield to the loop between slices: a large group has many."""
    for seen, hit in enumerate(hits, start=1):
        yield hit
        if seen % TXN_SLICE_ENDS == 0:
            await asyncio.sleep(0)
