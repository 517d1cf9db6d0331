"""An entry as it is stored, whoever it was read from.  Pure.

Pure.  The bytes of an entry are, as brokers store and send them (integers big-endian):

    [u16 0x0e02, u32 size, BrokerEntryMetadata,]      only where brokers are set to keep that
    u16 0x0e01, u32 crc32c,                           of all that follows
    u32 metadata size, MessageMetadata, payload       one message, a batch, or a piece of a message
"""

import enum
from typing import NamedTuple

from magnetar.protocol.ids import Position

__all__ = ["StoredEntry", "Visibility"]


class Visibility(enum.IntEnum):
    """Whether consumers get what is in an entry (numbers are the wire's)."""

    READABLE = 0
    ABORTED = 1
    """Its transaction was aborted."""
    OPEN = 2
    """It is beyond the horizon: an open transaction is before it, or is its own."""
    MARKER = 3
    """Brokers wrote it for brokers."""


class StoredEntry(NamedTuple):
    """One entry; `data` as the module says."""

    ledger_id: int
    entry_id: int
    data: bytes
    visibility: Visibility = Visibility.READABLE

    @property
    def position(self) -> Position:
        """Where it is."""
        return Position(self.ledger_id, self.entry_id)

    @property
    def next_position(self) -> Position:
        """From where reading goes on behind it."""
        return Position(self.ledger_id, self.entry_id + 1)
