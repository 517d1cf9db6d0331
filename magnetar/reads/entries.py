"""`StoredEntry`: an entry as brokers store and send it.  Pure.

The bytes of an entry are (integers big-endian):

    [u16 0x0e02, u32 size, BrokerEntryMetadata,]      only where brokers are set to keep that
    u16 0x0e01, u32 crc32c,                           of all that follows
    u32 metadata size, MessageMetadata, payload       one message, a batch, or a chunk of a message
"""

import enum
from typing import NamedTuple

from magnetar.protocol.ids import Position

__all__ = ["StoredEntry", "Visibility"]


class Visibility(enum.IntEnum):
    """Whether consumers get the messages of an entry.  The numbers are those on the wire."""

    READABLE = 0
    ABORTED = 1
    """The transaction of the entry was aborted."""
    OPEN = 2
    """It is beyond the max read position, or its own transaction is open."""
    MARKER = 3
    """A broker wrote it for brokers."""


class StoredEntry(NamedTuple):
    """One entry; for the bytes in `data` see the module."""

    ledger_id: int
    entry_id: int
    data: bytes
    visibility: Visibility = Visibility.READABLE

    @property
    def position(self) -> Position:
        """The position of the entry."""
        return Position(self.ledger_id, self.entry_id)

    @property
    def next_position(self) -> Position:
        """The position after the entry, from which reading goes on."""
        return Position(self.ledger_id, self.entry_id + 1)
