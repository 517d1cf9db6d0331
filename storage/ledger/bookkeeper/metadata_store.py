"""The interface to ledger records and the list of bookies, which are in Oxia or ZooKeeper."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from magnetar.protocol.ids import LedgerId
from magnetar.protocol.server_error import InternalError, ServerError
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata


class LedgerMetadataConflict(InternalError):
    """The record is not at the version that was read, or exists already: read it again."""

    code: ClassVar[ServerError] = ServerError.PERSISTENCE_ERROR


@dataclass(frozen=True, slots=True)
class VersionedMetadata:
    """A record, and the version that a change of it must name.  Versions are opaque."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class BookieAddress:
    """The address on which a bookie listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Bookies:
    """The registered bookies.  `racks` names those whose rack is known."""

    writable: Mapping[BookieId, BookieAddress] = field(default_factory=dict)
    read_only: Mapping[BookieId, BookieAddress] = field(default_factory=dict)
    racks: Mapping[BookieId, str] = field(default_factory=dict)


class LedgerMetadataStore(ABC):
    """Interface: ledger records and the list of bookies, on Oxia or ZooKeeper.

    Records and their paths, parents included, are those of Pulsar's and BookKeeper's own drivers,
    so that bookies, their garbage collection, auto-recovery and shells can read every ledger.  If
    the answer to a write is lost, the driver reads the record: the write took effect if the record
    is what was written, else it is a conflict.  Every method raises `LedgerError` on a failure.
    """

    @abstractmethod
    async def start(self) -> None:
        """Connect, read the list of bookies, and follow its changes.

        Raises `UnreadableRecord` for a layout of ledgers that it does not know.
        """

    @abstractmethod
    async def next_ledger_id(self) -> LedgerId:
        """An id that no ledger of the cluster ever had."""

    @abstractmethod
    async def create(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> VersionedMetadata:
        """Store a new record, parents first.  Raises `LedgerMetadataConflict` if there is one."""

    @abstractmethod
    async def read(self, ledger_id: LedgerId) -> VersionedMetadata:
        """The record.  Raises `NoSuchLedger`."""

    @abstractmethod
    async def write(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, *, expect: int
    ) -> VersionedMetadata:
        """Replace the record of version `expect`.

        Raises `LedgerMetadataConflict`, `NoSuchLedger`.
        """

    @abstractmethod
    async def delete(self, ledger_id: LedgerId) -> None:
        """Remove the record, whatever its version; no error if there is none."""

    @abstractmethod
    async def list_ledgers(self) -> list[LedgerId]:
        """Ids of all ledgers, ascending."""

    @property
    @abstractmethod
    def bookies(self) -> Bookies:
        """The registered bookies, as last listed: the list may be behind."""

    @abstractmethod
    async def close(self) -> None:
        """Release what `start` opened."""
