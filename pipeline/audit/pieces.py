"""Pieces of messages, kept until the last one of their message has come.

Pure.  Rules:

- Pieces come in the order of the segment.  One that was sent again is left out, and a message whose
  first piece comes again begins anew.
- Kept are at most `PIECES_KEPT` pieces, and at most `PIECE_BYTES_KEPT` bytes of them.  Beyond
  either the messages that began first are given up, whichever they are.
- What is not whole when its last piece comes is told with the pieces that there are: none, if its
  first one was before all that was taken, or if it was given up.
"""

from collections.abc import Sequence
from typing import Final

from magnetar.reads import Piece

__all__ = ["PIECES_KEPT", "PIECE_BYTES_KEPT", "OpenMessages"]

PIECES_KEPT: Final = 4096
"""Pieces of all messages that are not whole yet."""
PIECE_BYTES_KEPT: Final = 64 * 1024 * 1024
"""Their bytes, with what their entries say of themselves: as many as a range of an audit has."""


class OpenMessages:
    """See the module's rules."""

    def __init__(self) -> None:
        self.pieces = 0
        """That are kept."""
        self.bytes = 0
        """Of those."""
        self._by_uuid: dict[str, list[Piece]] = {}

    def take(self, piece: Piece) -> Sequence[Piece] | None:
        """One more.  None: it is not the last one; else all that there are of its message."""
        if piece.number == 0:
            self._give_up(piece.uuid)
            self._by_uuid[piece.uuid] = []
        known = self._by_uuid.get(piece.uuid)
        if known is not None and piece.number == len(known):
            known.append(piece)
            self.pieces += 1
            self.bytes += _size(piece)
        if piece.number == piece.pieces - 1:
            return self._give_up(piece.uuid)
        while self.pieces > PIECES_KEPT or self.bytes > PIECE_BYTES_KEPT:
            self._give_up(next(iter(self._by_uuid)))
        return None

    def _give_up(self, uuid: str) -> Sequence[Piece]:
        """What there was of a message."""
        pieces = self._by_uuid.pop(uuid, [])
        self.pieces -= len(pieces)
        self.bytes -= sum(map(_size, pieces))
        return pieces


def _size(piece: Piece) -> int:
    return len(piece.data) + piece.metadata.ByteSize()
