"""Sends writes in order of issue, some of them after a check that reads records."""

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.group import check_partition_of
from storage.metadata.keys import escape_part, level_of
from storage.metadata.operations import Put, SequencePut
from storage.metadata.oxia.errors import defect, not_checked_in_time
from storage.metadata.oxia.loops import log_defect
from storage.metadata.oxia.lost_writes import version_conflict
from storage.metadata.oxia.partitions import PartitionHints
from storage.metadata.oxia.records import SEQUENCES, ShardRecord
from storage.metadata.oxia.writes import Write
from storage.metadata.store import (
    ABSENT,
    InvalidMetadataRequest,
    PartitionMismatch,
    VersionConflict,
)

_NUMBERED = re.compile(r"-[0-9]{20}")


class WriteBackend(Protocol):
    """The part of the store that sends writes and reads records."""

    def send(self, write: Write) -> None:
        """Queue a write at its shard."""
        ...

    def unsettled(self, level: str) -> Sequence["asyncio.Future[object]"]:
        """The futures of writes on a level that were sent and have no outcome yet."""
        ...

    async def find(self, key: str, partition: str | None) -> ShardRecord | None:
        """Read a record at the shard of its partition."""
        ...

    async def children(self, key: str) -> list[str]:
        """See `MetadataStore.children`."""
        ...

    async def put_marker(self, key: str, value: bytes) -> None:
        """Create a marker.  Raises `VersionConflict` if it is there."""
        ...


class Sequences:
    """The partitions of all sequences, by prefix.

    Each sequence has a marker record.  Every store knows all markers, from a scan when it opens and
    from notifications.
    """

    __slots__ = ("partitions",)

    def __init__(self) -> None:
        self.partitions: dict[str, str] = {}

    def learn(self, value: bytes) -> None:
        """Note the prefix and partition in the value of a marker."""
        try:
            prefix, partition = json.loads(value)
        except (ValueError, TypeError):
            return
        if isinstance(prefix, str) and isinstance(partition, str):
            self.partitions[prefix] = partition


def marker_key(prefix: str) -> str:
    """The key of a sequence's marker."""
    return SEQUENCES + escape_part(prefix)


class Gate:
    """Writes on a level that wait behind one that is being checked, in order of issue."""

    __slots__ = ("_loop", "_timer", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Write] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def append(self, write: Write) -> None:
        """Let a write wait, until its deadline at most."""
        self._waiting.append(write)
        if self._timer is None:
            self._timer = self._loop.call_at(write.deadline, self._expire)

    def release(self) -> Iterable[Write]:
        """Stop waiting; returns the writes that still wait."""
        if self._timer is not None:
            self._timer.cancel()
        return self._waiting

    def _expire(self) -> None:
        waiting, self._timer = self._waiting, None
        # Deadlines are in order of issue.
        while waiting and waiting[0].deadline <= self._loop.time():
            write = waiting.popleft()
            write.complete(not_checked_in_time(write.what))
        if waiting:
            self._timer = self._loop.call_at(waiting[0].deadline, self._expire)


