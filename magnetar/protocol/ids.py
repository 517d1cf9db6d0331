"""Types of the ids on the wire and in storage.

Fields for ids are unsigned on the wire, so that -1 is 2^64 - 1 there.  `to_wire` and `from_wire`
convert to and from the signed numbers used elsewhere.
"""

from typing import NamedTuple, NewType

LedgerId = NewType("LedgerId", int)
EntryId = NewType("EntryId", int)
SegmentId = NewType("SegmentId", int)
ProducerId = NewType("ProducerId", int)
ConsumerId = NewType("ConsumerId", int)
RequestId = NewType("RequestId", int)
LayoutEpoch = NewType("LayoutEpoch", int)

LONG_MAX = 2**63 - 1


class Position(NamedTuple):
    """The position of one entry in a managed ledger, ordered by ledger and entry.

    Entry -1 is before the first entry.  `EARLIEST` sorts before every entry, `LATEST` after.
    """

    ledger_id: int
    entry_id: int

    @property
    def text(self) -> str:
        """The text `ledger:entry`, for people and REST."""
        return f"{self.ledger_id}:{self.entry_id}"

    @property
    def following(self) -> "Position":
        """The position right behind the entry, whether one is there or not."""
        return Position(self.ledger_id, self.entry_id + 1)


EARLIEST = Position(-1, -1)
LATEST = Position(LONG_MAX, LONG_MAX)

UNSOLICITED_REQUEST_ID = 2**64 - 1
"""The request id -1 in its unsigned field: the broker closes a producer or consumer unasked."""


def to_wire(value: int) -> int:
    """A signed 64-bit number in the form of an unsigned field."""
    return value & 0xFFFF_FFFF_FFFF_FFFF


def from_wire(value: int) -> int:
    """The signed 64-bit number in an unsigned field."""
    return value - 2**64 if value > LONG_MAX else value
