"""The record of a ledger, with the fields of BookKeeper's LedgerMetadataFormat.  Pure."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from storage.ledger.store import record_text, text_of_map

BookieId = NewType("BookieId", str)
"""The id under which a bookie registers: usually `host:port`, but any name is allowed."""


class LedgerState(enum.Enum):
    """State of a ledger, with the numbers of the record."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(enum.Enum):
    """Kind of digest in each entry, with the numbers of the record."""

    CRC32 = 1
    MAC = 2
    CRC32C = 3
    DUMMY = 4


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The bookies that hold the entries from `first_entry_id` up to the next ensemble's first."""

    first_entry_id: int
    bookies: tuple[BookieId, ...]


@dataclass(frozen=True, slots=True)
class LedgerMetadata:
    """One ledger's record.

    Ensembles are in the order of their first entries; the first one starts at 0, and each has
    exactly `ensemble_size` different bookies.  `last_entry_id` and `length` (bytes) are -1 and 0
    until the ledger is CLOSED.  `ctime_ms` is None if the writer left it out.  `unknown` has fields
    of newer versions, which stay when the record is rewritten.
    """

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    ensembles: tuple[Ensemble, ...]
    digest_type: DigestType
    password: bytes = field(repr=False)
    state: LedgerState = LedgerState.OPEN
    last_entry_id: int = -1
    length: int = 0
    custom: Mapping[str, bytes] = field(default_factory=dict)
    ctime_ms: int | None = None
    creator_token: int | None = None
    unknown: bytes = b""

    @property
    def text(self) -> str:
        """The record as BookKeeper's tools show it, without its password."""
        ended: Mapping[str, object] = {}
        if self.state is LedgerState.CLOSED:
            ended = {"length": self.length, "lastEntryId": self.last_entry_id}
        bookies = {each.first_entry_id: f"[{', '.join(each.bookies)}]" for each in self.ensembles}
        members = {
            "ensembleSize": self.ensemble_size,
            "writeQuorumSize": self.write_quorum,
            "ackQuorumSize": self.ack_quorum,
            "state": self.state.name,
            **ended,
            "digestType": self.digest_type.name,
            "password": "OMITTED",
            "ensembles": text_of_map(bookies),
        }
        return record_text(members, self.custom)

    @property
    def last_ensemble(self) -> Ensemble:
        """The ensemble of new entries."""
        return self.ensembles[-1]

    def ensemble_of(self, entry_id: int) -> Ensemble:
        """The ensemble of an entry: the last one whose first entry is not after it."""
        for ensemble in reversed(self.ensembles):
            if ensemble.first_entry_id <= entry_id:
                return ensemble
        return self.ensembles[0]

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """Indexes in the entry's ensemble that hold a copy, in the order of reading (striping)."""
        size = self.ensemble_size
        return tuple((entry_id + copy) % size for copy in range(self.write_quorum))