class WriteIssuer:
    """Sends writes in order of issue, some of them after a check that reads records.

    A write is checked that may begin a sequence, put a record under one, or names another
    partition than the one its record was last seen in.  Later writes on its level wait for it.  A
    write whose deadline passes here was never sent.
    """

    __slots__ = ("_backend", "_gates", "_hints", "_sequences", "_tasks")

    def __init__(self, backend: WriteBackend, sequences: Sequences, hints: PartitionHints) -> None:
        self._backend = backend
        self._sequences = sequences
        self._hints = hints
        self._gates: dict[str, Gate] = {}
        self._tasks = BackgroundTasks()

    def issue(self, write: Write) -> None:
        """Send a write now, or after the ones before it."""
        level = level_of(write.key)
        gate = self._gates.get(level)
        if gate is not None:
            gate.append(write)
            return
        look = self._check_for(write, level)
        if look is None:
            self._backend.send(write)
            return
        self._gates[level] = Gate()
        self._tasks.start(self._look_first(write, level, look), name="oxia-look")

    async def flush(self) -> None:
        """Return when nothing is looked at any more."""
        await self._tasks.wait()

    def _check_for(self, write: Write, level: str) -> Callable[[Write], Awaitable[None]] | None:
        """The check that a write needs before it is sent, if any."""
        operation = write.operation
        if isinstance(operation, SequencePut):
            if self._sequences.partitions.get(level) == operation.partition:
                return None
            return self._begin_sequence
        if self._hints.disagrees(write.key, write.partition):
            return self._check_partition
        creates = isinstance(operation, Put) and operation.expect in (None, ABSENT)
        if creates and level in self._sequences.partitions:
            return self._check_numbered
        return None

    async def _look_first(
        self, write: Write, level: str, look: Callable[[Write], Awaitable[None]]
    ) -> None:
        try:
            async with asyncio.timeout_at(write.deadline):
                before = self._backend.unsettled(level)
                if before:
                    await asyncio.wait(before)
                await look(write)
            self._call_guarded(self._backend.send, write)
        except TimeoutError:
            write.complete(not_checked_in_time(write.what))
        except MagnetarError as error:
            write.complete(error)
        except Exception as error:  # noqa: BLE001 - a defect; nobody else ends this write
            log_defect(f"what comes before {write.what}", error)
            write.complete(defect(write.what, error))
        finally:
            for each in self._gates.pop(level).release():
                self._call_guarded(self.issue, each)

    def _call_guarded(self, step: Callable[[Write], None], write: Write) -> None:
        """Call `step`; an error completes the write, as its caller would wait for ever."""
        try:
            step(write)
        except Exception as error:  # noqa: BLE001 - a defect
            log_defect(write.what, error)
            write.complete(defect(write.what, error))

    async def _begin_sequence(self, write: Write) -> None:
        """Make the sequence's marker if there is none.

        Raises if the sequence is of another partition, or its level has other keys.
        """
        # Servers number wrongly, or break, on other keys that look like those of the sequence.
        prefix, partition = write.key, write.partition
        partitions = self._sequences.partitions
        if prefix not in partitions:
            await self._learn(prefix)
        if prefix not in partitions:
            children = await self._backend.children(prefix[:-1])
            if not all(_NUMBERED.fullmatch(name) for name in children):
                raise InvalidMetadataRequest(
                    f"The prefix {prefix!r} has other keys under it: "
                    "give the sequence a level of its own."
                )
            try:
                value = json.dumps([prefix, partition], ensure_ascii=False).encode()
                await self._backend.put_marker(marker_key(prefix), value)
                self._sequences.learn(value)
            except VersionConflict:
                await self._learn(prefix)
        if partitions.get(prefix) != partition:
            raise PartitionMismatch(
                f"The sequence {prefix!r} lives in partition {partitions.get(prefix)!r} and was "
                f"asked for in {partition!r}: derive the partition from its key family."
            )

    async def _learn(self, prefix: str) -> None:
        marker = await self._backend.find(marker_key(prefix), None)
        if marker is not None:
            self._sequences.learn(marker.record.value)

    async def _check_partition(self, write: Write) -> None:
        """Raise if the record is in another partition."""
        seen = self._hints.get(write.key)
        found = await self._backend.find(write.key, seen)
        if found is not None:
            check_partition_of(write.key, found.record.partition, write.partition)
        self._hints.forget(write.key)

    async def _check_numbered(self, write: Write) -> None:
        """Raise for a put that would create a record under a sequence.

        Any other put gets the version of the record as its condition.
        """
        operation = write.operation
        found = await self._backend.find(write.key, write.partition)
        if found is None:
            raise InvalidMetadataRequest(
                f"{write.key!r} cannot be made under the sequence {level_of(write.key)!r}: only "
                "the sequence makes keys there, put it elsewhere."
            )
        check_partition_of(write.key, found.record.partition, write.partition)
        if isinstance(operation, Put) and operation.expect == ABSENT:
            raise version_conflict(write)
        write.expected = found.version_id
        write.resent = True
