"""Answers to acknowledgements, and messages that are not acknowledged yet."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from typing import Final, Protocol

from magnetar.bounds import MAX_UNANSWERED_ACKS
from magnetar.consume.message import RawMessage
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, OperationTimedOut
from magnetar.message_id import EntryId, sort_key
from magnetar.protocol import pulsar_pb2 as pb

__all__ = [
    "DONE",
    "AckAnswers",
    "AckTransaction",
    "Outcomes",
    "OutstandingMessages",
    "cannot_commit",
    "share_outcome",
    "start_now",
]


class AckTransaction(Protocol):
    """The part of a transaction that acknowledgements need."""

    @property
    def id(self) -> tuple[int, int]:
        """The most and least bits of its id."""

    def acknowledging_on(self, topic: str, subscription: str) -> asyncio.Future[None] | None:
        """Tell the coordinator; returns a future to await, or None if it knows the subscription."""

    def track(self, outcome: "asyncio.Future[object]") -> None:
        """Wait for `outcome` before a commit, and abort if it fails."""


def share_outcome(outcome: "asyncio.Future[None]") -> "asyncio.Future[None]":
    """Return a future for one caller; cancelling it does not cancel `outcome`."""
    answer = asyncio.shield(outcome)
    answer.add_done_callback(_retrieve)
    return answer


def start_now(work: Coroutine[None, None, None]) -> "asyncio.Future[None]":
    """Start the work; return its outcome, which need not be awaited."""
    return share_outcome(asyncio.ensure_future(work))


def _retrieve(answer: "asyncio.Future[None]") -> None:
    # So that asyncio does not report the error if the caller does not await it.
    if not answer.cancelled():
        answer.exception()


class Outcomes:
    """An awaitable that waits for all outcomes, and then raises the first error."""

    __slots__ = ("_outcomes",)

    def __init__(self, outcomes: Iterable[Awaitable[None]]) -> None:
        self._outcomes = tuple(outcomes)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        for outcome in await asyncio.gather(*self._outcomes, return_exceptions=True):
            if outcome is not None:
                raise outcome


def cannot_commit(
    context: ClientContext, transaction: AckTransaction, error: MagnetarError
) -> None:
    """Make the transaction abort: it must not commit without a message that was refused.

    Nothing happens if the transaction has ended.
    """
    failed: asyncio.Future[object] = context.loop.create_future()
    failed.set_exception(error)
    failed.exception()  # Retrieved, so that asyncio does not report it.
    with suppress(MagnetarError):
        transaction.track(failed)


Answer = Callable[[pb.BaseCommand | MagnetarError], None]


class _CompletedAwaitable:
    """An awaitable that is done."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE: Final = _CompletedAwaitable()
"""The awaitable of an acknowledgement without `wait`."""


class _Group:
    """A group of acknowledgements that was sent."""

    __slots__ = ("forget", "left")

    def __init__(self, left: int, forget: Callable[[], None]) -> None:
        self.left = left
        """The number of commands without an answer."""
        self.forget: Final = forget


class AckAnswers:
    """The groups of acknowledgements that the broker has not answered, and the callers that wait.

    A group is answered when all its commands are.  A caller waits for all groups sent before, and
    for the next one if it is not empty; it gets their first error.  At most MAX_UNANSWERED_ACKS
    groups are kept; then the oldest fails with `OperationTimedOut`.
    """

    __slots__ = ("_sent", "_unanswered", "_waiting")

    def __init__(self) -> None:
        self._sent = 0
        """The number of the last group."""
        self._unanswered: dict[int, _Group] = {}
        """Groups without an answer by number, oldest first."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Waiting callers in order, each with the number of the last group that it waits for."""

    def __len__(self) -> int:
        return len(self._unanswered)

    @property
    def awaited(self) -> list[asyncio.Future[None]]:
        """The futures of waiting callers."""
        return [outcome for _, outcome in self._waiting]

    def sent(self, commands: int, forget: Callable[[], None]) -> Answer:
        """Note a group sent in `commands` commands; returns the function that takes each answer.

        `forget` is called if the answers are not awaited any more.
        """
        self._sent += 1
        number = self._sent
        self._unanswered[number] = _Group(commands, forget)
        if len(self._unanswered) > MAX_UNANSWERED_ACKS:
            oldest = next(iter(self._unanswered))
            error = OperationTimedOut(
                "The broker answers acknowledgements too slowly; check whether it is overloaded."
            )
            self._answered(oldest, error)

        def answered(answer: pb.BaseCommand | MagnetarError) -> None:
            self._answered(number, answer)

        return answered

    def wait(self, outcome: asyncio.Future[None], *, for_next: bool) -> None:
        """Resolve `outcome` when all groups are answered, with `for_next` the next one too."""
        if for_next:
            self._waiting.append((self._sent + 1, outcome))
        elif self._unanswered:
            self._waiting.append((self._sent, outcome))
        else:
            outcome.set_result(None)

    def lost(self, error: MagnetarError) -> None:
        """Fail the groups that were sent, as they will not be answered."""
        self._forget_all()
        self._resolve_up_to(self._sent, error)

    def over(self, error: MagnetarError) -> None:
        """Fail all groups, also the next one: nothing is sent or answered any more."""
        self._forget_all()
        self._resolve_up_to(self._sent + 1, error)

    def _forget_all(self) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for group in unanswered.values():
            group.forget()

    def _answered(self, number: int, answer: pb.BaseCommand | MagnetarError) -> None:
        group = self._unanswered.get(number)
        if group is None:
            return
        group.left -= 1
        if isinstance(answer, MagnetarError):
            self._refused(number, group, answer)
        elif group.left:
            return
        else:
            del self._unanswered[number]
        oldest = next(iter(self._unanswered), self._sent + 1)
        self._resolve_up_to(oldest - 1, None)

    def _refused(self, number: int, group: _Group, error: MagnetarError) -> None:
        """Fail all callers that wait for this group, also among others."""
        del self._unanswered[number]
        group.forget()
        failed = [each for each in self._waiting if each[0] >= number]
        for _ in failed:
            self._waiting.pop()
        for _, outcome in failed:
            _resolve(outcome, error)

    def _resolve_up_to(self, number: int, error: MagnetarError | None) -> None:
        while self._waiting and self._waiting[0][0] <= number:
            _resolve(self._waiting.popleft()[1], error)


