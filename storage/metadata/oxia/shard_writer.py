"""All writes of this process to one shard, on one stream."""

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TypeVar, cast

from config import bounds
from magnetar.protocol.server_error import InternalError
from magnetar.protocol.state_table import StateTable
from storage.metadata.keys import level_of
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.batches import Batch, take_batch
from storage.metadata.oxia.connection import CallFailed, Peer, WriteStream, call_failures
from storage.metadata.oxia.errors import (
    Action,
    Failure,
    closed,
    defect,
    out_of_time,
    outcome_unknown,
    refused,
)
from storage.metadata.oxia.loops import Loop, log_defect
from storage.metadata.oxia.lost_writes import Answers, LostWriteResolver
from storage.metadata.oxia.records import PROOF
from storage.metadata.oxia.shards import Shards
from storage.metadata.oxia.writes import ExclusiveCall, Write, proof_of_leader
from storage.metadata.store import MetadataError

T = TypeVar("T")

_SWEEP_S = 0.5
"""Interval at which deadlines are checked."""
_ENDED = Failure(Action.RETRY, "UNAVAILABLE", "the stream of writes ended")
_SILENT = Failure(Action.RETRY, "DEADLINE_EXCEEDED", "the stream of writes does not answer")


class WriterState(enum.Enum):
    """The state of a writer."""

    IDLE = "nothing was written yet"
    OPENING = "a stream is opened and lost writes are settled"
    STREAMING = "requests go out and answers come in"
    BROKEN = "the stream ended; the next attempt is after a pause"
    CLOSED = "for good"


_MOVES: StateTable[WriterState] = StateTable(
    {
        WriterState.IDLE: {WriterState.OPENING, WriterState.CLOSED},
        WriterState.OPENING: {WriterState.STREAMING, WriterState.BROKEN, WriterState.CLOSED},
        WriterState.STREAMING: {WriterState.BROKEN, WriterState.CLOSED},
        WriterState.BROKEN: {WriterState.OPENING, WriterState.CLOSED},
        WriterState.CLOSED: frozenset(),
    },
    defect=InternalError,
)


