"""The id of a transaction: the coordinator it belongs to, and its number there.

Rule: in paths and for people it is written `<most>_<least>`, in decimal (PIP-471).
"""

import re
from typing import NamedTuple, NewType

CoordinatorId = NewType("CoordinatorId", int)

_TEXT = re.compile(r"([0-9]{1,20})_([0-9]{1,20})")


class TxnId(NamedTuple):
    """`most` is the coordinator's id, `least` the number of the transaction there."""

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}_{self.least}"

    @property
    def coordinator(self) -> CoordinatorId:
        """Who gave it out."""
        return CoordinatorId(self.most)


def parse_txn_id(text: str) -> TxnId:
    """The id written as `text`.  Raises `ValueError` for anything else."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a transaction id: write it as <most>_<least>, as 1_42.")
    return TxnId(int(found.group(1)), int(found.group(2)))