def _resolve(outcome: asyncio.Future[None], error: MagnetarError | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


class OutstandingMessages:
    """The messages of an ordered segment that were handed out and are not acknowledged, by id.

    Messages handed out on an earlier attachment come again.  They can be acknowledged, but do not
    count when the segment is left.  An acknowledgement in a transaction counts when it is answered.
    """

    __slots__ = ("_acknowledged", "_before", "_out", "_said", "_waiter")

    def __init__(self) -> None:
        self._out: deque[EntryId] = deque()
        self._acknowledged: set[EntryId] = set()
        """Messages of `_out` that were acknowledged one by one, out of order."""
        self._said: set[EntryId] = set()
        """Messages of `_out` that a transaction has acknowledged, without an answer yet."""
        self._before: dict[EntryId, None] = {}
        """Messages of earlier attachments that are not acknowledged."""
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._out)

    def add(self, received: "RawMessage[object]") -> None:
        """Note a message that is handed out."""
        message_id = received.entry_id
        self._before.pop(message_id, None)
        self._out.append(message_id)

    def take_back(self, received: "RawMessage[object]") -> None:
        """Undo `add` of the last message, which was not handed out after all."""
        if self._out and self._out[-1] == received.entry_id:
            self._out.pop()
            self._wake()

    def acknowledged(self, message_id: EntryId) -> None:
        """Note that a message is acknowledged."""
        self._before.pop(message_id, None)
        out, done = self._out, self._acknowledged
        if not out:
            return
        done.add(message_id)
        while out and out[0] in done:
            done.discard(out[0])
            self._said.discard(out.popleft())
        self._wake()

    def acknowledged_up_to(self, message_id: EntryId) -> list[EntryId]:
        """Note that messages up to this one are acknowledged; returns those that were not yet."""
        out, done = self._out, self._acknowledged
        last = sort_key(message_id)
        found = self._take_before(last)
        while out and sort_key(out[0]) <= last:
            each = out.popleft()
            self._said.discard(each)
            if each in done:
                done.discard(each)
            else:
                found.append(each)
        self._wake()
        return found

    def said_up_to(self, message_id: EntryId) -> list[EntryId]:
        """Note that a transaction acknowledges up to a message; returns those not yet in one."""
        last = sort_key(message_id)
        found = self._take_before(last)
        for each in self._out:
            if sort_key(each) > last:
                break
            if each not in self._acknowledged and each not in self._said:
                self._said.add(each)
                found.append(each)
        return found

    def attached(self) -> None:
        """Begin a new attachment, on which everything comes again."""
        known = self._acknowledged | self._said
        self._before.update((each, None) for each in self._out if each not in known)
        self._clear()

    def give_up(self) -> None:
        """Forget everything: no message can be acknowledged any more."""
        self._before.clear()
        self._clear()

    def _clear(self) -> None:
        self._out.clear()
        self._acknowledged.clear()
        self._said.clear()
        self._wake()

    def _take_before(self, last: tuple[int, int, int]) -> list[EntryId]:
        found = [each for each in self._before if sort_key(each) <= last]
        for each in found:
            del self._before[each]
        return found

    async def all_acknowledged(self) -> None:
        """Wait until every message is acknowledged."""
        while self._out:
            await self._changed()

    async def _changed(self) -> None:
        """Wait for `_wake`."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._waiter,))

    def _wake(self) -> None:
        if not self._out and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
