"""The writes of one process: many in flight, in order, each exactly once."""

import asyncio
import enum
from collections import deque
from functools import partial as bind
from random import Random
from typing import Final, cast

import structlog

from config import bounds
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.store import (
    ABSENT,
    MetadataError,
    PutResult,
    RecordTooLarge,
    Version,
)
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import RequestFailed, ZooKeeperClient
from storage.metadata.zookeeper.empty_directories import EmptyDirectories
from storage.metadata.zookeeper.guard import Guard
from storage.metadata.zookeeper.knowledge import Knowledge
from storage.metadata.zookeeper.layout import Directory, Layout
from storage.metadata.zookeeper.loader import Loader
from storage.metadata.zookeeper.outcomes import Effect, Evidence, effect_of
from storage.metadata.zookeeper.plan import (
    IN_FLIGHT,
    Plan,
    Write,
    plan_delete,
    plan_put,
    plan_sequence_put,
)
from storage.metadata.zookeeper.requests import Answer, Failure, Read
from storage.metadata.zookeeper.visibility import VisibilityBarrier
from storage.metadata.zookeeper.writes import (
    Batch,
    Outcome,
    PendingWrite,
    PlannedWrite,
    SessionConnection,
    contended,
    defect_at,
    not_settled,
    not_stored,
    outcome_unknown,
    session_lost,
)

_log = structlog.get_logger(__name__)

LIFE_BITS: Final = 96


class State(enum.Enum):
    """The state of the pipeline.

    OPENING -> SENDING <-> DRAINING; SENDING, DRAINING -> SETTLING -> SENDING; any -> CLOSED.
    """

    OPENING = "opening"
    SENDING = "sending"
    DRAINING = "draining"
    """A batch failed: those behind it do, too."""
    SETTLING = "settling"
    """Answers were lost: the guard is read."""
    CLOSED = "closed"


