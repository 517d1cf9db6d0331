"""Reads of one shard."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from config import bounds
from storage.metadata.keys import KeyFamilies, children_range
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed, Peer
from storage.metadata.oxia.errors import Action, Failure, closed, defect
from storage.metadata.oxia.index_hits import HitLimit, IndexRange, is_enough
from storage.metadata.oxia.loops import Loop, log_defect
from storage.metadata.oxia.lost_writes import found_answer, found_records
from storage.metadata.oxia.records import ShardRecord, escape_index_key
from storage.metadata.oxia.shards import Shards
from storage.metadata.store import MetadataError


class WaitingRead(NamedTuple):
    """A key, the future of its record, and the deadline in the loop's time."""

    key: str
    done: "asyncio.Future[ShardRecord | None]"
    deadline: float


class ShardReader:
    """Reads of one shard.  Made on the running loop.

    Reads by key that come together become one request.  Each range is a call of its own, as of one
    moment of the shard.
    """

    # One request by key is on its way at a time, so that its records are never older than those of
    # an earlier one.

    def __init__(self, shard_id: int, shards: Shards, families: KeyFamilies) -> None:
        self.shard_id = shard_id
        self._shards = shards
        self._families = families
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[WaitingRead] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        name = f"oxia-reader-{shard_id}"
        self._read_loop = Loop(name, self._read, shards.backoff(), self._broken)

    def get(self, key: str) -> "asyncio.Future[ShardRecord | None]":
        """The record of a key on this shard."""
        done: asyncio.Future[ShardRecord | None] = self._loop.create_future()
        if self._closed or len(self._waiting) >= bounds.METADATA_QUEUE_OPERATIONS:
            done.set_exception(
                MetadataError(
                    f"Oxia's shard {self.shard_id} is {len(self._waiting)} reads behind, or the "
                    "store is closed: look at the server's latency, try again later."
                )
            )
            return done
        self._waiting.append(
            WaitingRead(key, done, self._loop.time() + bounds.OXIA_REQUEST_TIMEOUT_S)
        )
        self._wake.set()
        return done

    async def scan(self, lo: str, hi: str) -> list[ShardRecord]:
        """Records with lo <= key < hi, of one level."""

        async def attempt(peer: Peer, timeout_s: float) -> list[ShardRecord]:
            scanned = await peer.range_scan(self.shard_id, lo, hi, None, timeout_s)
            records = found_records(
                [each.key for each in scanned], scanned, self.shard_id, self._families
            )
            return [each for each in records if each is not None]

        return await self._shards.call(self.shard_id, f"a scan from {lo!r}", attempt)

    async def children(self, key: str) -> list[str]:
        """Keys of direct children."""
        lo, hi = children_range(key)

        async def attempt(peer: Peer, timeout_s: float) -> list[str]:
            return await peer.list_keys(self.shard_id, lo, hi, None, timeout_s)

        return await self._shards.call(self.shard_id, f"a listing of {key!r}", attempt)

    async def scan_index(self, asked: IndexRange, bound: HitLimit) -> list[ShardRecord]:
        """Records that had an entry in the range, each once; at least the first within the bound.

        Servers find the entry first and read the record later: the caller checks whether it is
        still in the range.
        """
        bound_lo, bound_hi = escape_index_key(asked.lo), escape_index_key(asked.hi)
        if bound_lo >= bound_hi:
            return []

        def found_in(scanned: Sequence[pb.GetResponse]) -> list[ShardRecord]:
            keys = [each.key for each in scanned]
            records = found_records(keys, scanned, self.shard_id, self._families)
            return [each for each in records if each is not None]

        def enough(scanned: Sequence[pb.GetResponse]) -> bool:
            last = scanned[-1:]
            return bound.is_any and is_enough(bound, found_in(scanned), found_in(last), asked)

        async def attempt(peer: Peer, timeout_s: float) -> list[ShardRecord]:
            scanned = await peer.range_scan(
                self.shard_id, bound_lo, bound_hi, asked.index, timeout_s, enough
            )
            return list({found.record.key: found for found in found_in(scanned)}.values())

        return await self._shards.call(self.shard_id, f"a scan of index {asked.index!r}", attempt)

    async def close(self) -> None:
        """Stop; waiting reads fail."""
        self._closed = True
        try:
            await self._read_loop.stop()
        finally:
            while self._waiting:
                self._fail(self._take(), closed())

    def _broken(self, _defect: BaseException) -> None:
        """Do nothing: waiting keys are read when the loop begins again."""

    async def _read(self) -> None:
        while True:
            self._wake.clear()
            while self._waiting:
                batch = self._take()
                try:
                    await self._read_batch(batch)
                except MetadataError as error:
                    self._fail(batch, error)
                except asyncio.CancelledError:
                    self._fail(batch, closed())
                    raise
                except Exception as error:  # noqa: BLE001 - a defect, of these reads alone
                    self._broke(batch, error)
            await self._wake.wait()

    async def _read_batch(self, batch: Sequence[WaitingRead]) -> None:
        keys = [read.key for read in batch]

        async def attempt(peer: Peer, timeout_s: float) -> list[pb.GetResponse]:
            answers = await peer.read(self.shard_id, keys, timeout_s)
            if len(answers) != len(keys):
                text = f"{len(answers)} answers to a read of {len(keys)} keys"
                raise CallFailed(Failure(Action.RETRY, "INTERNAL", text))
            return answers

        answers = await self._shards.call(self.shard_id, "a read", attempt, batch[0].deadline)
        for read, answer in zip(batch, answers, strict=True):
            try:
                record = found_answer(read.key, answer, self.shard_id, self._families)
            except Exception as error:  # noqa: BLE001 - a defect, or a record that others put
                self._broke((read,), error)
                continue
            if not read.done.done():
                read.done.set_result(record)

    def _take(self) -> list[WaitingRead]:
        count = min(len(self._waiting), bounds.OXIA_BATCH_OPERATIONS)
        return [self._waiting.popleft() for _ in range(count)]

    def _broke(self, batch: Sequence[WaitingRead], error: Exception) -> None:
        what = f"the read of {batch[0].key!r}" + (" and others" if len(batch) > 1 else "")
        log_defect(what, error)
        self._fail(batch, defect(what, error))

    def _fail(self, batch: Sequence[WaitingRead], error: MetadataError) -> None:
        for read in batch:
            if not read.done.done():
                read.done.set_exception(type(error)(str(error)))
