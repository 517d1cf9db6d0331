"""The ledger store interface: append-only, numbered, fenced streams of entries.

Rules that every backend keeps, and that one contract suite checks:

- Entry ids are 0, 1, 2...; an id is given when `append` is called.  Callbacks run on the event
  loop in id order, once each; a success means the entry is durable.  After the first failure
  every later append of that handle fails too, and the outcome of the failed ones is unknown
  until the ledger is opened again.
- `append` refuses an entry above `LedgerStore.max_entry_bytes`, and where too much waits already
  (`AppendRefused`).  That entry got no id, and nothing else comes of it: the ledger goes on.
- `open` of a ledger that was not closed fences its writer (whose appends fail with `LedgerFenced`
  from then on), recovers it (every acknowledged entry is there, torn tails are not) and closes it.
- A closed ledger never changes.  A deleted ledger's id is never used again.
- Nothing is readable past the last add confirmed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from magnetar.protocol.ids import LedgerId
from magnetar.protocol.server_error import InternalError, OperatorError, ServerError

AppendCallback = Callable[[int, "LedgerError | None"], None]
"""Called with the entry id and None when durable, or the error."""


class LedgerError(OperatorError):
    """The ledger store could not do it.  Reported as PersistenceError."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class DiskFull(LedgerError):
    """No room: nothing acknowledged is lost; free space or add some, appends work again then."""


class AppendRefused(LedgerError):
    """This entry was not taken; the ledger takes others as before."""


class EntryTooLarge(AppendRefused):
    """The entry is above the largest that the store takes."""


class LedgerBusy(AppendRefused):
    """Too many appends wait: send again after a pause."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


def entry_too_large(entry_bytes: int, max_entry_bytes: int) -> EntryTooLarge:
    """The error for an entry of that size."""
    return EntryTooLarge(
        f"An entry of {entry_bytes} bytes is above the {max_entry_bytes} that the ledger store "
        "takes: send less at once, or raise the frame size of bookies and of the broker."
    )


class LedgerFenced(LedgerError):
    """Another owner opened this ledger: this handle is dead."""


class LedgerClosed(LedgerError):
    """The handle was closed by its own owner."""


class NoSuchLedger(LedgerError):
    """The ledger does not exist, or was deleted."""


class NoSuchEntry(LedgerError):
    """The entry id is outside the readable range."""


class CorruptEntry(LedgerError):
    """Stored bytes fail their checksum: the disk lost or changed data."""


class LedgerAssertion(InternalError):
    """An invariant of storage broke.  The owner stops."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


@dataclass(frozen=True, slots=True)
class LedgerDescription:
    """How a ledger was made: its `custom` metadata, and when; None where that was not noted."""

    custom: Mapping[str, bytes]
    created_ms: int | None


class ReadableLedger(ABC):
    """A ledger that can be read up to its last add confirmed."""

    @property
    @abstractmethod
    def ledger_id(self) -> LedgerId:
        """Its id."""

    @property
    @abstractmethod
    def last_add_confirmed(self) -> int:
        """Highest readable entry id, -1 when empty."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Sum of the entry sizes up to the last add confirmed, in bytes."""

    @abstractmethod
    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        """Entries first..last inclusive, fewer if they exceed `max_bytes`, but at least one.

        Raises `NoSuchEntry` beyond the last add confirmed, `CorruptEntry`, `NoSuchLedger`.
        """


class WritableLedger(ReadableLedger):
    """A ledger that this process created and still owns."""

    @abstractmethod
    def append(self, entry: bytes, done: AppendCallback) -> int:
        """Queue one entry and return its id; `done` follows on the loop.  Never blocks.

        Raises `LedgerClosed` / `LedgerFenced` when the handle is already known dead, and
        `EntryTooLarge` / `LedgerBusy` for this entry alone.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait for queued appends, then make the end durable.  Idempotent."""


class LedgerStore(ABC):
    """Interface: creates, opens, fences and deletes ledgers."""

    @property
    @abstractmethod
    def max_entry_bytes(self) -> int:
        """The largest entry that its ledgers take.  Never changes."""

    @abstractmethod
    async def create(self, *, custom: Mapping[str, bytes]) -> WritableLedger:
        """A new, empty ledger with an id never used before.  `custom` is metadata for tools."""

    @abstractmethod
    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        """Fence, recover and close if need be, then read.  Raises `NoSuchLedger`."""

    @abstractmethod
    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        """Read what is confirmed so far without disturbing a writer."""

    @abstractmethod
    async def delete(self, ledger_id: LedgerId) -> None:
        """Remove it and give its space back.  Deleting what is gone is fine."""

    @abstractmethod
    async def list_ledgers(self) -> list[LedgerId]:
        """Ids of all ledgers, ascending."""

    @abstractmethod
    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        """How it was made; nothing is opened.  Raises `NoSuchLedger`."""

    @abstractmethod
    async def close(self) -> None:
        """Make everything queued durable and release the files."""
