"""`TxnId`: the id of a transaction, with its coordinator and its number there.  Pure."""

import re
from typing import Final, NamedTuple, NewType

CoordinatorId = NewType("CoordinatorId", int)

NUMBER_BITS: Final = 44
LAST_ATTEMPT: Final = (1 << (63 - NUMBER_BITS)) - 1
"""The highest index of an attempt, so that ids stay below 2^63, positive in signed 64 bits."""

_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1

_TEXT = re.compile(r"([0-9]{1,20})_([0-9]{1,20})")


class TxnId(NamedTuple):
    """The id of a transaction: `most` is the coordinator's id, `least` the number there.

    The text of an id is `<most>_<least>`, in decimal (PIP-473).  `least` has the number in its
    lower NUMBER_BITS.  Above them is the index of an attempt in the group with this number, which
    is 0 for groups and plain transactions (G1).
    """

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}_{self.least}"

    @property
    def coordinator(self) -> CoordinatorId:
        """The coordinator that issued it."""
        return CoordinatorId(self.most)

    @property
    def attempt_index(self) -> int:
        """The index of an attempt in its group, from 1; 0 for groups and plain ones (G1)."""
        return self.least >> NUMBER_BITS

    @property
    def group(self) -> "TxnId":
        """The group of an attempt, else itself (G1)."""
        return self if self.least <= _NUMBER_MASK else TxnId(self.most, self.least & _NUMBER_MASK)

    @property
    def is_ever_given(self) -> bool:
        """Whether a transaction can have this id: a peer may send a number above all ids (G1)."""
        return self.attempt_index <= LAST_ATTEMPT

    def attempt_of(self, index: int) -> "TxnId":
        """The attempt with this index, from 1, of this group (G1)."""
        assert not self.attempt_index, f"{self} is an attempt itself"
        assert 1 <= index <= LAST_ATTEMPT, f"{index} is no index of an attempt"
        return TxnId(self.most, index << NUMBER_BITS | self.least)

    @classmethod
    def parse(cls, text: str) -> "TxnId":
        """Return the id written as `text`. Raises `ValueError` for anything else."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not a transaction id: write it as <most>_<least>, as 1_42."
            )
        return cls(int(found.group(1)), int(found.group(2)))
