"""Answers to writes, and reads that settle writes whose answer was lost.

The outcome of a write without an answer is decided in `outcomes.py`.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence

import structlog

from config import bounds
from magnetar.background_tasks import BackgroundTasks
from storage.metadata.keys import LAST, KeyFamilies
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.batches import Answer
from storage.metadata.oxia.connection import Peer
from storage.metadata.oxia.errors import outcome_unknown
from storage.metadata.oxia.outcomes import (
    Doubt,
    Resend,
    Verdict,
    recheck,
    result_of,
    settle_key,
    settle_sequence,
)
from storage.metadata.oxia.records import PROOF, ShardRecord, found_record
from storage.metadata.oxia.routing import version_of
from storage.metadata.oxia.writes import Write, WriteListener
from storage.metadata.store import ABSENT, PutResult, Record, SessionLost, VersionConflict

_log = structlog.get_logger(__name__)


class Answers:
    """Turns answers into outcomes of writes.

    The listener gets an acknowledged write before its caller does.
    """

    __slots__ = ("families", "listener")

    def __init__(self, listener: WriteListener, families: KeyFamilies) -> None:
        self.listener = listener
        self.families = families

    def take(self, write: Write, answer: Answer) -> bool:
        """Complete a write; False if its record must be read first (`outcomes.recheck`)."""
        status = answer.status
        if status == pb.OK:
            self._done(write, answer)
        elif status == pb.KEY_NOT_FOUND:
            write.complete(False)
        elif status == pb.SESSION_DOES_NOT_EXIST:
            if write.session is not None:
                write.session.end()
            write.complete(session_lost())
        elif write.resent:
            return False
        else:
            write.complete(version_conflict(write))
        return True

    def found(self, write: Write, found: ShardRecord) -> None:
        """Complete a put whose answer was lost, but which took effect."""
        self.listener.stored(write, found)
        write.complete(result_of(found))

    def removed(self, write: Write) -> None:
        """Complete a delete that took effect."""
        self.listener.removed(write)
        write.complete(True)

    def _done(self, write: Write, answer: Answer) -> None:
        if isinstance(answer, pb.DeleteResponse):
            self.removed(write)
            return
        if write.key == PROOF:
            write.complete(True)
            return
        operation, version = write.operation, answer.version
        assert not isinstance(operation, Delete)
        key = answer.key or write.key
        ephemeral = version.HasField("session_id")
        record = Record(
            key,
            operation.value,
            version_of(version.version_id, write.shard_id),
            version.modifications_count,
            version.created_timestamp,
            version.modified_timestamp,
            ephemeral,
            operation.partition,
        )
        session_id = version.session_id if ephemeral else None
        self.listener.stored(
            write,
            ShardRecord(
                record,
                write.shard_id,
                version.version_id,
                write.put_id,
                operation.indexes,
                session_id,
            ),
        )
        write.complete(PutResult(key, record.version, record.modifications))


class LostWriteResolver:
    """Settles the writes to one shard whose answers were lost, by reading their records."""

    __slots__ = ("_answers", "_shard_id", "_tasks")

    def __init__(self, shard_id: int, answers: Answers) -> None:
        self._shard_id = shard_id
        self._answers = answers
        self._tasks = BackgroundTasks()

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run the recovery in a task that `cancel` ends."""
        self._tasks.start(work)

    def cancel(self) -> None:
        """End what was started."""
        self._tasks.cancel()

    async def settle(self, lost: Sequence[Write], highest: int, peer: Peer) -> list[Write]:
        """Complete the writes that have an outcome; return those to send again, in order.

        `peer` has proven that it leads the shard since the writes were lost.  Raises `CallFailed`,
        and then no write was completed.
        """
        by_key: dict[tuple[bool, str], list[Write]] = {}
        for write in lost:
            sequence = isinstance(write.operation, SequencePut)
            by_key.setdefault((sequence, write.key), []).append(write)
        keys = [key for sequence, key in by_key if not sequence]
        found = dict(zip(keys, await self._read(keys, peer), strict=True))
        tails = {key: await self._read_sequence(key, peer) for sequence, key in by_key if sequence}
        verdicts: dict[Write, Verdict] = {}
        records: dict[str, ShardRecord] = {}
        for (sequence, key), writes in by_key.items():
            if sequence:
                judged = settle_sequence(writes, tails[key])
                records |= tails[key]
            else:
                record = found[key]
                judged = settle_key(writes, record, highest)
                if record is not None and record.put_id is not None:
                    records[record.put_id] = record
            verdicts.update(zip(writes, judged, strict=True))
        again = [write for write in lost if self._apply(write, verdicts[write], records)]
        _log.info(
            "oxia_writes_settled", shard=self._shard_id, lost=len(lost), sent_again=len(again)
        )
        return again

    async def recheck(self, writes: Sequence[Write], peer: Peer, timeout_s: float) -> None:
        """Complete writes that were sent again and failed their condition."""
        keys = [write.key for write in writes]
        found = await self._read(keys, peer, timeout_s)
        for write, record in zip(writes, found, strict=True):
            records = {} if record is None or record.put_id is None else {record.put_id: record}
            self._apply(write, recheck(write, record), records)

    def _apply(self, write: Write, verdict: Verdict, records: dict[str, ShardRecord]) -> bool:
        """Complete the write, or return True if it has to be sent again."""
        if isinstance(verdict, Resend):
            return self._prepare_again(write, verdict)
        if isinstance(verdict, PutResult):
            self._answers.found(write, records[write.put_id])
        elif verdict is True:
            self._answers.removed(write)
        elif verdict is Doubt.CONFLICT:
            write.complete(version_conflict(write))
        else:
            write.complete(outcome_unknown(write.what))
        return False

    def _prepare_again(self, write: Write, verdict: Resend) -> bool:
        loop = asyncio.get_running_loop()
        request = write.request
        if write.deadline <= loop.time() or write.done.done() or request is None:
            write.complete(outcome_unknown(write.what))
            return False
        write.resent = True
        if verdict.expected is None:
            request.ClearField("expected_version_id")
        else:
            request.expected_version_id = verdict.expected
        return True

    async def _read(
        self,
        keys: Sequence[str],
        peer: Peer,
        timeout_s: float = bounds.OXIA_ATTEMPT_TIMEOUT_S,
    ) -> list[ShardRecord | None]:
        found: list[ShardRecord | None] = []
        for start in range(0, len(keys), bounds.OXIA_BATCH_OPERATIONS):
            part = keys[start : start + bounds.OXIA_BATCH_OPERATIONS]
            answers = await peer.read(self._shard_id, part, timeout_s)
            found += found_records(part, answers, self._shard_id, self._answers.families)
        return found

    async def _read_sequence(self, prefix: str, peer: Peer) -> dict[str, ShardRecord]:
        """The records of a sequence by the ids of their puts."""
        scanned = await peer.range_scan(
            self._shard_id,
            f"{prefix}-",
            f"{prefix}-{LAST}",
            None,
            bounds.OXIA_ATTEMPT_TIMEOUT_S,
        )
        keys = [each.key for each in scanned]
        records = found_records(keys, scanned, self._shard_id, self._answers.families)
        return {each.put_id: each for each in records if each is not None and each.put_id}


def found_records(
    keys: Iterable[str], answers: Iterable[pb.GetResponse], shard_id: int, families: KeyFamilies
) -> list[ShardRecord | None]:
    """The records in answers, in the order of the keys."""
    return [
        found_answer(key, answer, shard_id, families)
        for key, answer in zip(keys, answers, strict=True)
    ]


def found_answer(
    key: str, answer: pb.GetResponse, shard_id: int, families: KeyFamilies
) -> ShardRecord | None:
    """The record in an answer; None if there is no record."""
    if answer.status != pb.OK:
        return None
    return found_record(key, answer.value, answer.version, shard_id, families)


def session_lost() -> SessionLost:
    """The error of a put whose session has ended."""
    return SessionLost("The session has ended: open a new one and put the ephemerals again.")


def version_conflict(write: Write) -> VersionConflict:
    """The error of a write whose condition did not hold."""
    operation = write.operation
    expect = operation.expect if isinstance(operation, Put | Delete) else None
    return VersionConflict(
        f"{write.key!r} is not at version {expect} ({ABSENT}: absent): read it again and decide "
        "anew."
    )
