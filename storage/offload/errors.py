"""Errors of copies of ledgers.  All are `LedgerError`: PersistenceError to clients."""

from storage.ledger.store import LedgerError


class OffloadFailed(LedgerError):
    """A copy could not be made, read or deleted now; the message tells what to repair."""


class OffloadedDataLost(LedgerError):
    """An object that the record of a stream names does not exist."""


class OffloadedDataCorrupt(LedgerError):
    """The content of an object is not what was written."""
