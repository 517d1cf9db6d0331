"""`IdWriter`: the bytes of many message ids, faster than `MessageId.to_bytes`.  Pure."""

from collections.abc import Sequence
from struct import Struct
from typing import Final

from magnetar.message_id import EntryId, MessageId
from magnetar.protocol.hot_frames import varint

__all__ = ["IdWriter"]

_HEAD: Final = Struct(">qi")
_INDEX: Final = b"\x20"
"""The tag of MessageIdData.batch_index."""
_SIZE: Final = b"\x30"
"""The tag of MessageIdData.batch_size."""
_REST: Final = MessageId(EntryId(0, 0), 0).to_bytes()[_HEAD.size + len(EntryId(0, 0).to_bytes()) :]
"""The bytes after the id of the entry: no position vectors, no topic."""
_TWO_BYTES: Final = 1 << 7
_THREE_BYTES: Final = 1 << 14


class IdWriter:
    """Writes the ids of messages of one segment.

    The ids of a batch differ only in the index and in the length before it, so the rest is written
    once.
    """

    __slots__ = ("_segment_id", "_tails")

    def __init__(self, segment_id: int) -> None:
        self._segment_id = segment_id
        self._tails: dict[int, list[bytes]] = {}
        """The bytes from the index on, for each index, by the size of the batch."""

    def of_batch(self, key: tuple[int, int], size: int, indexes: Sequence[int]) -> list[bytes]:
        """The ids of messages of a batch of that size, in the entry `key`."""
        if size > _THREE_BYTES:  # No client writes this: an index may need three bytes then.
            return [
                MessageId(EntryId(*key, each, size), self._segment_id).to_bytes()
                for each in indexes
            ]
        tails = self._tails.get(size)
        if tails is None:
            end = _SIZE + varint(size) + _REST
            tails = self._tails[size] = [varint(each) + end for each in range(size)]
        entry = b"\x08%b\x10%b%b" % (varint(key[0]), varint(key[1]), _INDEX)
        length = len(entry) + 1 + len(_SIZE + varint(size))
        short = _HEAD.pack(self._segment_id, length) + entry
        long = _HEAD.pack(self._segment_id, length + 1) + entry
        return [(short if each < _TWO_BYTES else long) + tails[each] for each in indexes]

    def of_single(self, key: tuple[int, int], first_piece: tuple[int, int] | None) -> bytes:
        """The id of a message that is alone in its entry."""
        return MessageId(EntryId(*key, first_chunk=first_piece), self._segment_id).to_bytes()
