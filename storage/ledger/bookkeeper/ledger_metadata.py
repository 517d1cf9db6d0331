"""What a cluster knows of a ledger, as BookKeeper's LedgerMetadataFormat says it.  Pure.

Rules:

- A record is a value: a change makes another one.  What a newer version wrote beside it is kept
  (`unknown`).
- Ensembles are in order of their first entry; the first one starts at 0, each has exactly
  `ensemble_size` different bookies.
- `last_entry_id` and `length` mean something only once the ledger is CLOSED; before they are -1
  and 0.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

BookieId = NewType("BookieId", str)
"""What a bookie calls itself: usually `host:port`, but any name will do."""


class LedgerState(enum.Enum):
    """As in the record."""

    OPEN = 1
    IN_RECOVERY = 2
    CLOSED = 3


class DigestType(enum.Enum):
    """What protects each entry, as in the record."""

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
    """One ledger's record.  `length` in bytes; `ctime_ms` is None where the writer left it out."""

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
    def last_ensemble(self) -> Ensemble:
        """Where new entries go."""
        return self.ensembles[-1]

    def ensemble_of(self, entry_id: int) -> Ensemble:
        """The bookies that hold an entry: the ensemble with the greatest first entry up to it."""
        for ensemble in reversed(self.ensembles):
            if ensemble.first_entry_id <= entry_id:
                return ensemble
        return self.ensembles[0]

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """Places in the entry's ensemble that hold a copy, in order of reading (striping)."""
        size = self.ensemble_size
        return tuple((entry_id + copy) % size for copy in range(self.write_quorum))
