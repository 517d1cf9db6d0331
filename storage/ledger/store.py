"""The ledger store interface: append-only, numbered, fenced streams of entries.

One contract suite holds every backend to the docstrings here (`tests/contract/ledger`).
"""

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from magnetar.protocol.ids import LedgerId
from magnetar.protocol.server_error import InternalError, OperatorError, ServerError
from storage.damage import EntryRange

AppendCallback = Callable[[int, "LedgerError | None"], None]
"""Called with the entry id and None when the entry is durable, or with the error."""


class LedgerError(OperatorError):
    """An operation of the ledger store failed.  Reported to clients as PersistenceError."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


class DiskFull(LedgerError):
    """The disk is full.  No acknowledged entry is lost; with free space appends work again."""


class AppendRefused(LedgerError):
    """This entry was not taken and got no id; the ledger takes others as before."""


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


class LedgersDamaged(LedgerError):
    """Ledgers of a stream lost entries, and the operator wants such streams refused."""


class LedgerAssertion(InternalError):
    """An invariant of storage broke.  The owner stops."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


@dataclass(frozen=True, slots=True)
class Copies:
    """How many bookies have the entries of a ledger; the defaults are Pulsar's.

    An entry is on `write_quorum` of `ensemble_size` bookies, and acknowledged when `ack_quorum`
    have it.
    """

    ensemble_size: int = 2
    write_quorum: int = 2
    ack_quorum: int = 2

    def __post_init__(self) -> None:
        """Check the quorums.  Raises `LedgerError`."""
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise LedgerError(
                f"An ensemble of {self.ensemble_size} with write quorum {self.write_quorum} and "
                f"ack quorum {self.ack_quorum} is impossible: set ensemble size >= write quorum "
                ">= ack quorum >= 1."
            )


ONE_COPY = Copies(1, 1, 1)


@dataclass(frozen=True, slots=True)
class LedgerDescription:
    """A ledger's `custom` metadata, and the time it was made, None where that is not recorded."""

    custom: Mapping[str, bytes]
    created_ms: int | None
    record: str = field(default="", compare=False)
    """The record as it is now, as text for operators, without its password."""


def record_text(members: Mapping[str, object], custom: Mapping[str, bytes]) -> str:
    """The text of a ledger's record, in the form of BookKeeper's own."""
    encoded = {key: base64.b64encode(value).decode() for key, value in custom.items()}
    shown = {**members, "customMetadata": text_of_map(encoded)}
    return f"LedgerMetadata{text_of_map(shown)}"


def text_of_map(members: Mapping[str, object] | Mapping[int, object]) -> str:
    """`{key=value, key=value}`."""
    return "{" + ", ".join(f"{name}={value}" for name, value in members.items()) + "}"


class ReadableLedger(ABC):
    """A ledger that can be read up to its last add confirmed, and not beyond."""

    @property
    @abstractmethod
    def ledger_id(self) -> LedgerId:
        """The id of the ledger."""

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
        """Queue one entry and return its id: 0, 1, 2 and so on.  Never blocks.

        `done` runs once, on the event loop, in the order of ids.  A success means that the entry is
        durable.  After the first failure every later append of the handle fails too; the outcome of
        those that failed is unknown until the ledger is opened again.

        Raises `LedgerClosed` or `LedgerFenced` if the handle is known to be dead, `EntryTooLarge`
        or `LedgerBusy` for this entry alone.
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
    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        """A new, empty ledger with an id that none had before; `custom` is metadata for tools.

        `copies` are those of its entries; None: as many as the store is set to make.  A store that
        cannot make so many raises `LedgerError`.
        """

    @abstractmethod
    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        """Open a ledger to read it.  Raises `NoSuchLedger`.

        A ledger that was not closed is fenced, recovered and closed first: appends of its writer
        then fail with `LedgerFenced`, and every acknowledged entry is found.  A closed ledger never
        changes.
        """

    @abstractmethod
    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        """Open a ledger to read its confirmed entries, without disturbing a writer."""

    @abstractmethod
    async def delete(self, ledger_id: LedgerId) -> None:
        """Remove a ledger and give its space back.  A ledger that does not exist is no error."""

    @abstractmethod
    async def list_ledgers(self) -> list[LedgerId]:
        """Ids of all ledgers, ascending."""

    @abstractmethod
    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        """Describe a ledger without opening it.  Raises `NoSuchLedger`."""

    def require_whole(self, stream: str, ledger_ids: Iterable[int]) -> None:  # noqa: B027
        """Raise `LedgersDamaged` if a ledger of `stream` lost entries and that is to be refused.

        Stores that do not keep track of damage never raise.
        """

    @property
    def keeps_everything(self) -> bool:
        """Whether no ledger may be deleted only because no record names it: data was lost."""
        return False

    def missing_entries(self, ledger_id: int) -> Sequence[EntryRange]:
        """Ranges of entries that are lost, and that readers are to step over, in order."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Make all queued entries durable and release the files."""
