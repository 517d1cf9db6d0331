"""The ledger store interface: append-only, numbered, fenced streams of entries.

Rules that every backend keeps, and that one contract suite checks:

- Entry ids are 0, 1, 2...; an id is given when `append` is called.  Callbacks run on the event
  loop in id order, once each; a success means the entry is durable.  After the first failure
  every later append of that handle fails too, and the outcome of the failed ones is unknown
  until the ledger is opened again.
- `open` of a ledger that was not closed fences its writer (whose appends fail with `LedgerFenced`
  from then on), recovers it (every acknowledged entry is there, torn tails are not) and closes it.
- A closed ledger never changes.  A deleted ledger's id is never used again.
- Nothing is readable past the last add confirmed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from protocol.ids import LedgerId
from protocol.server_error import InternalError, OperatorError, ServerError

AppendCallback = Callable[[int, "LedgerError | None"], None]
"""Called with the entry id and None when durable, or the error."""


class LedgerError(OperatorError):
    """The ledger store could not do it.  Reported as PersistenceError."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class DiskFull(LedgerError):
    """No room: nothing acknowledged is lost; free space or add some, appends work again then."""


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

        Raises `LedgerClosed` / `LedgerFenced` when the handle is already known dead.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait for queued appends, then make the end durable.  Idempotent."""


class LedgerStore(ABC):
    """See the module's rules."""

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
    async def close(self) -> None:
        """Make everything queued durable and release the files."""
