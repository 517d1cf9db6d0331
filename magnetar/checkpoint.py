"""`Checkpoint`: the positions of a checkpoint consumer, and their bytes.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import ClassVar

from magnetar.errors import InvalidArgument
from magnetar.message_id import (
    EARLIEST_ENTRY,
    LATEST_ENTRY,
    EntryId,
    PositionReader,
    Positions,
    vector_to_bytes,
)

__all__ = ["Checkpoint", "CheckpointKind"]


class CheckpointKind(IntEnum):
    """The kind of a checkpoint.  The numbers are those in its bytes."""

    POSITIONS = 0
    EARLIEST = 1
    LATEST = 2


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Positions of segments, or `Checkpoint.EARLIEST`, or `Checkpoint.LATEST`.

    Only segments of which a message was handed out have a position; reading goes on after it.  Any
    other segment is read from its first message on.
    """

    kind: CheckpointKind = CheckpointKind.POSITIONS
    positions: Positions = field(default_factory=lambda: MappingProxyType({}))

    EARLIEST: ClassVar["Checkpoint"]
    LATEST: ClassVar["Checkpoint"]

    @classmethod
    def of(cls, positions: Mapping[int, EntryId]) -> "Checkpoint":
        """A checkpoint at these positions, which may change afterwards."""
        return cls(CheckpointKind.POSITIONS, MappingProxyType(dict(positions)))

    def after(self, segment_id: int) -> EntryId:
        """The id after which reading of a segment begins."""
        if self.kind is CheckpointKind.LATEST:
            return LATEST_ENTRY
        return self.positions.get(segment_id, EARLIEST_ENTRY)

    def to_bytes(self) -> bytes:
        """The bytes, as those of the Java client's `Checkpoint` (v5).

        One byte for the kind, then for positions their number, and the segment, length and id of
        each, big-endian.
        """
        head = bytes((self.kind,))
        if self.kind is not CheckpointKind.POSITIONS:
            return head
        return head + vector_to_bytes(self.positions)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Checkpoint":
        """The checkpoint with these bytes.  Raises `InvalidArgument`."""
        if not data or data[0] > max(CheckpointKind):
            raise InvalidArgument(
                f"Bytes that begin with {data[:1]!r} are no checkpoint; "
                "give the bytes unchanged as they were taken from one."
            )
        kind = CheckpointKind(data[0])
        reader = PositionReader(data[1:])
        if kind is not CheckpointKind.POSITIONS:
            reader.finish()
            return cls.EARLIEST if kind is CheckpointKind.EARLIEST else cls.LATEST
        positions = reader.positions()
        reader.finish()
        return cls.of(positions)


Checkpoint.EARLIEST = Checkpoint(CheckpointKind.EARLIEST)
Checkpoint.LATEST = Checkpoint(CheckpointKind.LATEST)
