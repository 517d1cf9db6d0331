"""Reads of segments without a subscription: stored entries, and their messages as columns.

For programs that make tables of the entries that `Client.read_range` returns.
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
