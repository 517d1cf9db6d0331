"""The id of a transaction, as brokers and people write it: `<most>_<least>`.

Rule: the id of an attempt names its group: its index stands before the group's number, in the bits
from ATTEMPT_SHIFT on.  Groups, and transactions that are none, have the index 0.
"""

from typing import Final, NamedTuple

__all__ = ["TxnId"]

ATTEMPT_SHIFT: Final = 44
_NUMBER: Final = (1 << ATTEMPT_SHIFT) - 1


class TxnId(NamedTuple):
    """`most` is its coordinator, `least` its number there."""

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}_{self.least}"

    @property
    def group(self) -> "TxnId":
        """The group of an attempt; of anything else itself."""
        return TxnId(self.most, self.least & _NUMBER)

    @property
    def attempt_index(self) -> int:
        """Which attempt of its group it is, from 1 on; 0: it is none."""
        return self.least >> ATTEMPT_SHIFT

    def attempt_of(self, index: int) -> "TxnId":
        """An attempt of this group, by its index."""
        return TxnId(self.most, index << ATTEMPT_SHIFT | self.group.least)

    @classmethod
    def parse(cls, text: str) -> "TxnId":
        """The id that is written so.  Raises `ValueError`."""
        most, _, least = text.partition("_")
        return cls(int(most), int(least))
