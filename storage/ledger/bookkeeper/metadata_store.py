"""Where ledger records and the list of bookies live: the door to Oxia or ZooKeeper.

Rules that both drivers keep:

- Records and their places are those of Pulsar's and BookKeeper's own drivers, parents included, so
  that bookies, their garbage collection, auto-recovery and shells understand every ledger.
- A write names the version it read.  After an answer that got lost the driver reads the record:
  if it is what was written, the write took effect; else it is a conflict.
- An id is given once for the life of the cluster.
- A list of bookies is the newest known one: it may be behind, so an error of a connection weighs
  more than a registration.
"""

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
    """A record with the version that a change of it must name.  Versions are opaque."""

    metadata: LedgerMetadata
    version: int


@dataclass(frozen=True, slots=True)
class BookieAddress:
    """Where a bookie listens."""

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

    Every method raises `LedgerError` when the store cannot do it.
    """

    @abstractmethod
    async def start(self) -> None:
        """Connect, read the list of bookies, and follow it.  Refuses a layout it cannot read."""

    @abstractmethod
    async def next_ledger_id(self) -> LedgerId:
        """An id that nobody got before."""

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
        """Replace the record.  Raises `LedgerMetadataConflict`, `NoSuchLedger`."""

    @abstractmethod
    async def delete(self, ledger_id: LedgerId) -> None:
        """Remove the record, whatever its version.  What is gone already is fine."""

    @abstractmethod
    async def list_ledgers(self) -> list[LedgerId]:
        """Ids of all ledgers, ascending."""

    @property
    @abstractmethod
    def bookies(self) -> Bookies:
        """The registered bookies, as far as it is known now."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything that `start` took."""
