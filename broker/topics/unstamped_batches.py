"""Batches without entry hashes: their messages may belong to several entry buckets (PIP-486).

Clients of 5.0.0-M1, and C++ clients, write them; later Java clients and this project's client stamp
every batch, and each of their batches is of one bucket.
"""

from typing import Final

from magnetar.protocol.frames import FrameError
from magnetar.protocol.message import parse_metadata

UNSTAMPED_PROPERTY: Final = "magnetar.unstamped-batches"
"""The property of a segment's ledger that notes such batches."""


def is_stamped(entry: bytes) -> bool | None:
    """Whether a batch has entry hashes; None if its metadata cannot be read."""
    try:
        return parse_metadata(entry).HasField("entry_hash_min")
    except FrameError:
        return None
