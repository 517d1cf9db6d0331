"""All writes of this process to one shard, on one stream.

Rules:
- A server of release 0.14.0 breaks a shard that two write to at once.  So there is one stream, and
  calls that write on their own (a session begins or ends) get the shard for themselves: they wait
  in the same queue until nothing is in flight, and nothing is sent until they are done.
- What waits while two requests are in flight is the next request; nothing waits for company.
- Answers come in the order of requests.
- A new stream begins with a put of ours, whose answer proves that the leader is one.  When the map
  names another leader, the stream is left and a new one is begun there, be it for this proof alone.
- When a stream ends, what was in flight is settled on the next one by reading, before anything
  else is sent (`settling.py`); what was queued stays queued.
- A write that was not sent, or whose stream ended, waits until its deadline at most.  One that was
  sent waits for its answer as long as its request, up to OXIA_ATTEMPT_TIMEOUT_S more; and one that
  failed a condition when it was sent again has another OXIA_REQUEST_TIMEOUT_S to be looked at.
- A defect of ours ends the stream like a broken connection: what was in flight is settled.
- The put that begins a stream comes before a session that waits in the queue, also before the first
  one of this process.  That is safe with release 0.14.0 too: when it is acknowledged it is in the
  log and applied, and only then are sessions begun, so the two are never under way at once.  It has
  no session, condition or content, so nothing of it has to be undone if no session comes about; and
  where somebody else writes, the beginning of a session would do the same harm.  Records and
  sessions keep the order in which they were asked for.

States: see `_MOVES`.
"""

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
from storage.metadata.oxia.records import PROOF
from storage.metadata.oxia.settling import Answers, Settling
from storage.metadata.oxia.shards import Shards
from storage.metadata.oxia.writes import Turn, Write, proof_of_leader
from storage.metadata.store import MetadataError

T = TypeVar("T")

_SWEEP_S = 0.5
"""How often deadlines are looked at."""
_ENDED = Failure(Action.RETRY, "UNAVAILABLE", "the stream of writes ended")
_SILENT = Failure(Action.RETRY, "DEADLINE_EXCEEDED", "the stream of writes does not answer")


