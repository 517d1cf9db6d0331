"""Pieces (chunks) of messages, buffered until the last piece of their message arrives.  Pure."""

from collections.abc import Sequence
from typing import Final

from magnetar.reads import Piece

__all__ = ["PIECES_KEPT", "PIECE_BYTES_KEPT", "OpenMessages"]

PIECES_KEPT: Final = 4096
"""The most buffered pieces."""
PIECE_BYTES_KEPT: Final = 64 * 1024 * 1024
"""The most bytes of buffered pieces and their metadata: as many as a range of an audit has."""


class OpenMessages:
    """The messages of one segment whose last piece has not come yet.

    It buffers at most `PIECES_KEPT` pieces and `PIECE_BYTES_KEPT` bytes.  Beyond either it drops
    the messages that began first.
    """

    def __init__(self) -> None:
        self.pieces = 0
        """Number of buffered pieces."""
        self.bytes = 0
        """Bytes of the buffered pieces, metadata included."""
        self._by_uuid: dict[str, list[Piece]] = {}

    def take(self, piece: Piece) -> Sequence[Piece] | None:
        """Take the next piece of the segment; None if it is not the last one of its message.

        After the last piece it returns the pieces of the message: fewer than all, or none, if the
        first one was not taken or the message was dropped.
        """
        # A first piece that comes again begins its message anew.
        if piece.number == 0:
            self._give_up(piece.uuid)
            self._by_uuid[piece.uuid] = []
        known = self._by_uuid.get(piece.uuid)
        # A piece that was sent again is left out.
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
        """Remove a message; its pieces."""
        pieces = self._by_uuid.pop(uuid, [])
        self.pieces -= len(pieces)
        self.bytes -= sum(map(_size, pieces))
        return pieces


def _size(piece: Piece) -> int:
    return len(piece.data) + piece.metadata.ByteSize()
