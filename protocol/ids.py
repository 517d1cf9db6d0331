"""The ids of the wire and of storage, as types of their own.

`Position` orders entries of one managed ledger: ledger first, entry second.  `EARLIEST` sorts
before every entry and `LATEST` after, as the client's own constants do.
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


EARLIEST = Position(-1, -1)
LATEST = Position(LONG_MAX, LONG_MAX)
