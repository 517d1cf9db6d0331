"""The messages of a producer whose outcome is not known: deadlines, room, and who waits for all.

Rules:

- Every outcome is set here: a receipt, a failure, or time that is up.  All messages have the same
  time, so the oldest is due first, and one timer is enough.
- `flush` waits for what was sent before it.  It raises the first failure that nobody has looked at,
  but none of a message in a transaction: its commit raises those, an abort makes them moot.
- Who gives up (cancels) is noticed now and then, not at once: what was not sent makes room then.
- What is answered is forgotten soon, however long something older waits.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from magnetar.bounds import ANSWERED_KEPT, DEADLINE_TICK_S, GIVEN_UP_TICK_S, UNREAD_FAILURES
from magnetar.errors import MagnetarError, OperationTimedOut
from magnetar.message_id import EntryId, MessageId
from magnetar.produce.outgoing import Outgoing, Sent
from magnetar.produce.receipts import RowOutcome, future_of
from magnetar.produce.room import Room
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import from_wire

_new_tuple: Final = tuple.__new__
"""A NamedTuple without the call of its Python constructor."""


class Unanswered:
    """Messages of a producer whose outcome is not known yet, with their deadlines."""

    def __init__(
        self,
        room: Room,
        timeout_s: float,
        expired: Callable[[], None],
        trouble: Callable[[], MagnetarError | None],
    ) -> None:
        """`expired` is called when there is something that nobody waits for any more: its time is
        up or it was cancelled.  `trouble` says why no broker is reached, if that is so.
        """
        self.last_sequence_id = -1
        """The highest of what is stored."""
        self._room = room
        self._timeout_s = timeout_s
        self._expired = expired
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._messages: deque[Outgoing] = deque()
        self._given = 0
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failures: deque[asyncio.Future[MessageId] | asyncio.Future[None]]
        self._failures = deque(maxlen=UNREAD_FAILURES)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, message: Outgoing) -> None:
        """It is being sent from now on."""
        message.deadline = self._loop.time() + self._timeout_s
        self._room.take(message.size)
        self._messages.append(message)
        self._given = message.place = self._given + 1
        if self._timer is None:
            self._wait(self._timeout_s)

    def add_all(self, messages: Sequence[Outgoing]) -> None:
        """They are being sent from now on."""
        deadline = self._loop.time() + self._timeout_s
        place, size = self._given, 0
        for message in messages:
            message.deadline = deadline
            message.place = place = place + 1
            size += message.size
        self._given = place
        self._room.take(size, len(messages))
        self._messages += messages
        if self._timer is None:
            self._wait(self._timeout_s)

    def stored(self, segment_id: int, sent: Sent, where: pb.MessageIdData) -> None:
        """A SEND has its receipt."""
        self.last_sequence_id = max(self.last_sequence_id, sent.highest)
        ledger_id, entry_id = from_wire(where.ledger_id), from_wire(where.entry_id)
        messages = sent.messages
        size = len(messages)
        if size == 1:
            message = messages[0]
            if sent.index == 0:
                message.first_chunk = (ledger_id, entry_id)
            if sent.index + 1 < sent.chunks:
                return
            first = message.first_chunk if sent.chunks > 1 else None
            entry = EntryId(ledger_id, entry_id, first_chunk=first)
            if not message.outcome.done():
                message.outcome.set_result(MessageId(entry, segment_id))
            self.release(message)
            return
        new = _new_tuple
        count = freed = 0
        for index, message in enumerate(messages):
            outcome = message.outcome
            if not outcome.done():
                place = (ledger_id, entry_id, index, size, -1, None)
                if type(outcome) is RowOutcome:
                    outcome.stored(segment_id, place)
                else:
                    outcome.set_result(MessageId(new(EntryId, place), segment_id))
            if message.counted:
                message.counted = False
                count += 1
                freed += message.size
        self._room.give_back(count, freed)
        self._settle()

    def fail(self, messages: Sequence[Outgoing], error: MagnetarError) -> None:
        """These are not stored, or nobody knows."""
        for message in messages:
            if not message.outcome.done():
                failure = type(error)(*error.args)
                failure.__cause__ = error.__cause__
                message.outcome.set_exception(failure)
                failed = future_of(message.outcome)
                if message.txn is not None:
                    failed.exception()  # counts as looked at: the commit raises it
                elif not self._failures or self._failures[-1] is not failed:
                    self._failures.append(failed)
            self.release(message)

    def fail_all(self, error: MagnetarError, *, told: bool = False) -> None:
        """None of them will have another outcome.  `told`: nobody has to look at these errors."""
        messages = tuple(self._messages)
        failed = [message for message in messages if not message.outcome.done()]
        self.fail(messages, error)
        if told:
            for message in failed:
                future_of(message.outcome).exception()

    def release(self, message: Outgoing) -> None:
        """Its outcome is known: it takes no more room."""
        self._free(message)
        self._settle()

    async def flush(self) -> None:
        """Return when all that was added before has its outcome."""
        self._settle()
        if self._messages:
            done: asyncio.Future[None] = self._loop.create_future()
            self._flushes.append((self._given, done))
            await done

    def unread_failure(self) -> BaseException | None:
        """The first failure that nobody has looked at; all count as looked at afterwards."""
        first: BaseException | None = None
        while self._failures:
            failed = self._failures.popleft()
            unread = failed._log_traceback
            error = failed.exception()
            if unread and first is None:
                first = error
        return first

    def close(self) -> None:
        """No more time runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free(self, message: Outgoing) -> None:
        if message.counted:
            message.counted = False
            self._room.give_back(1, message.size)

    def _settle(self) -> None:
        """Forget what is answered, from the oldest on, and wake who waited for it."""
        messages = self._messages
        while messages and not messages[0].counted:
            messages.popleft()
        if len(messages) > 2 * self._room.messages + ANSWERED_KEPT:
            messages = self._messages = deque(m for m in messages if m.counted)
        while self._flushes and (not messages or messages[0].place > self._flushes[0][0]):
            _, done = self._flushes.popleft()
            if not done.done():
                done.set_result(None)

    def no_room(self) -> OperationTimedOut:
        """The error of who has waited for room too long."""
        return self._too_late("There was no room", "the message was not sent.")

    def _too_late(self, what: str, outcome: str) -> OperationTimedOut:
        trouble = self._trouble()
        reason = "" if trouble is None else f" The last try to reach a broker failed: {trouble}"
        error = OperationTimedOut(
            f"{what} within {self._timeout_s:g} s; {outcome}"
            f"{reason} Look whether the broker is well, or raise send_timeout_s."
        )
        error.__cause__ = trouble
        return error

    def _wait(self, until_due_s: float) -> None:
        wait_s = min(max(0.0, until_due_s) + DEADLINE_TICK_S, GIVEN_UP_TICK_S)
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        due: list[Outgoing] = []
        given_up = False
        for message in self._messages:
            if message.outcome.done():
                given_up = given_up or message.counted
                if message.deadline <= now:
                    self._free(message)
            elif message.deadline <= now:
                due.append(message)
        if due:
            error = self._too_late("No receipt came", "the message may be stored all the same.")
            self.fail(due, error)
        if due or given_up:
            self._expired()
        self._settle()
        if self._messages:
            self._wait(self._messages[0].deadline - now)
