"""Pure decisions on the admission of producers: access modes and the topic epoch, as in Pulsar."""

import enum
from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError


class AccessMode(enum.IntEnum):
    """Access mode of a producer; the numbers are those of the wire."""

    SHARED = 0
    """Refused while another producer is, or waits to be, exclusive."""
    EXCLUSIVE = 1
    """Refused while another producer is admitted or waits."""
    WAIT_FOR_EXCLUSIVE = 2
    """Queued while another producer is admitted or waits."""
    EXCLUSIVE_WITH_FENCING = 3
    """Admitted at once; all others are disconnected."""


class _ProducerRefused(PeerError):
    """A refusal whose sentence begins with its name."""

    def __str__(self) -> str:
        # v5 clients show the sentence, and not the code.
        name = f"{type(self).__name__}: "
        # An error of another broker begins with its name already.
        return name + super().__str__().removeprefix(name)


class ProducerBusy(_ProducerRefused):
    """Another producer holds the topic or the name: wait until that producer has closed."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_BUSY


class ProducerFenced(_ProducerRefused):
    """Another exclusive producer has the topic: open a new producer to compete again."""

    code: ClassVar[ServerError] = ServerError.PRODUCER_FENCED


class Admission(enum.Enum):
    """Decision on a request for access."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    ADMITTED_ALONE = "admitted alone"
    """Admitted; all others are to be disconnected first."""


class ProducerAccess:
    """The access state of one topic.  Names are producer names.

    Each exclusive admission raises the topic epoch.  A producer that comes back with the epoch that
    it was given before keeps it, and is fenced when the topic's epoch is higher by now.
    """

    __slots__ = ("_admitted", "_queue", "epoch", "exclusive")

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        self.exclusive: str | None = None
        self._admitted: set[str] = set()
        self._queue: OrderedDict[str, int | None] = OrderedDict()

    @property
    def waiting(self) -> Collection[str]:
        """Names of the producers that wait to be exclusive, in order."""
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
        self._require_newest(given_epoch)
        if mode is AccessMode.WAIT_FOR_EXCLUSIVE and (taken or self._queue):
            self._queue[name] = given_epoch
            return Admission.QUEUED
        self._take(name, given_epoch)
        if mode is AccessMode.EXCLUSIVE_WITH_FENCING and taken:
            return Admission.ADMITTED_ALONE
        return Admission.ADMITTED

    def leave(self, name: str) -> None:
        """Remove `name` from the admitted and the waiting producers."""
        self._queue.pop(name, None)
        self._admitted.discard(name)
        if self.exclusive == name:
            self.exclusive = None

    def clear_queue(self) -> list[str]:
        """Remove all waiting producers; returns their names."""
        names = list(self._queue)
        self._queue.clear()
        return names

    def promote(self) -> str | None:
        """The name that may `take` the topic now: the first waiting one, once none is admitted."""
        if self._admitted or not self._queue:
            return None
        return next(iter(self._queue))

    def take(self, name: str) -> None:
        """Make the waiting `name` exclusive.  Raises `ProducerFenced`."""
        self._take(name, self._queue.pop(name))

    def _require_newest(self, given_epoch: int | None) -> None:
        # Also before it would wait: its client would hold messages back and never be promoted.
        current = self.epoch
        if given_epoch is not None and current is not None and given_epoch < current:
            raise ProducerFenced(
                f"The topic epoch is {current} and this producer had {given_epoch}: another "
                "exclusive producer came since; open a new producer to compete again."
            )

    def _take(self, name: str, given_epoch: int | None) -> None:
        self._require_newest(given_epoch)
        current = self.epoch
        if given_epoch is not None:
            self.epoch = given_epoch
        else:
            self.epoch = 0 if current is None else current + 1
        self.exclusive = name
        self._admitted.add(name)