class ShardWriter:
    """Writes of this process to one shard, in order on one stream.  Made on the running loop.

    Two requests are in flight at most; writes that queue meanwhile are the next one.  When a stream
    ends, its writes are settled by reads on the next stream (`LostWriteResolver`) before anything
    else is sent; queued writes stay queued.  Its states and moves are in `_MOVES`.

    A write that was not sent, or whose stream ended, waits until its deadline at most.  A write
    that was sent waits for its answer up to OXIA_ATTEMPT_TIMEOUT_S more; and if it was sent again
    and failed a condition, up to another OXIA_REQUEST_TIMEOUT_S for the read of its record.
    """

    # A server of release 0.14.0 breaks a shard that two write to at once.  So there is one stream,
    # and a call that writes on its own (a session begins or ends) waits in the same queue until
    # nothing is in flight; nothing is sent until it is done.

    def __init__(self, shard_id: int, shards: Shards, answers: Answers) -> None:
        self.shard_id = shard_id
        self.state = WriterState.IDLE
        self._shards = shards
        self._answers = answers
        self._settling = LostWriteResolver(shard_id, answers)
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Write | ExclusiveCall] = deque()
        self._in_flight: deque[Batch] = deque()
        self._lost: list[Write] = []
        self._doubtful: list[Write] = []
        self._highest = -1
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._exclusive: ExclusiveCall | None = None
        self._stream: WriteStream | None = None
        self._leader: str | None = None
        self._failure: Failure | None = None
        self._sweep = self._loop.call_later(_SWEEP_S, self._expire)
        self._write_loop = Loop(
            f"oxia-writer-{shard_id}", self._run, shards.backoff(), self._broken
        )

    def submit(self, write: Write) -> None:
        """Queue a write that has its request."""
        if self.state is WriterState.CLOSED:
            write.complete(closed())
            return
        self._queue.append(write)
        self._wake.set()

    async def call_alone(
        self, what: str, call: Callable[[Peer, float], Coroutine[object, object, T]]
    ) -> T:
        """Make a call while no write of this process is in flight, and return its result.

        `call(leader, timeout_s)` is tried again until its time is up.  `what` names it in errors.
        Raises `MetadataError`, `SessionGone`.
        """

        async def attempt(_peer: Peer, timeout_s: float) -> T:
            done: asyncio.Future[object] = self._loop.create_future()

            async def call_leader(peer: Peer) -> object:
                return await call(peer, bounds.OXIA_ATTEMPT_TIMEOUT_S)

            if self.state is WriterState.CLOSED:
                raise closed()
            self._queue.append(ExclusiveCall(call_leader, done, self._loop.time() + timeout_s))
            self._wake.set()
            return cast(T, await done)

        return await self._shards.call(self.shard_id, what, attempt)

    def set_leader(self, leader: str | None) -> None:
        """Leave the stream if the map names another leader."""
        # A new stream begins at once, if only to prove that leader (`_run`).
        if self._stream is not None and leader is not None and leader != self._leader:
            self._stream.cancel()
        self._wake.set()

    async def prove(self) -> None:
        """Return when a put that was sent after this call is acknowledged."""
        proof = proof_of_leader(self._loop)
        self.submit(proof)
        await proof.done

    def unsettled(self, level: str | None = None) -> list["asyncio.Future[object]"]:
        """The futures of writes without an outcome: on one level, or all."""
        writes = [write for write in self._queue if isinstance(write, Write)]
        writes += [write for batch in self._in_flight for write in batch.writes]
        writes += self._lost
        writes += self._doubtful
        return [
            cast("asyncio.Future[object]", write.done)
            for write in writes
            if level is None or level_of(write.key) == level
        ]

    def take_queued(self) -> list[Write]:
        """Hand the writes that were not sent yet to the caller."""
        writes = [item for item in self._queue if isinstance(item, Write) and item.key != PROOF]
        for item in self._queue:
            if isinstance(item, ExclusiveCall) or item.key == PROOF:
                self._fail(item, closed())
        self._queue.clear()
        return writes

    async def flush(self) -> None:
        """Return when every queued write and call has an outcome."""
        while self._queue or self._in_flight or self._lost or self._doubtful or self._exclusive:
            self._settled.clear()
            await self._settled.wait()

    async def close(self) -> None:
        """End the stream; queued writes fail."""
        self._move(WriterState.CLOSED)
        self._sweep.cancel()
        try:
            await self._write_loop.stop()
        finally:
            self._lose_in_flight()
            for write in self._lost + self._doubtful:
                write.complete(outcome_unknown(write.what))
            self._lost.clear()
            for item in self._queue:
                self._fail(item, closed())
            self._queue.clear()
            self._settling.cancel()
            self._settled.set()

    async def _run(self) -> None:
        backoff = self._shards.backoff()
        while True:
            while not (self._queue or self._lost or self._shards.must_prove(self.shard_id)):
                self._wake.clear()
                await self._wake.wait()
            self._move(WriterState.OPENING)
            failure = _ENDED
            try:
                await self._serve(self._shards.named_leader(self.shard_id))
            except CallFailed as error:
                failure = error.failure
            if self.state is WriterState.STREAMING:
                backoff.reset()
            else:
                self._shards.doubt()
            self._break_off(failure)
            if failure.action is Action.TELL_OPERATOR:
                self._fail_all(failure)
            await self._shards.pause(failure, backoff.pause_s())

    def _broken(self, error: BaseException) -> None:
        # As with a broken connection, the writes in flight are settled.
        text = f"a defect of this client: {error!r}"
        self._break_off(Failure(Action.RETRY, "INTERNAL", text))

    def _break_off(self, failure: Failure) -> None:
        """Take in that the stream has ended."""
        if self.state in (WriterState.OPENING, WriterState.STREAMING):
            self._move(WriterState.BROKEN)
        self._failure = failure
        self._lose_in_flight()

    async def _serve(self, peer: Peer) -> None:
        """Write through one stream until it ends, which is always with `CallFailed`."""
        with call_failures():
            stream = self._stream = peer.open_writes(self.shard_id)
        self._leader = peer.address
        tasks: list[asyncio.Task[None]] = []
        try:
            highest = await self._prove(stream)
            self._shards.proven(self.shard_id, peer.address)
            if self._lost:
                again = await self._settling.settle(self._lost, self._highest, peer)
                self._lost = []
                self._queue.extendleft(reversed(again))
                self._settled.set()
            self._highest = max(self._highest, highest)
            self._move(WriterState.STREAMING)
            self._wake.set()
            tasks = [
                asyncio.create_task(self._send(stream, peer)),
                asyncio.create_task(self._receive(stream)),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():
                    raise CallFailed(_SILENT)
                await task
        finally:
            self._stream = None
            stream.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self, stream: WriteStream) -> int:
        """Put something and wait for its answer, before anything else is sent.

        The answer proves that the server leads the shard; returns the version id of the put.
        """
        # The put comes before a session that waits in the queue.  That is safe with release 0.14.0
        # too: an acknowledged put is in the log and applied, so the two are never under way at
        # once.  It has no session, condition or content, so there is nothing to undo if no session
        # follows; and where another process writes, opening a session would do the same harm.
        request = pb.WriteRequest(shard=self.shard_id, puts=[pb.PutRequest(key=PROOF)])
        with call_failures():
            async with asyncio.timeout(bounds.OXIA_ATTEMPT_TIMEOUT_S):
                await stream.write(request)
                response = await stream.read()
        if not isinstance(response, pb.WriteResponse) or len(response.puts) != 1:
            raise CallFailed(_ENDED)
        return response.puts[0].version.version_id

    async def _send(self, stream: WriteStream, peer: Peer) -> None:
        queue, in_flight = self._queue, self._in_flight
        while True:
            self._wake.clear()
            while queue and len(in_flight) < bounds.OXIA_REQUESTS_IN_FLIGHT:
                head = queue[0]
                if isinstance(head, ExclusiveCall):
                    if in_flight:
                        break
                    queue.popleft()
                    await self._make_exclusive_call(head, peer)
                    continue
                batch = take_batch(queue)
                batch.deadline = self._loop.time() + bounds.OXIA_ATTEMPT_TIMEOUT_S
                in_flight.append(batch)
                request = batch.request(self.shard_id)
                with call_failures():
                    await stream.write(request)
            await self._wake.wait()

    async def _receive(self, stream: WriteStream) -> None:
        while True:
            with call_failures():
                response = await stream.read()
            if not isinstance(response, pb.WriteResponse):
                raise CallFailed(_ENDED)
            self._answered(response)

    def _answered(self, response: pb.WriteResponse) -> None:
        if not self._in_flight:
            raise CallFailed(Failure(Action.RETRY, "INTERNAL", "an answer to no request"))
        try:
            answers = list(self._in_flight[0].answers(response))
        except ValueError as error:
            raise CallFailed(Failure(Action.RETRY, "INTERNAL", str(error))) from error
        doubtful: list[Write] = []
        taken = 0
        try:
            for write, answer in answers:
                if not self._answers.take(write, answer):
                    doubtful.append(write)
                taken += 1
                if isinstance(answer, pb.PutResponse) and answer.version.version_id > self._highest:
                    self._highest = answer.version.version_id
        finally:
            del self._in_flight[0].writes[:taken]
            if doubtful:
                self._doubtful += doubtful
                self._settling.start(self._recheck(doubtful))
        self._in_flight.popleft()
        if self._queue:
            self._wake.set()
        elif not self._in_flight:
            self._settled.set()

    async def _recheck(self, writes: list[Write]) -> None:
        """Read the records of writes that were sent again and failed their condition."""

        async def attempt(peer: Peer, timeout_s: float) -> None:
            await self._settling.recheck(writes, peer, timeout_s)

        try:
            await self._shards.call(self.shard_id, "a look at records", attempt)
        except MetadataError:
            for write in writes:
                write.complete(outcome_unknown(write.what))
        except Exception as error:  # noqa: BLE001 - a defect; nothing else ends these writes
            log_defect(f"a look at records of shard {self.shard_id}", error)
            for write in writes:
                write.complete(defect(write.what, error, sent=True))
        finally:
            for write in writes:
                self._doubtful.remove(write)
            self._wake.set()
            self._settled.set()

    async def _make_exclusive_call(self, exclusive: ExclusiveCall, peer: Peer) -> None:
        self._exclusive = exclusive
        try:
            result = await exclusive.call(peer)
        except (CallFailed, MetadataError, InternalError) as error:
            self._fail(exclusive, error)
        except asyncio.CancelledError:
            self._fail(exclusive, CallFailed(_ENDED))
            raise
        except Exception as error:
            self._fail(exclusive, defect("a call about a session", error, sent=True))
            raise
        else:
            if not exclusive.done.done():
                exclusive.done.set_result(result)
        finally:
            self._exclusive = None
            self._settled.set()

    def _lose_in_flight(self) -> None:
        lost = [write for batch in self._in_flight for write in batch.writes]
        self._in_flight.clear()
        self._lost += [write for write in lost if write.key != PROOF]
        # A proof has no outcome to settle: it is sent again.
        self._queue.extendleft(write for write in lost if write.key == PROOF)

    def _fail_all(self, failure: Failure) -> None:
        error = refused(failure, f"writes to shard {self.shard_id}")
        for write in self._lost:
            write.complete(outcome_unknown(write.what))
        self._lost.clear()
        while self._queue:
            self._fail(self._queue.popleft(), MetadataError(str(error)))
        self._settled.set()

    def _expire(self) -> None:
        self._sweep = self._loop.call_later(_SWEEP_S, self._expire)
        now = self._loop.time()
        while self._queue and self._queue[0].deadline <= now:
            item = self._queue.popleft()
            if isinstance(item, ExclusiveCall):
                self._fail(item, CallFailed(self._failure or _SILENT))
            else:
                self._fail(item, out_of_time(item.what, self._failure))
        for write in self._lost:
            if write.deadline <= now:
                write.complete(outcome_unknown(write.what))
        self._lost = [write for write in self._lost if write.deadline > now]
        if self._in_flight and self._in_flight[0].deadline <= now and self._stream is not None:
            self._stream.cancel()
        self._settled.set()

    def _fail(self, item: Write | ExclusiveCall, error: Exception) -> None:
        if not item.done.done():
            item.done.set_exception(error)

    def _move(self, state: WriterState) -> None:
        if state is not self.state:
            self.state = _MOVES.move(self.state, state, "The writer of shard {}", self.shard_id)
