"""The ids of the wire and of storage, as types of their own.

`Position` orders entries of one managed ledger: ledger first, entry second.  `EARLIEST` sorts
before every entry and `LATEST` after, as the client's own constants do.

The fields of the wire that carry ids are unsigned; a peer's -1 arrives there as 2^64 - 1.
`to_wire` and `from_wire` go between that and the signed numbers used everywhere else.
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
    """Place of one entry in a managed ledger.  Entry -1 is "before the first entry"."""

    ledger_id: int
    entry_id: int

    @property
    def text(self) -> str:
        """`ledger:entry`, as people and REST are told it."""
        return f"{self.ledger_id}:{self.entry_id}"


EARLIEST = Position(-1, -1)
LATEST = Position(LONG_MAX, LONG_MAX)

UNSOLICITED_REQUEST_ID = 2**64 - 1
"""Request id -1 in its unsigned field: the broker closes something without having been asked."""


def to_wire(value: int) -> int:
    """A signed 64-bit number as an unsigned field carries it."""
    return value & 0xFFFF_FFFF_FFFF_FFFF


def from_wire(value: int) -> int:
    """The signed 64-bit number that an unsigned field carried."""
    return value - 2**64 if value > LONG_MAX else value
