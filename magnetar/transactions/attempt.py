"""`Attempt`: one try of one part of a batch; its group decides whether it counts.

Rules: as of `attached.py`.  When it is settled it may be named among the winners of its group; what
was not settled must not be.  Its group has a deadline, which others may extend.
"""

from typing import TYPE_CHECKING

from magnetar.context import ClientContext
from magnetar.transactions.attached import AttachedTransaction
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.txn_id import TxnId

if TYPE_CHECKING:
    from magnetar.transactions.keys import TransactionKey

__all__ = ["Attempt"]


class Attempt(AttachedTransaction):
    """See the module's rules.  Made by `TransactionKey.begin_attempt`; `async with` closes it."""

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        key: "TransactionKey",
        id: TxnId,
    ) -> None:
        super().__init__(context, coordinators, id, key)

    @property
    def group(self) -> TxnId:
        """What the broker calls its group."""
        return self.id.group

    def describe(self) -> str:
        """What it is, as the beginning of a sentence."""
        return f"Attempt {self.id}"
