"""What can go wrong with copies of ledgers.  All are `LedgerError`: PersistenceError to clients."""

from storage.ledger.store import LedgerError


class OffloadFailed(LedgerError):
    """A copy could not be made, read or deleted now: the reason says what to mend."""


class OffloadedDataLost(LedgerError):
    """An object that the record of a stream names is not there."""


class OffloadedDataCorrupt(LedgerError):
    """An object is there, and does not hold what was written."""
