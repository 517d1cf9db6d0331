"""The id of a transaction, as brokers and people write it: `<most>_<least>`."""

from typing import NamedTuple

__all__ = ["TxnId"]


class TxnId(NamedTuple):
    """`most` is its coordinator, `least` its number there."""

    most: int
    least: int

    def __str__(self) -> str:
        return f"{self.most}_{self.least}"