class WriterState(enum.Enum):
    """What a writer is at."""

    IDLE = "nothing was to be written yet"
    OPENING = "a stream is opened and what was lost is settled"
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
    """Writes of this process to one shard, in order on one stream. Made on the running loop."""

    def __init__(self, shard_id: int, shards: Shards, answers: Answers) -> None:
        self.shard_id = shard_id
        self.state = WriterState.IDLE
        self._shards = shards
        self._answers = answers
        self._settling = Settling(shard_id, answers)
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Write | Turn] = deque()
        self._in_flight: deque[Batch] = deque()
        self._lost: list[Write] = []
        self._doubtful: list[Write] = []
        self._highest = -1
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._turn: Turn | None = None
        self._stream: WriteStream | None = None
        self._leader: str | None = None
        self._failure: Failure | None = None
        self._sweep = self._loop.call_later(_SWEEP_S, self._look_at_deadlines)
        self._running = Loop(f"oxia-writer-{shard_id}", self._run, shards.backoff(), self._broken)

    def submit(self, write: Write) -> None:
        """Queue a write whose request is made."""
        if self.state is WriterState.CLOSED:
            write.complete(closed())
            return
        self._queue.append(write)
        self._wake.set()

    async def alone(
        self, what: str, call: Callable[[Peer, float], Coroutine[object, object, T]]
    ) -> T:
        """What `call(leader, timeout_s)` returns, made while nothing of ours is in flight.

        Tried again until its time is up.  Raises `MetadataError`, `SessionGone`.
        """

        async def attempt(_peer: Peer, timeout_s: float) -> T:
            done: asyncio.Future[object] = self._loop.create_future()

            async def turn(peer: Peer) -> object:
                return await call(peer, bounds.OXIA_ATTEMPT_TIMEOUT_S)

            if self.state is WriterState.CLOSED:
                raise closed()
            self._queue.append(Turn(turn, done, self._loop.time() + timeout_s))
            self._wake.set()
            return cast(T, await done)

        return await self._shards.call(self.shard_id, what, attempt)

    def led_by(self, leader: str | None) -> None:
        """The map names this leader."""
        if self._stream is not None and leader is not None and leader != self._leader:
            self._stream.cancel()
        self._wake.set()

    async def prove(self) -> None:
        """Return when a put of ours was acknowledged that was sent after this call."""
        proof = proof_of_leader(self._loop)
        self.submit(proof)
        await proof.done

    def unsettled(self, level: str | None = None) -> list["asyncio.Future[object]"]:
        """Who still waits for writes: of one level, or all."""
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
        """What was not sent yet: it is the caller's now."""
        writes = [item for item in self._queue if isinstance(item, Write) and item.key != PROOF]
        for item in self._queue:
            if isinstance(item, Turn) or item.key == PROOF:
                self._fail(item, closed())
        self._queue.clear()
        return writes

    async def flush(self) -> None:
        """Return when everything queued is done, one way or the other."""
        while self._queue or self._in_flight or self._lost or self._doubtful or self._turn:
            self._settled.clear()
            await self._settled.wait()

    async def close(self) -> None:
        """End the stream; what is still queued fails."""
        self._move(WriterState.CLOSED)
        self._sweep.cancel()
        try:
            await self._running.stop()
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
                await self._serve(self._shards.named(self.shard_id))
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
        text = f"a defect of this client: {error!r}"
        self._break_off(Failure(Action.RETRY, "INTERNAL", text))

    def _break_off(self, failure: Failure) -> None:
        """The stream has ended."""
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
        """Put something and wait for its answer, before anything else is sent."""
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
                if isinstance(head, Turn):
                    if in_flight:
                        break
                    queue.popleft()
                    await self._take_turn(head, peer)
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
        """What was sent again has failed a condition: look whether it was its first sending."""

        async def attempt(peer: Peer, timeout_s: float) -> None:
            await self._settling.recheck(writes, peer, timeout_s)

        try:
            await self._shards.call(self.shard_id, "a look at records", attempt)
        except MetadataError:
            for write in writes:
                write.complete(outcome_unknown(write.what))
        except Exception as error:  # noqa: BLE001 - a defect; nobody else ends these writes
            log_defect(f"a look at records of shard {self.shard_id}", error)
            for write in writes:
                write.complete(defect(write.what, error, sent=True))
        finally:
            for write in writes:
                self._doubtful.remove(write)
            self._wake.set()
            self._settled.set()

    async def _take_turn(self, turn: Turn, peer: Peer) -> None:
        self._turn = turn
        try:
            result = await turn.call(peer)
        except (CallFailed, MetadataError, InternalError) as error:
            self._fail(turn, error)
        except asyncio.CancelledError:
            self._fail(turn, CallFailed(_ENDED))
            raise
        except Exception as error:
            self._fail(turn, defect("a call about a session", error, sent=True))
            raise
        else:
            if not turn.done.done():
                turn.done.set_result(result)
        finally:
            self._turn = None
            self._settled.set()

    def _lose_in_flight(self) -> None:
        """A proof means nothing by itself: it is queued again."""
        lost = [write for batch in self._in_flight for write in batch.writes]
        self._in_flight.clear()
        self._lost += [write for write in lost if write.key != PROOF]
        self._queue.extendleft(write for write in lost if write.key == PROOF)

    def _fail_all(self, failure: Failure) -> None:
        error = refused(failure, f"writes to shard {self.shard_id}")
        for write in self._lost:
            write.complete(outcome_unknown(write.what))
        self._lost.clear()
        while self._queue:
            self._fail(self._queue.popleft(), MetadataError(str(error)))
        self._settled.set()

    def _look_at_deadlines(self) -> None:
        self._sweep = self._loop.call_later(_SWEEP_S, self._look_at_deadlines)
        now = self._loop.time()
        while self._queue and self._queue[0].deadline <= now:
            item = self._queue.popleft()
            if isinstance(item, Turn):
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

    def _fail(self, item: Write | Turn, error: Exception) -> None:
        if not item.done.done():
            item.done.set_exception(error)

    def _move(self, state: WriterState) -> None:
        if state is not self.state:
            self.state = _MOVES.move(self.state, state, "The writer of shard {}", self.shard_id)
