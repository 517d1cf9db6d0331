"""`UnansweredMessages`: the messages of a producer whose outcome is not known yet."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from magnetar.bounds import ANSWERED_KEPT, DEADLINE_TICK_S, GIVEN_UP_TICK_S, UNREAD_FAILURES
from magnetar.errors import MagnetarError, OperationTimedOut
from magnetar.message_id import EntryId, MessageId
from magnetar.produce.capacity import Capacity
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.produce.receipts import RowOutcome, future_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import from_wire

_new_tuple: Final = tuple.__new__
"""Makes a NamedTuple without the call of its Python constructor."""


class UnansweredMessages:
    """Messages of a producer whose outcome is not known yet; sets every outcome.

    An outcome is a receipt, a failure or a timeout.  All messages have the same timeout, so one
    timer for the oldest is enough.
    """

    def __init__(
        self,
        capacity: Capacity,
        timeout_s: float,
        expired: Callable[[], None],
        trouble: Callable[[], MagnetarError | None],
    ) -> None:
        """`expired` is called when messages have timed out or were cancelled.

        `trouble` returns the error of the last try to reach a broker, if one is not reached now.
        """
        self.last_sequence_id = -1
        """The highest sequence id that is stored."""
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._expired = expired
        self._trouble = trouble
        self._loop = asyncio.get_running_loop()
        self._messages: deque[OutgoingMessage] = deque()
        self._given = 0
        self._flushes: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failures: deque[asyncio.Future[MessageId] | asyncio.Future[None]]
        self._failures = deque(maxlen=UNREAD_FAILURES)
        self._timer: asyncio.TimerHandle | None = None

    def add(self, message: OutgoingMessage) -> None:
        """Add a message that is being sent."""
        message.deadline = self._loop.time() + self._timeout_s
        self._capacity.take(message.size)
        self._messages.append(message)
        self._given = message.place = self._given + 1
        if self._timer is None:
            self._wait(self._timeout_s)

    def add_all(self, messages: Sequence[OutgoingMessage]) -> None:
        """Add messages that are being sent."""
        deadline = self._loop.time() + self._timeout_s
        place, size = self._given, 0
        for message in messages:
            message.deadline = deadline
            message.place = place = place + 1
            size += message.size
        self._given = place
        self._capacity.take(size, len(messages))
        self._messages += messages
        if self._timer is None:
            self._wait(self._timeout_s)

    def stored(self, segment_id: int, sent: SentEntry, where: pb.MessageIdData) -> None:
        """Set the results of a SEND that has its receipt."""
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
                    outcome.set_stored(segment_id, place)
                else:
                    outcome.set_result(MessageId(new(EntryId, place), segment_id))
            if message.counted:
                message.counted = False
                count += 1
                freed += message.size
        self._capacity.give_back(count, freed)
        self._settle()

    def fail(self, messages: Sequence[OutgoingMessage], error: MagnetarError) -> None:
        """Fail messages that are not stored, or of which that is not known."""
        for message in messages:
            if not message.outcome.done():
                failure = type(error)(*error.args)
                failure.__cause__ = error.__cause__
                message.outcome.set_exception(failure)
                failed = future_of(message.outcome)
                if message.txn is not None:
                    failed.exception()  # Retrieved: the commit raises it.
                elif not self._failures or self._failures[-1] is not failed:
                    self._failures.append(failed)
            self.release(message)

    def fail_all(self, error: MagnetarError, *, retrieved: bool = False) -> None:
        """Fail all messages.  With `retrieved`, asyncio and `flush` do not report the errors."""
        messages = tuple(self._messages)
        failed = [message for message in messages if not message.outcome.done()]
        self.fail(messages, error)
        if retrieved:
            for message in failed:
                future_of(message.outcome).exception()

    def release(self, message: OutgoingMessage) -> None:
        """Stop counting a message whose outcome is known."""
        self._free(message)
        self._settle()

    async def flush(self) -> None:
        """Wait until all messages that were added before have their outcome."""
        self._settle()
        if self._messages:
            done: asyncio.Future[None] = self._loop.create_future()
            self._flushes.append((self._given, done))
            await done

    def unread_failure(self) -> BaseException | None:
        """The first failure that was not retrieved; afterwards all count as retrieved."""
        first: BaseException | None = None
        while self._failures:
            failed = self._failures.popleft()
            unread = failed._log_traceback
            error = failed.exception()
            if unread and first is None:
                first = error
        return first

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _free(self, message: OutgoingMessage) -> None:
        if message.counted:
            message.counted = False
            self._capacity.give_back(1, message.size)

    def _settle(self) -> None:
        """Forget answered messages, from the oldest on, and end flushes that waited for them."""
        messages = self._messages
        while messages and not messages[0].counted:
            messages.popleft()
        # Answered messages must not pile up behind an old one without answer.
        if len(messages) > 2 * self._capacity.messages + ANSWERED_KEPT:
            messages = self._messages = deque(m for m in messages if m.counted)
        while self._flushes and (not messages or messages[0].place > self._flushes[0][0]):
            _, done = self._flushes.popleft()
            if not done.done():
                done.set_result(None)

    def queue_full(self) -> OperationTimedOut:
        """The error of a message that waited too long for others to get their receipts."""
        what = "The number of pending messages did not fall below its limit"
        return self._too_late(what, "the message was not sent.")

    def _too_late(self, what: str, outcome: str) -> OperationTimedOut:
        trouble = self._trouble()
        reason = "" if trouble is None else f" The last try to reach a broker failed: {trouble}"
        error = OperationTimedOut(
            f"{what} within {self._timeout_s:g} s; {outcome}"
            f"{reason} Check whether the broker is well, or raise send_timeout_s."
        )
        error.__cause__ = trouble
        return error

    def _wait(self, until_due_s: float) -> None:
        wait_s = min(max(0.0, until_due_s) + DEADLINE_TICK_S, GIVEN_UP_TICK_S)
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        due: list[OutgoingMessage] = []
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