class WritePipeline:
    """Sends the writes of this process in order, in batches, each exactly once.

    Writes are in the order of `submit`, with a few batches in flight.  When a batch fails, the
    guard makes those behind it fail too, and all are tried again in their order.  After lost
    answers the guard shows which batches took effect; without a guard their records do
    (`outcomes.py`), or else the outcome is unknown.

    Every write has an outcome after `ZOOKEEPER_REQUEST_S`, and up to `ZOOKEEPER_VISIBLE_S` later
    through a session.  A bug fails only the writes that it concerns: one that was not sent with
    `MetadataDefect`, those in flight with an unknown outcome.
    """

    def __init__(self, client: ZooKeeperClient, layout: Layout, rng: Random, identity: str) -> None:
        self._client = client
        self._layout = layout
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._knowledge = Knowledge(layout)
        self._loader = Loader(client, layout, self._knowledge, self._pump)
        self._guard = Guard(client, layout, rng, identity)
        self._pruning = EmptyDirectories(client, layout, self._may_remove)
        self._visible = VisibilityBarrier(client, layout.records)
        self._state = State.OPENING
        self._queue: deque[PendingWrite] = deque()
        self._queued_bytes = 0
        self._flight: deque[Batch] = deque()
        self._given_up_session: SessionConnection | None = None
        """The session through which writes that were given up can still arrive."""
        self._settling: asyncio.Task[None] | None = None
        self._expiry = self._loop.call_later(bounds.ZOOKEEPER_LOOK_S, self._expire)

    async def open(self) -> None:
        """Make the guard.  Raises `MetadataError`."""
        await self._guard.open()
        self._state = State.SENDING

    def submit(
        self, request: Write, session: SessionConnection | None
    ) -> "asyncio.Future[Outcome]":
        """Queue a write.  The future also raises `MetadataError`."""
        write = PendingWrite(request, session, self._loop.time())
        refusal = self._refusal()
        if refusal is not None:
            write.complete(refusal)
            return write.done
        self._queued_bytes += request.size
        write.done.add_done_callback(lambda _: self._uncount(request.size))
        self._queue.append(write)
        if not self._is_known(write) and not isinstance(request, SequencePut):
            self._loader.ask(write)
        self._pump()
        return write.done

    def connection_changed(self) -> None:
        """Try to send waiting writes: the connection, or a session's, is back or gone."""
        self._pump()

    async def close(self) -> None:
        """Finish the queued writes, as far as ZooKeeper answers in time.  Idempotent."""
        waiting = [*(write.done for write in self._all()), *self._visible.pending()]
        if waiting and self._state is not State.CLOSED:
            await asyncio.wait(waiting, timeout=bounds.ZOOKEEPER_REQUEST_S)
        self._state = State.CLOSED
        self._expiry.cancel()
        self._pruning.close()
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.gather(self._settling, return_exceptions=True)
        for write in self._all():
            write.complete(outcome_unknown(write))
        self._visible.close()

    # Sending

    def _pump(self) -> None:
        """Send the writes that can be sent, in order."""
        while (
            self._queue
            and self._state is State.SENDING
            and len(self._flight) < bounds.ZOOKEEPER_BATCHES_IN_FLIGHT
        ):
            if self._guard.is_used_up:
                self._renew_guard()
                return
            batch = Batch()
            while self._queue and self._take_or_fail(self._queue[0], batch):
                self._queue.popleft()
            if not batch.items:
                return
            self._send(batch)

    def _take_or_fail(self, write: PendingWrite, batch: Batch) -> bool:
        """Call `_take`; a write that causes an unexpected error fails alone."""
        try:
            return self._take(write, batch)
        except Exception as error:  # noqa: BLE001 - it would hold up all writes behind it
            self._knowledge.forget_level(write.level, write.name)
            write.complete(defect_at(write, error))
            return True

    def _take(self, write: PendingWrite, batch: Batch) -> bool:
        """Plan or complete the first write of the queue; False if it has to wait."""
        if write.done.done():
            return True
        # Ephemeral records go through the connection of their session.  There is no order between
        # two connections, so the pipeline runs empty when the session changes.
        if not batch.takes(write) or (
            self._flight and self._flight[-1].session is not write.session
        ):
            return False
        if write.session is not None and write.session.lost:
            write.complete(session_lost())
            return True
        if not self._is_known(write):
            self._learn(write, batch)
            return False
        if write.session is not None and not write.verified:
            # Earlier requests on the other connection, such as watches, are answered before.
            self._verify(write, batch)
            return False
        return not self._depends_on_flight(write) and self._plan(write, batch)

    def _learn(self, write: PendingWrite, batch: Batch) -> None:
        """Read the state that a write needs; for a sequence put, after all earlier writes."""
        if not isinstance(write.request, SequencePut):
            self._loader.ask(write)
        elif not batch.items:
            self._loader.verify(write)

    def _verify(self, write: PendingWrite, batch: Batch) -> None:
        """Read the state that a write needs again, with nothing in flight."""
        if not self._flight and not batch.items:
            self._loader.verify(write)

    def _plan(self, write: PendingWrite, batch: Batch) -> bool:
        try:
            plan = self._make_plan(write)
        except RecordTooLarge as error:
            write.complete(error)
            return True
        except MagnetarError as error:
            return self._complete_verified(write, error, batch)
        if plan is None:
            return self._complete_verified(write, False, batch)
        if not batch.fits(plan):
            return False
        client = self._client_of(write.session)
        for path in self._knowledge.missing_nodes(plan):
            client.submit(requests.create(path), _ignore)
        batch.add(PlannedWrite(write, plan, self._knowledge.expect(plan)))
        return True

    def _is_known(self, write: PendingWrite) -> bool:
        request = write.request
        if write.loading:
            return False
        if isinstance(request, SequencePut):
            directory = self._knowledge.directory(request.prefix)
            return write.verified or (directory is not None and directory.sequence is not None)
        if self._knowledge.knows(request.key):
            return True
        return isinstance(request, Put) and request.expect == ABSENT and not write.tries

    def _depends_on_flight(self, write: PendingWrite) -> bool:
        """Whether its condition names a version, and its record has a write in flight."""
        request = write.request
        if isinstance(request, SequencePut) or request.expect is None:
            return False
        node = self._knowledge.record(request.key)
        return node is not None and node.stored.version == IN_FLIGHT

    def _make_plan(self, write: PendingWrite) -> Plan | None:
        request = write.request
        if isinstance(request, Delete):
            return plan_delete(self._layout, request, self._knowledge.record(request.key))
        directory = self._knowledge.directory(write.level) or Directory(0, None)
        life = f"{self._rng.getrandbits(LIFE_BITS):0{LIFE_BITS // 4}x}"
        if isinstance(request, SequencePut):
            return plan_sequence_put(self._layout, request, directory, write.others, life)
        current = self._knowledge.record(request.key)
        return plan_put(self._layout, request, current, directory, life)

    def _complete_verified(
        self, write: PendingWrite, outcome: Outcome | Exception, batch: Batch
    ) -> bool:
        # The state may be old: only a newer read, behind a `sync`, makes this the outcome.
        if write.verified:
            write.complete(outcome)
            return True
        self._verify(write, batch)
        return False

    def _send(self, batch: Batch) -> None:
        try:
            request = requests.multi([self._guard.step(len(self._flight)), *batch.requests()])
        except Exception as error:  # noqa: BLE001 - it would hold up all writes behind it
            self._not_made(batch, error)
            return
        self._flight.append(batch)
        try:
            self._client_of(batch.session).submit(request, bind(self._answered, batch))
        except Exception as error:  # noqa: BLE001 - no answer would come, ever
            _log.error("writes_not_sent", batches=len(self._flight), exc_info=error)
            lost = Answer(None, Failure.OTHER, 0)
            self._loop.call_soon(self._answered, batch, lost)

    def _not_made(self, batch: Batch, error: Exception) -> None:
        """Try each write of a batch alone: one of them cannot be encoded, and fails then."""
        for item in reversed(batch.items):
            self._knowledge.undo(item.plan, item.undo)
            item.write.verified = False
            if len(batch.items) == 1:
                item.write.complete(defect_at(item.write, error))
            else:
                item.write.tries += 1
                self._queue.appendleft(item.write)

    def _client_of(self, session: SessionConnection | None) -> ZooKeeperClient:
        return self._client if session is None else session.client

    # Answers

    def _answered(self, batch: Batch, answer: Answer) -> None:
        if batch.answer is not None:
            return  # the batch was given up
        batch.answer = answer
        try:
            self._process_answers(batch)
        except Exception as error:  # noqa: BLE001 - the callers of these writes need an outcome
            self._give_up_flight(error)
            if self._state in (State.SENDING, State.DRAINING):
                self._settle_later()
        self._pump()

    def _process_answers(self, batch: Batch) -> None:
        """Process the answers of the batches in flight, in order, as far as they have come."""
        if self._state is State.SENDING and not batch.took_effect:
            self._state = State.DRAINING
        if self._state is not State.SETTLING:
            while self._flight and self._flight[0].took_effect:
                first = self._flight[0]
                self._succeeded(first, Version(cast(Answer, first.answer).zxid))
                self._flight.popleft()
            if self._state is State.DRAINING and all(each.answer for each in self._flight):
                self._recover()

    def _succeeded(self, batch: Batch, version: Version) -> None:
        self._guard.count += 1
        outcomes = [self._outcome(item, version) for item in batch.items]
        if batch.session is not None:
            self._visible.add(outcomes)
            return
        for write, outcome in outcomes:
            write.complete(outcome)

    def _outcome(self, item: PlannedWrite, version: Version) -> tuple[PendingWrite, Outcome]:
        plan = item.plan
        self._knowledge.confirm(plan, version)
        if plan.after is None:
            self._pruning.note(item.write.level)
            return item.write, True
        return item.write, PutResult(plan.key, version, plan.after.stored.modifications)

    def _recover(self) -> None:
        """Try the batches in flight again, or settle them: each is answered, the first failed."""
        # A first batch that failed at the guard shows that the guard's version is not as expected.
        if self._flight[0].failed_at_guard or any(batch.is_lost for batch in self._flight):
            self._settle_later()
        else:
            self._try_again()

    def _try_again(self) -> None:
        """Put the writes in flight back to the head of the queue, as if they were not sent."""
        for batch in reversed(self._flight):
            blamed = batch.to_blame()
            for item in reversed(batch.items):
                self._knowledge.undo(item.plan, item.undo)
                item.write.verified = False
                self._queue.appendleft(item.write)
            if blamed is not None:
                self._knowledge.forget(blamed.plan)
                blamed.write.tries += 1
                if blamed.write.tries > bounds.ZOOKEEPER_TRIES:
                    blamed.write.complete(contended(blamed.write))
        self._flight.clear()
        self._state = State.SENDING
        self._loop.call_soon(self._pump)

    # Lost answers

    def _settle_later(self) -> None:
        self._state = State.SETTLING
        self._settling = self._loop.create_task(self._settle())

    async def _settle(self) -> None:
        """Find out which batches in flight took effect, however long it takes."""
        backoff = Backoff(bounds.ZOOKEEPER_RECONNECT_MIN_S, bounds.ZOOKEEPER_RECONNECT_MAX_S)
        while self._state is State.SETTLING:
            try:
                await self._settle_flight()
                self._try_again()
                return
            except (RequestFailed, MetadataError) as error:
                _log.warning("writes_not_settled", error=str(error), batches=len(self._flight))
            except Exception as error:  # noqa: BLE001 - nothing would be written any more
                self._give_up_flight(error)
            await asyncio.sleep(backoff.pause_s())

    async def _settle_flight(self) -> None:
        if not self._flight:  # the guard is used up, or its version is not known
            await self._wait_for(self._given_up_session)
            await self._guard.open()
            self._given_up_session = None
            return
        await self._wait_for(self._flight[0].session)
        count = await self._guard.read()
        if count is None or not await self._settle_first(count - self._guard.count):
            await self._settle_without_guard()

    def _give_up_flight(self, error: Exception) -> None:
        """Complete all writes in flight with an unknown outcome.  A new guard has to follow."""
        # None of them arrives after writes of the new guard: it is made after them on the same
        # connection, or once the session that they went through has caught up.
        _log.error("writes_given_up", batches=len(self._flight), exc_info=error)
        if self._flight:
            self._given_up_session = self._flight[0].session
        for batch in self._flight:
            batch.answer = batch.answer or Answer(None, Failure.OTHER, 0)
            for item in batch.items:
                self._knowledge.forget(item.plan)
                item.write.complete(not_settled(item.write, error))
        self._flight.clear()

    async def _wait_for(self, session: SessionConnection | None) -> None:
        """Wait until nothing that was sent through a session can still arrive."""
        while session is not None and not session.lost:
            try:
                await session.client.call(requests.sync(self._layout.records))
                return
            except RequestFailed:
                await asyncio.sleep(bounds.ZOOKEEPER_RECONNECT_MIN_S)

    async def _settle_first(self, count: int) -> bool:
        """Complete the first `count` batches, the only ones in effect; False if that cannot be."""
        first = list(self._flight)[:count]
        if len(first) != count or any(batch.failed for batch in first) or self._guard.is_used_up:
            return False
        for place, batch in enumerate(first):
            evidence = await self._evidence_of(batch)
            # A record that was overwritten since had a version that no record has any more.
            self._succeeded(batch, Version(evidence.version or IN_FLIGHT - 1 - place))
            self._flight.popleft()
        return True

    async def _settle_without_guard(self) -> None:
        """Complete batches by what their records show, as the guard went with its session."""
        while self._flight and self._flight[0].is_lost:
            batch = self._flight[0]
            evidence = await self._evidence_of(batch)
            if evidence.effect is Effect.NONE:
                break
            for item in batch.items:
                if evidence.effect is Effect.DONE:
                    write, outcome = self._outcome(item, Version(evidence.version))
                    write.complete(outcome)
                else:
                    self._knowledge.forget(item.plan)
                    item.write.complete(outcome_unknown(item.write))
            self._flight.popleft()
        await self._guard.open()

    async def _evidence_of(self, batch: Batch) -> Evidence:
        reads = [requests.get_data(self._layout.record(item.plan.key)) for item in batch.items]
        answer, _ = await self._client.call_again(requests.read_many(reads))
        return effect_of(batch.items, cast("list[Read]", answer))

    def _renew_guard(self) -> None:
        """Make another guard once nothing is in flight: this one's versions have run out."""
        if not self._flight:
            self._settle_later()

    # Housekeeping

    def _all(self) -> list[PendingWrite]:
        in_flight = [item.write for batch in self._flight for item in batch.items]
        return [*in_flight, *self._queue]

    def _may_remove(self, level: str) -> bool:
        """Whether no write is under way below a directory; if so, forget the directory."""
        if any(write.level == level for write in self._all()):
            return False
        self._knowledge.forget_directory(level)
        return True

    def _expire(self) -> None:
        """Fail writes that have waited for too long, and drop those without a caller."""
        self._expiry = self._loop.call_later(bounds.ZOOKEEPER_LOOK_S, self._expire)
        self._visible.expire()
        oldest = self._loop.time() - bounds.ZOOKEEPER_REQUEST_S
        for batch in self._flight:
            for item in batch.items:
                if item.write.asked_at < oldest:
                    item.write.complete(outcome_unknown(item.write))
        for write in self._queue:
            if write.asked_at < oldest:
                write.complete(not_stored())
        if self._queue and self._queue[0].done.done():
            self._queue = deque(write for write in self._queue if not write.done.done())
        self._pump()

    def _uncount(self, size: int) -> None:
        self._queued_bytes -= size

    def _refusal(self) -> MetadataError | None:
        if self._state is State.CLOSED:
            return MetadataError("The metadata store is closed: open it again.")
        if (
            len(self._queue) >= bounds.METADATA_QUEUE_OPERATIONS
            or self._queued_bytes >= bounds.METADATA_QUEUE_BYTES
        ):
            return MetadataError(
                f"The metadata store is {len(self._queue)} writes behind: look at ZooKeeper's "
                "latency, try again later."
            )
        return None


def _ignore(_answer: Answer) -> None:
    """Ignore the answer of a request that need not succeed: if it matters, a later one fails."""
