"""`BookieClient`, the interface to bookies: one request to one bookie, one answer."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ledger_metadata import BookieId


class ReplyCode(enum.IntEnum):
    """A bookie's answer (numbers of the v2 protocol), or the reason that there is none (below 0).

    Only OK, NO_SUCH_LEDGER and NO_SUCH_ENTRY tell what a bookie holds.
    """

    OK = 0
    NO_SUCH_LEDGER = 1
    NO_SUCH_ENTRY = 2
    BAD_REQUEST = 100
    IO_ERROR = 101
    UNAUTHORISED = 102
    BAD_VERSION = 103
    FENCED = 104
    READ_ONLY = 105
    TOO_MANY_REQUESTS = 106
    STATE_UNKNOWN = 107

    TIMED_OUT = -1
    DISCONNECTED = -2
    TOO_LARGE = -3
    """The frame is larger than bookies take; it was not sent."""
    OTHER = -4
    """A code of a newer bookie."""


AddDone = Callable[[ReplyCode], None]
ReadDone = Callable[[ReplyCode, bytes], None]
"""The entry body (header, digest, data) for OK, else nothing."""
BatchDone = Callable[[ReplyCode, Sequence[bytes]], None]


@dataclass(slots=True)
class BookieCounters:
    """Counters of connections, which only grow."""

    requests: int = 0
    timeouts: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    connects: int = 0
    failed_connects: int = 0
    refusals: dict[ReplyCode, int] = field(default_factory=lambda: dict.fromkeys(ReplyCode, 0))
    """Answers other than OK by code, those below 0 included."""


class BookieClient(ABC):
    """Interface: sends one request of the quorum protocol to one bookie, and gives its answer.

    Calls never block.  Each request is answered once, by a callback from the event loop and never
    within the call.  Requests in flight are bounded.
    """

    counters: BookieCounters

    @abstractmethod
    def add(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        master_key: bytes,
        body: Sequence[bytes],
        done: AddDone,
        *,
        recovery: bool = False,
    ) -> None:
        """Store one entry; `body` in pieces that are sent one after the other.

        `recovery` lets it pass on a fenced ledger, with high priority.
        """

    @abstractmethod
    def read(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        done: ReadDone,
        *,
        fence_with: bytes | None = None,
    ) -> None:
        """Read one entry; -1: the one with the highest id that the bookie holds.

        `fence_with`, a master key, fences the ledger there first, with high priority.
        """

    @abstractmethod
    def read_batch(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        first: int,
        max_entries: int,
        max_bytes: int,
        done: BatchDone,
    ) -> None:
        """Read entries from `first` on without a hole, at least one."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection; requests in flight are answered DISCONNECTED."""
