"""Reading segments without a subscription: entries as stored, and their messages as columns.

What `Client.read_range` gives and how it is taken apart, for programs that make tables of it.
"""

from magnetar.reads.entries import StoredEntry, Visibility
from magnetar.reads.messages import (
    EntryRun,
    MessageColumns,
    Piece,
    message_ids,
    metadata_of,
    take_apart,
    take_pieces,
)

__all__ = [
    "EntryRun",
    "MessageColumns",
    "Piece",
    "StoredEntry",
    "Visibility",
    "message_ids",
    "metadata_of",
    "take_apart",
    "take_pieces",
]
