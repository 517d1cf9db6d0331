"""Who may produce: access modes and the topic epoch, as pure decisions.

Rules (Pulsar's own):

- Shared is refused while somebody is, or waits to be, exclusive.
- Exclusive is refused while anybody produces or waits.
- WaitForExclusive queues behind whoever produces or waits.
- ExclusiveWithFencing puts everybody else out.
- Each exclusive admission raises the topic epoch; a producer that comes back with the epoch it was
  given before keeps it, and is fenced when the topic's has moved on.
- A refusal has Pulsar's name of it in its sentence: v5 clients show the sentence, and not the code.
"""

import enum
from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class AccessMode(enum.IntEnum):
    """The numbers of the wire."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class _ProducerRefused(PeerError):
    """A refusal whose sentence begins with its name."""

    def __str__(self) -> str:
        return f"{type(self).__name__}: {super().__str__()}"


class ProducerBusy(_ProducerRefused):
    """Somebody else holds the topic or the name: wait until that producer has closed."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_BUSY


class ProducerFenced(_ProducerRefused):
    """Another exclusive producer has the topic: open a new producer to compete again."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_FENCED


class Admission(enum.Enum):
    """What a request for access gets."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    ADMITTED_ALONE = "admitted alone"
    """Admitted; everybody else is to be disconnected first."""


class ProducerAccess:
    """The access state of one topic.  Names are producer names."""

    __slots__ = ("_admitted", "_queue", "epoch", "exclusive")

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        self.exclusive: str | None = None
        self._admitted: set[str] = set()
        self._queue: OrderedDict[str, int | None] = OrderedDict()

    @property
    def waiting(self) -> Collection[str]:
        """Who waits to be exclusive, in order."""
        return self._queue.keys()

    def admit(self, name: str, mode: AccessMode, given_epoch: int | None) -> Admission:
        """Decide on `name`; `given_epoch` is the topic epoch that it was given before.

        Raises `ProducerBusy` or `ProducerFenced`.
        """
        if mode is AccessMode.SHARED:
            if self.exclusive is not None or self._queue:
                raise ProducerBusy(
                    f"Producer {self.exclusive or next(iter(self._queue))!r} has the topic to "
                    "itself; close it first."
                )
            self._admitted.add(name)
            return Admission.ADMITTED
        taken = bool(self._admitted)
        if mode is AccessMode.EXCLUSIVE and (taken or self._queue):
            raise ProducerFenced(
                f"The topic has an exclusive producer {self.exclusive!r}; close it first."
                if self.exclusive is not None or self._queue
                else "The topic has other producers; close them first."
            )
        if mode is AccessMode.WAIT_FOR_EXCLUSIVE and (taken or self._queue):
            self._queue[name] = given_epoch
            return Admission.QUEUED
        self._take(name, given_epoch)
        if mode is AccessMode.EXCLUSIVE_WITH_FENCING and taken:
            return Admission.ADMITTED_ALONE
        return Admission.ADMITTED

    def leave(self, name: str) -> None:
        """`name` no longer produces, or no longer waits."""
        self._queue.pop(name, None)
        self._admitted.discard(name)
        if self.exclusive == name:
            self.exclusive = None

    def clear_queue(self) -> list[str]:
        """Put out everybody who waits."""
        names = list(self._queue)
        self._queue.clear()
        return names

    def promote(self) -> str | None:
        """Who may `take` the topic now: the first who waits, once nobody produces."""
        if self._admitted or not self._queue:
            return None
        return next(iter(self._queue))

    def take(self, name: str) -> None:
        """Make the waiting `name` exclusive.  Raises `ProducerFenced`."""
        self._take(name, self._queue.pop(name))

    def _take(self, name: str, given_epoch: int | None) -> None:
        current = self.epoch
        if given_epoch is not None and current is not None and given_epoch < current:
            raise ProducerFenced(
                f"The topic epoch is {current} and this producer had {given_epoch}: another "
                "exclusive producer came since; open a new producer to compete again."
            )
        if given_epoch is not None:
            self.epoch = given_epoch
        else:
            self.epoch = 0 if current is None else current + 1
        self.exclusive = name
        self._admitted.add(name)
