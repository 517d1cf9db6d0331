"""Which acknowledgements the broker has answered, for those who wait for its word.

Pure; whoever waits is a future that the shell makes.  Rules:

- Acknowledgements leave in groups, each of which is asked about; a group is answered when all its
  commands are.
- Who waits does so for every group that was sent before, and for the one that waits to be sent if
  there is something in it.  The first error of those is theirs.
- When what was sent will not be answered (`lost`), it is not known; what was not sent yet goes on.
- Of what is not answered only the newest groups are kept: of the oldest it is not known then.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import Final

from magnetar.bounds import MAX_UNANSWERED_ACKS
from magnetar.errors import MagnetarError, OperationTimedOut
from protocol import pulsar_pb2 as pb

__all__ = ["DONE", "AckAnswers"]

Answer = Callable[[pb.BaseCommand | MagnetarError], None]


class _Done:
    """An awaitable that has come to its end."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


DONE: Final = _Done()
"""What is awaited of an acknowledgement whose answer nobody waits for."""


class _Group:
    """One that was sent."""

    __slots__ = ("forget", "left")

    def __init__(self, left: int, forget: Callable[[], None]) -> None:
        self.left = left
        """Commands that have no answer."""
        self.forget: Final = forget


class AckAnswers:
    """Of one segment consumer."""

    __slots__ = ("_sent", "_unanswered", "_waiting")

    def __init__(self) -> None:
        self._sent = 0
        """The number of the last group."""
        self._unanswered: dict[int, _Group] = {}
        """Oldest first."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Who waits, and the last group of those that it is for; in their order."""

    def __len__(self) -> int:
        return len(self._unanswered)

    @property
    def awaited(self) -> list[asyncio.Future[None]]:
        """Those that wait."""
        return [outcome for _, outcome in self._waiting]

    def sent(self, commands: int, forget: Callable[[], None]) -> Answer:
        """A group leaves in so many commands; what is returned takes the answer to each.

        `forget` is called if answers are not awaited any more.
        """
        self._sent += 1
        number = self._sent
        self._unanswered[number] = _Group(commands, forget)
        if len(self._unanswered) > MAX_UNANSWERED_ACKS:
            oldest = next(iter(self._unanswered))
            error = OperationTimedOut(
                "The broker answers acknowledgements too slowly to keep count; look whether it is "
                "overloaded."
            )
            self._answered(oldest, error)

        def answered(answer: pb.BaseCommand | MagnetarError) -> None:
            self._answered(number, answer)

        return answered

    def wait(self, outcome: asyncio.Future[None], *, for_next: bool) -> None:
        """`outcome` is resolved; `for_next`: something waits to be sent."""
        if for_next:
            self._waiting.append((self._sent + 1, outcome))
        elif self._unanswered:
            self._waiting.append((self._sent, outcome))
        else:
            outcome.set_result(None)

    def lost(self, error: MagnetarError) -> None:
        """What was sent will not be answered."""
        self._forget_all()
        self._tell_up_to(self._sent, error)

    def over(self, error: MagnetarError) -> None:
        """Nothing is sent or answered any more."""
        self._forget_all()
        self._tell_up_to(self._sent + 1, error)

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
        self._tell_up_to(oldest - 1, None)

    def _refused(self, number: int, group: _Group, error: MagnetarError) -> None:
        """Everybody who waits for this group among others is told."""
        del self._unanswered[number]
        group.forget()
        told = [each for each in self._waiting if each[0] >= number]
        for _ in told:
            self._waiting.pop()
        for _, outcome in told:
            _resolve(outcome, error)

    def _tell_up_to(self, number: int, error: MagnetarError | None) -> None:
        while self._waiting and self._waiting[0][0] <= number:
            _resolve(self._waiting.popleft()[1], error)


def _resolve(outcome: asyncio.Future[None], error: MagnetarError | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)
