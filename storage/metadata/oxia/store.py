"""The metadata store on an Oxia cluster."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import cast

from config import bounds
from magnetar.background_tasks import BackgroundTasks
from storage.clock import Clock
from storage.metadata import operations
from storage.metadata.access import StoreAccess
from storage.metadata.checked_store import CheckedStore
from storage.metadata.group import check_partition_of
from storage.metadata.keys import KeyFamilies, children_range, level_of, name_of
from storage.metadata.operations import Delete, Put
from storage.metadata.oxia.address import OxiaAddress, parse_address
from storage.metadata.oxia.connection import Connections
from storage.metadata.oxia.index_hits import HitLimit, IndexRange, hits
from storage.metadata.oxia.lost_writes import Answers, session_lost, version_conflict
from storage.metadata.oxia.partitions import PartitionHints
from storage.metadata.oxia.records import (
    OWN_PREFIX,
    PROOF,
    SEQUENCES,
    Note,
    ShardRecord,
    delete_request,
    put_request,
)
from storage.metadata.oxia.routing import version_id_of
from storage.metadata.oxia.scan_overlay import ScanOverlay
from storage.metadata.oxia.sessions import OxiaSession, OxiaSessions
from storage.metadata.oxia.shard_set import ShardSet
from storage.metadata.oxia.shards import Shards
from storage.metadata.oxia.watch_router import WatchRouter
from storage.metadata.oxia.write_issuer import Sequences, WriteIssuer
from storage.metadata.oxia.writes import Write, WriteOperation
from storage.metadata.store import (
    ABSENT,
    CLOCK_KEY,
    IndexHit,
    InvalidMetadataRequest,
    MetadataError,
    PutResult,
    Record,
    RecordTooLarge,
    Session,
    Version,
    first_hits,
)


class OxiaMetadataStore(CheckedStore[OxiaSession]):
    """`MetadataStore` on an Oxia cluster.  Made by `open`.

    A record is on the shard of its partition key, or of its key.  Writes issued together are sent
    together, in order for each shard.  Writes to different shards take effect in any order, but no
    scan of this store shows that (`scan_overlay.py`).  Only one process may write to servers before
    release 0.14.4 (`shard_writer.py`).
    """

    def __init__(
        self,
        shards: Shards,
        connections: Connections,
        clock: Clock,
        rng: random.Random,
        families: KeyFamilies,
        address: OxiaAddress,
    ) -> None:
        """Use `open`.  The map of `shards` has to be known."""
        super().__init__(clock)
        self.address = address
        self._shards = shards
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._put_ids = f"{rng.getrandbits(64):016x}-"
        self._puts = 0
        self._outstanding = 0
        self._outstanding_bytes = 0
        self._hints = PartitionHints()
        self._sequences = Sequences()
        self._scan_overlays: set[ScanOverlay] = set()
        self._watch_router = WatchRouter(self._read_at, self._sequence_changed)
        self._hub = self._watch_router
        self._set = ShardSet(shards, Answers(self, families), self._watch_router, self._route_again)
        self._sessions = OxiaSessions(shards, self._set.writers)
        self._issuer = WriteIssuer(self, self._sequences, self._hints)
        self._tasks = BackgroundTasks()

    @classmethod
    async def open(
        cls,
        url: str,
        clock: Clock,
        rng: random.Random,
        access: StoreAccess | None = None,
        families: KeyFamilies | None = None,
    ) -> "OxiaMetadataStore":
        """Connect to a cluster.

        `families` give the partitions and index keys of records that other programs put.

        Raises `MetadataError`, `InvalidOxiaAddress`, `UnusableAccessFile`.
        """
        address = parse_address(url)
        connections = Connections(address.namespace, access or StoreAccess())
        shards = Shards(address.servers, address.namespace, connections, rng)
        store: OxiaMetadataStore | None = None
        try:
            await shards.start()
            store = cls(shards, connections, clock, rng, families or KeyFamilies(()), address)
            await store._start()
        except BaseException:
            async with AsyncExitStack() as ends:
                ends.push_async_callback(connections.close)
                ends.push_async_callback(shards.close)
                if store is not None:
                    ends.push_async_callback(store._set.close)
            raise
        return store

    # Reads

    async def get(
        self, key: str, *, partition: str | None = None, fresh: bool = False
    ) -> Record | None:
        """See `MetadataStore.get`."""
        if fresh:
            self._check_keys((key,), partition)
            await self._prove((self._shards.table.shard_of(key, partition),))
        return (await self.get_many((key,), partition=partition))[0]

    async def get_many(
        self, keys: Sequence[str], *, partition: str | None = None
    ) -> list[Record | None]:
        """See `MetadataStore.get_many`."""
        self._check_keys(keys, partition)
        table = self._shards.table
        places = [(table.shard_of(key, partition), key) for key in keys]
        since = self._watch_router.change_count()
        found = await asyncio.gather(*(self._read_at(*place) for place in places))
        missing: list[tuple[int, str]] = []
        for place, record in zip(places, found, strict=True):
            if record is None:
                self._watch_router.missing(*place, since)
                missing.append(place)
            else:
                self._note_read(record)
                check_partition_of(record.record.key, record.record.partition, partition)
        # A record of another partition is a mistake of the caller, not an absent record.
        await self._check_other_shards(missing, partition)
        return [None if each is None else each.record for each in found]

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore.children`."""
        self._check_open()
        operations.check_level(key)
        found = await asyncio.gather(
            *(self._set.reader(shard_id).children(key) for shard_id in self._shards.table.ids)
        )
        return sorted({name_of(child) for keys in found for child in keys})

    async def scan(
        self, lo: str, hi: str, *, partition: str | None = None, fresh: bool = False
    ) -> list[Record]:
        """See `MetadataStore.scan`.

        Across shards, the result is as of one moment of this process's writes, not of those of
        other processes.
        """
        self._check_open()
        operations.check_scan(lo, hi)
        operations.check_partition(partition)
        if hi <= lo and hi != f"{level_of(lo)}/":
            return []
        if partition is None:
            return [found.record for found in await self._scan_all(lo, hi, fresh)]
        shard_id = self._shards.table.shard_of(lo, partition)
        scanned = await self._scan_shard(shard_id, lo, hi, fresh)
        for found in scanned:
            self._watch_router.observe_scanned(found)
            check_partition_of(found.record.key, found.record.partition, partition)
        await self._check_hints(lo, hi, partition)
        return [found.record for found in scanned]

    async def scan_index(
        self,
        index: str,
        lo: str,
        hi: str,
        *,
        partition: str | None = None,
        fresh: bool = False,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> list[IndexHit]:
        """See `MetadataStore.scan_index`."""
        self._check_open()
        operations.check_index_range(index, lo, hi)
        operations.check_partition(partition)
        table = self._shards.table
        shard_ids = table.ids if partition is None else (table.shard_of("", partition),)
        if fresh:
            await self._prove(shard_ids)
        enough = HitLimit(limit, max_bytes) if partition is None else HitLimit()
        asked = IndexRange(index, lo, hi)
        found = await self._scan_index_on(shard_ids, asked, enough)
        for each in found:
            self._watch_router.observe_scanned(each)
        return first_hits(hits(found, asked, partition), limit, max_bytes)

    # Writes

    async def delete(
        self, key: str, *, partition: str | None = None, expect: Version | None = None
    ) -> bool:
        """See `MetadataStore.delete`."""
        removed = await super().delete(key, partition=partition, expect=expect)
        if not removed:
            shard_id = self._shards.table.shard_of(key, partition)
            await self._check_other_shards([(shard_id, key)], partition)
        return removed

    async def server_time_ms(self) -> int | None:
        """See `MetadataStore.server_time_ms`."""
        await self.put(CLOCK_KEY, b"")
        record = await self.get(CLOCK_KEY)
        if record is None:
            raise MetadataError(f"The record {CLOCK_KEY!r} is gone from Oxia: put it again.")
        return record.modified_ms

    # Sessions and the end

    async def open_session(self, *, timeout_ms: int, identity: str) -> Session:
        """See `MetadataStore.open_session`."""
        self._check_open()
        begin = operations.checked_session(identity, timeout_ms, self._clock.now_ms())
        return await self._sessions.open(begin)

    async def close(self) -> None:
        """See `MetadataStore.close`.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._issuer.flush()
            await self._sessions.close()
            async with asyncio.timeout(bounds.OXIA_REQUEST_TIMEOUT_S):
                await self._set.flush()
        except TimeoutError:
            raise MetadataError(
                "Oxia did not answer the last writes before the store was closed: their outcome is "
                "unknown, read the records."
            ) from None
        finally:
            self._watch_router.close()
            self._tasks.cancel()
            async with AsyncExitStack() as ends:
                ends.push_async_callback(self._connections.close)
                ends.push_async_callback(self._shards.close)
                ends.push_async_callback(self._set.close)

    # Called by its parts (see `WriteBackend`, `WriteListener`)

    def send(self, write: Write) -> None:
        """Make the request of a write and queue it at its shard."""
        operation = write.operation
        shard_id = self._shards.table.shard_of(write.key, write.partition)
        expect = operation.expect if isinstance(operation, Put | Delete) else None
        if expect is not None and write.expected is None:
            write.expected = version_id_of(expect, shard_id)
            if write.expected is None:
                write.complete(version_conflict(write))
                return
        write.shard_id = shard_id
        write.removals_seen = self._watch_router.removal_count()
        error = self._make_request(write)
        if error is not None:
            write.complete(error)
            return
        if isinstance(operation, Delete):
            self._hints.forget(write.key)
        elif isinstance(operation, Put):
            self._hints.note(write.key, write.partition)
        self._set.writers[shard_id].submit(write)

    def unsettled(self, level: str) -> list["asyncio.Future[object]"]:
        """The futures of writes on a level that have no outcome yet."""
        return [done for writer in self._set.writers.values() for done in writer.unsettled(level)]

    async def find(self, key: str, partition: str | None) -> ShardRecord | None:
        """Read a record at the shard of its partition."""
        return await self._read_at(self._shards.table.shard_of(key, partition), key)

    async def put_marker(self, key: str, value: bytes) -> None:
        """See `WriteBackend.put_marker`."""
        put = Put(key, value, None, ABSENT, None, (), self._clock.now_ms(), len(value))
        await self._new_write(put, None, self.send)

    def stored(self, write: Write, found: ShardRecord) -> None:
        """See `WriteListener.stored`."""
        for overlay in self._scan_overlays:
            overlay.add(found.record.key, found)
        self._watch_router.stored(write, found)

    def removed(self, write: Write) -> None:
        """See `WriteListener.removed`."""
        for overlay in self._scan_overlays:
            overlay.add(write.key, None)

    # Parts

    async def _start(self) -> None:
        self._shards.on_change(self._shards_changed)
        await self._set.start()
        await self._check_order()
        await self._load_sequences()

    async def _check_order(self) -> None:
        """Refuse a namespace that orders keys as plain bytes: its levels are not ranges."""
        shard_id = self._shards.table.ids[0]
        reader = self._set.reader(shard_id)
        if await reader.get(PROOF) is None:
            await self._prove((shard_id,))
        if PROOF not in await reader.children(OWN_PREFIX[:-1]):
            raise MetadataError(
                f"The Oxia namespace {self.address.namespace!r} sorts keys as plain bytes, so that "
                "no listing would be whole: create it with hierarchical sorting of keys."
            )

    def _route_again(self, write: Write) -> None:
        """Send a write whose shard is gone to the one that has its key now."""
        write.expected = None  # version ids are a shard's own
        self.send(write)

    def _shards_changed(self) -> None:
        self._set.shards_changed()
        self._sessions.shards_changed(self._shards.table.ids)

    def _submit(
        self, operation: WriteOperation, owner: OxiaSession | None
    ) -> "asyncio.Future[object]":
        self._check_open()
        if (
            self._outstanding >= bounds.METADATA_QUEUE_OPERATIONS
            or self._outstanding_bytes >= bounds.METADATA_QUEUE_BYTES
        ):
            raise MetadataError(
                f"Oxia is {self._outstanding} operations behind ({self._outstanding_bytes} bytes): "
                "look at the servers' write latency, try again later."
            )
        write = self._new_write(operation, owner, self._issuer.issue)
        return cast("asyncio.Future[object]", write)

    def _new_write(
        self,
        operation: WriteOperation,
        owner: OxiaSession | None,
        issue: Callable[[Write], None],
    ) -> "asyncio.Future[PutResult | bool]":
        done: asyncio.Future[PutResult | bool] = self._loop.create_future()
        size = operation.size
        self._puts += 1
        write = Write(
            operation,
            done,
            put_id=f"{self._put_ids}{self._puts:x}",
            deadline=self._loop.time() + bounds.OXIA_REQUEST_TIMEOUT_S,
            session=owner,
        )
        issue(write)  # it may raise, so the write is counted after it
        self._outstanding += 1
        self._outstanding_bytes += size
        done.add_done_callback(lambda _: self._write_done(size))
        return done

    def _write_done(self, size: int) -> None:
        self._outstanding -= 1
        self._outstanding_bytes -= size

    def _make_request(self, write: Write) -> Exception | None:
        operation, session = write.operation, write.session
        if isinstance(operation, Delete):
            write.request = delete_request(operation, expected=write.expected)
            return None
        session_id = None
        if session is not None:
            session_id = session.id_on(write.shard_id)
            if session.lost:
                return session_lost()
            if session_id is None:
                return MetadataError(
                    f"The session is not on Oxia's new shard {write.shard_id} yet: try again."
                )
        note = Note(
            write.put_id,
            operation.partition,
            None if session is None else session.identity,
            operation.indexes,
        )
        try:
            request = put_request(operation, note, expected=write.expected, session_id=session_id)
        except InvalidMetadataRequest as error:
            return error
        if write.size > bounds.OXIA_BATCH_BYTES and request.ByteSize() > _MAX_REQUEST_BYTES:
            return RecordTooLarge(
                f"The put of {write.key!r} has {request.ByteSize()} bytes with its index entries, "
                f"which Oxia keeps twice: keep it to {_MAX_REQUEST_BYTES}."
            )
        write.request = request
        return None

    def _own(self, session: Session) -> OxiaSession | None:
        if isinstance(session, OxiaSession) and self._sessions.owns(session):
            return session
        return None

    def _session_id(self, owner: OxiaSession) -> int:
        """Any number: the session has an id of its own on each shard."""
        return 0

    def _read_at(self, shard_id: int, key: str) -> "asyncio.Future[ShardRecord | None]":
        return self._set.reader(shard_id).get(key)

    def _note_read(self, found: ShardRecord) -> None:
        self._hints.note(found.record.key, found.record.partition)
        self._watch_router.observe(found)

    async def _check_other_shards(
        self, missing: Sequence[tuple[int, str]], partition: str | None
    ) -> None:
        """Raise `PartitionMismatch` for a key that exists in another partition."""
        shard_ids = self._shards.table.ids
        if not missing or len(shard_ids) == 1:
            return
        found = await asyncio.gather(
            *(
                self._read_at(other, key)
                for shard_id, key in missing
                for other in shard_ids
                if other != shard_id
            )
        )
        for each in found:
            if each is not None:
                check_partition_of(each.record.key, each.record.partition, partition)

    async def _scan_all(self, lo: str, hi: str, fresh: bool) -> list[ShardRecord]:
        overlay = ScanOverlay(lo, hi)
        self._scan_overlays.add(overlay)
        try:
            scanned = await asyncio.gather(
                *(self._scan_shard(each, lo, hi, fresh) for each in self._shards.table.ids)
            )
            before = self.unsettled(level_of(lo))
            if before:
                await asyncio.wait(before)
        finally:
            self._scan_overlays.discard(overlay)
        records = overlay.apply(found for part in scanned for found in part)
        for found in records:
            self._watch_router.observe_scanned(found)
        return records

    async def _scan_shard(self, shard_id: int, lo: str, hi: str, fresh: bool) -> list[ShardRecord]:
        if fresh:
            await self._prove((shard_id,))
        return await self._set.reader(shard_id).scan(lo, hi)

    async def _prove(self, shard_ids: Iterable[int]) -> None:
        await asyncio.gather(*(self._set.writers[shard_id].prove() for shard_id in shard_ids))

    async def _check_hints(self, lo: str, hi: str, partition: str) -> None:
        for key, seen in list(self._hints.others(level_of(lo), partition, lo, hi)):
            found = await self.find(key, seen)
            if found is not None:
                check_partition_of(key, found.record.partition, partition)
            self._hints.forget(key)

    async def _scan_index_on(
        self, shard_ids: Iterable[int], asked: IndexRange, enough: HitLimit
    ) -> list[ShardRecord]:
        found = await asyncio.gather(
            *(self._set.reader(shard_id).scan_index(asked, enough) for shard_id in shard_ids)
        )
        return [each for part in found for each in part]

    async def _load_sequences(self) -> None:
        lo, hi = children_range(SEQUENCES[:-1])
        for shard_id in self._shards.table.ids:
            for found in await self._set.reader(shard_id).scan(lo, hi):
                self._sequences.learn(found.record.value)

    def _sequence_changed(self, shard_id: int, key: str | None) -> None:
        self._tasks.start(self._read_sequence(shard_id, key), name="oxia-sequences")

    async def _read_sequence(self, shard_id: int, key: str | None) -> None:
        """Read the marker of a sequence, or all markers."""
        try:
            if key is None:
                await self._load_sequences()
                return
            found = await self._read_at(shard_id, key)
        except MetadataError:
            return  # it is read before the first put on its sequence
        if found is not None:
            self._sequences.learn(found.record.value)


_MAX_REQUEST_BYTES = bounds.METADATA_REQUEST_BYTES
