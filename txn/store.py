"""Every access of transactions to the metadata store, with keys, partitions and counting.

Rules:

- A header is made once, by a create-only put, and ended once, by a put on the version read (T1,
  T2).  While it is open, a group's is changed by such a put too (G2, G8).
- What is read of an attempt is read of its group's header, and told as its own (G1).
- A claim or acknowledgement record is deleted by its exact key only (W6).
- An aborted record only ever rises (W5): a conditional write, tried again on a conflict.
- Scans that decide what may be delivered or collected are fresh (W7, W10, A3).
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
"""Around every URL-encoded name."""


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
        """Begin.  Raises `VersionConflict` if there is one."""
        return await self._put_header(txn, header, ABSENT)

    async def read_header(self, txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        """The header now; None if there is none (any more).

        With `fresh` the read shows every end that was acknowledged before it began, by whichever
        broker (A8).

        Of an attempt, what its group's header says of it; None also if that says nothing (G1).
        """
        partition = records.partition_of(txn)
        record = await self.metadata.get(records.header_key(txn), partition=partition, fresh=fresh)
        if record is None:
            return None
        stored = stored_header(record)
        header = header_of(stored.header, txn)
        return None if header is None else StoredHeader(txn, header, stored.version)

    async def read_headers(
        self, txns: Iterable[TxnId], *, fresh: bool = False
    ) -> AsyncIterator[tuple[TxnId, Header | None]]:
        """As `read_header` for each; a group's header is read and decoded once for its attempts.

        Others have their turn of the loop in between.
        """
        wanted: dict[TxnId, list[TxnId]] = {}
        for txn in txns:
            wanted.setdefault(txn.group, []).append(txn)
        groups = list(wanted)
        for start in range(0, len(groups), TXN_PAGE):
            page = groups[start : start + TXN_PAGE]
            reads = (self.read_header(group, fresh=fresh) for group in page)
            for group, stored in zip(page, await asyncio.gather(*reads), strict=True):
                for told, txn in enumerate(wanted[group], start=1):
                    yield txn, None if stored is None else header_of(stored.header, txn)
                    if told % TXN_SLICE_ENDS == 0:
                        await asyncio.sleep(0)

    async def end_header(self, txn: TxnId, header: Header, expect: Version) -> Version:
        """Write the end of a transaction on the version read.  Raises `VersionConflict`."""
        return await self._put_header(txn, header, expect)

    async def change_header(self, txn: TxnId, header: Header, expect: Version) -> Version:
        """Write an open group on the version read (G2, G8).  Raises `VersionConflict`."""
        return await self._put_header(txn, header, expect)

    async def delete_header(self, stored: StoredHeader) -> bool:
        """Collect it.  Raises `VersionConflict`."""
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
        """Open transactions, those due first, in pages; with a time, those due at or before."""
        hi = number(_FOR_EVER_MS if up_to_ms is None else up_to_ms + 1)
        async for page in self._header_pages(records.DEADLINE_INDEX, number(0), hi):
            yield page

    async def ended_headers(
        self, state: TxnState, up_to_ms: int
    ) -> AsyncIterator[list[StoredHeader]]:
        """Headers in that final state since that time or longer, the oldest first, in pages."""
        lo, hi = f"{state.value}:{number(0)}", f"{state.value}:{number(up_to_ms + 1)}"
        async for page in self._header_pages(records.FINAL_STATE_INDEX, lo, hi):
            yield page

    async def _header_pages(
        self, index: str, lo: str, hi: str
    ) -> AsyncIterator[list[StoredHeader]]:
        """Pages begin with the last secondary key of the page before: several may have it."""
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
        """Make the claim durable (W1)."""
        await self._put_operation(
            claim.txn,
            records.claim_key(claim.txn, claim.segment, claim.epoch),
            records.encode_claim(claim),
            records.claim_indexes(claim.segment),
        )

    async def put_ack(self, record: AckRecord) -> None:
        """Make the acknowledgements of one command durable (A1)."""
        await self._put_operation(
            record.txn,
            records.ack_key(record),
            records.encode_ack(record),
            records.ack_indexes(record.segment, record.subscription),
        )

    async def _put_operation(
        self, txn: TxnId, key: str, value: bytes, indexes: tuple[IndexEntry, ...]
    ) -> None:
        """Put a claim or acknowledgement record, over one that an earlier try may have left."""
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
        """Delete one claim or acknowledgement record, if it is there."""
        if await self.metadata.delete(key, partition=records.partition_of(txn)):
            self.counters.op_deletes += 1
            self.counters.op_records = max(0, self.counters.op_records - 1)

    async def transactions_with_records(self, limit: int) -> set[TxnId] | None:
        """List the transactions that have a claim or acknowledgement record, fresh (W10).

        A group stands for its attempts (G9).
        None if there are `limit` records of a kind or more: then list each transaction's own.
        """
        found: set[TxnId] = set()
        for index in (records.WRITES_INDEX, records.ACKS_INDEX):
            hits = await self._index(index, _FIRST_KEY, _LAST_KEY, fresh=True, limit=limit)
            if len(hits) >= limit:
                return None
            found.update(records.txn_of_operation(hit.record.key).group for hit in hits)
        return found

    async def recount(self) -> None:
        """Set `op_records` to what is stored; to nothing new if records came or went meanwhile.

        At start, when nothing does; and from time to time, for writes whose outcome was unknown.
        """
        counters = self.counters
        before = counters.op_writes, counters.op_deletes
        found = await self.count_operations()
        if before == (counters.op_writes, counters.op_deletes):
            counters.op_records = found

    async def count_operations(self) -> int:
        """How many claims and acknowledgement records there are.  For metrics: not fresh."""
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
        lo, hi = records.operations_range(txn)
        found = await self.metadata.scan(lo, hi, partition=records.partition_of(txn), fresh=True)
        decoded = (records.decode_operation(record.key, record.value) for record in found)
        return [each for each in decoded if not txn.attempt_index or each.txn == txn]

    async def claims_on(self, segment: str) -> list[Claim]:
        """Every claim on a segment: a fresh scan (W7)."""
        return await self._claims_on(segment, fresh=True)

    async def some_claims_on(self, segment: str, limit: int) -> list[Claim]:
        """Claims on a segment, not more than that, by transaction.  For people: not fresh."""
        return await self._claims_on(segment, limit=limit)

    async def _claims_on(
        self, segment: str, *, fresh: bool = False, limit: int | None = None
    ) -> list[Claim]:
        found = exact_range(encode_name(segment))
        hits = await self._index(records.WRITES_INDEX, *found, fresh=fresh, limit=limit)
        return [each async for each in _operations(hits) if isinstance(each, Claim)]

    async def acks_on(self, segment: str, subscription: str) -> list[AckRecord]:
        """Every acknowledgement record of a subscription: a fresh scan (A3)."""
        key = records.acks_index_key(segment, subscription)
        hits = await self._index(records.ACKS_INDEX, *exact_range(key), fresh=True)
        return [each async for each in _operations(hits) if isinstance(each, AckRecord)]

    async def acks_on_segment(self, segment: str) -> list[AckRecord]:
        """Those of all subscriptions of a segment: a fresh scan."""
        prefix = f"{encode_name(segment)}:"
        hits = await self._index(records.ACKS_INDEX, *prefix_range(prefix), fresh=True)
        return [each async for each in _operations(hits) if isinstance(each, AckRecord)]

    # Segments

    async def read_owner(self, segment: str, *, fresh: bool = False) -> StoredOwner | None:
        """Read the owner of the segment; None if no epoch was ever taken there."""
        key = records.owner_key(segment)
        record = await self.metadata.get(key, partition=encode_name(segment), fresh=fresh)
        if record is None:
            return None
        return StoredOwner(records.decode_owner(record.key, record.value), record.version)

    async def put_owner(self, segment: str, owner: OwnerRecord, expect: Version) -> Version:
        """Take an epoch, or prove that one still has it.  Raises `VersionConflict`."""
        result = await self.metadata.put(
            records.owner_key(segment),
            records.encode_owner(owner),
            partition=encode_name(segment),
            expect=expect,
        )
        return result.version

    async def aborted_on(self, segment: str) -> dict[TxnId, Position]:
        """The aborted set of a segment: up to where the entries of each are (W8)."""
        prefix = f"{encode_name(segment)}:"
        hits = await self._index(records.ABORTED_INDEX, *prefix_range(prefix), fresh=True)
        return dict(
            [
                records.decode_aborted(hit.record.key, hit.record.value)
                async for hit in _in_turns(hits)
            ]
        )

    async def read_aborted(self, segment: str, txn: TxnId) -> Position | None:
        """The aborted record of one transaction (W9)."""
        record = await self._aborted(segment, txn)
        return None if record is None else records.decode_aborted(record.key, record.value)[1]

    async def record_aborted(self, segment: str, txn: TxnId, up_to: Position) -> Position:
        """Remember an aborted transaction up to a position at least; what then stands there."""
        key, partition = records.aborted_key(segment, txn), encode_name(segment)
        while True:
            record = await self._aborted(segment, txn)
            if record is not None:
                _, stands = records.decode_aborted(key, record.value)
                if stands >= up_to:
                    return stands
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
        """The ledgers that it speaks of are gone."""
        key = records.aborted_key(segment, txn)
        await self.metadata.delete(key, partition=encode_name(segment))

    async def delete_owner(self, segment: str) -> None:
        """The segment is deleted.  A later one of that name has higher epochs (W3, W6)."""
        key, partition = records.owner_key(segment), encode_name(segment)
        while (stored := await self.read_owner(segment, fresh=True)) is not None:
            await raise_floor(self.metadata, records.EPOCH_FLOOR, stored.owner.epoch)
            with contextlib.suppress(VersionConflict):
                await self.metadata.delete(key, partition=partition, expect=stored.version)

    async def read_epoch_floor(self) -> int:
        """The highest epoch that a deleted segment had; 0: none."""
        return await read_floor(self.metadata, records.EPOCH_FLOOR, fresh=True) or 0

    async def _aborted(self, segment: str, txn: TxnId) -> Record | None:
        key = records.aborted_key(segment, txn)
        return await self.metadata.get(key, partition=encode_name(segment))

    # CleanupRequests

    async def request_cleanup(self, segment: str, at_ms: int) -> None:
        """Ask the owner of a segment to clean up records of ended transactions (W11)."""
        await self.metadata.put(records.cleanup_request_key(segment), str(at_ms).encode())

    async def delete_cleanup_request(self, segment: str, seen: Version) -> None:
        """Delete a request that its owner has answered; a newer one stays."""
        try:
            await self.metadata.delete(records.cleanup_request_key(segment), expect=seen)
        except VersionConflict:
            return

    # Coordinators

    async def reserve_numbers(self, coordinator: CoordinatorId, count: int) -> range:
        """Numbers that nobody else gets, ever (T1).  What is not used of them is lost."""
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
    """A header record, decoded.  Raises `CorruptTransactionRecord`."""
    txn = records.txn_of_header(record.key)
    return StoredHeader(txn, records.decode_header(record.key, record.value), record.version)


def _headers(found: Iterable[Record]) -> list[StoredHeader]:
    """Those that can be read: a damaged one must not hold up the others."""
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
    """Each of them.  A large group has many: others have their turn of the loop in between."""
    for seen, hit in enumerate(hits, start=1):
        yield hit
        if seen % TXN_SLICE_ENDS == 0:
            await asyncio.sleep(0)
