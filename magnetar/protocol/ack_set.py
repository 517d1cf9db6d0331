"""Ack sets: the messages of a batch that are not acknowledged yet.

On the wire and in cursor records an ack set is the words of a `java.util.BitSet`: signed 64-bit
numbers, lowest bits first, without trailing zero words; a set bit is a message that is *not*
acknowledged.  In memory it is one int with the same bits: `&` combines two, and 0 means that the
whole entry is acknowledged.
"""

from collections.abc import Sequence
from struct import pack, unpack
from typing import Final

from magnetar.protocol.frame_error import MalformedBatch

MAX_BATCH_SIZE: Final = 2**20
"""The largest number of messages in a batch; 5 MiB hold fewer, each with its metadata."""


def pending_all(batch_size: int) -> int:
    """The bits of a batch of which no message is acknowledged.

    Raises `MalformedBatch` for a size that no batch has.
    """
    # The size comes from a peer, and must not make a number of any length.
    if not 0 < batch_size <= MAX_BATCH_SIZE:
        raise MalformedBatch(
            f"A batch of {batch_size} messages is spoken of; send batches of 1 to {MAX_BATCH_SIZE}."
        )
    return (1 << batch_size) - 1


def from_words(words: Sequence[int], batch_size: int) -> int:
    """The bits in `words`, without those beyond the batch."""
    every = pending_all(batch_size)
    used = words[: (batch_size + 63) // 64]
    return int.from_bytes(pack(f"<{len(used)}q", *used), "little") & every


def to_words(pending: int) -> list[int]:
    """The bits as words; an empty list for 0."""
    count = (pending.bit_length() + 63) // 64
    return list(unpack(f"<{count}q", pending.to_bytes(count * 8, "little")))


def is_pending(pending: int, batch_index: int) -> bool:
    """Whether the message at `batch_index` (from 0) is not acknowledged."""
    return batch_index >= 0 and bool(pending >> batch_index & 1)
