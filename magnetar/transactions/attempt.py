"""`Attempt`: one try of one part of a batch; its group decides whether it counts.

Rules: as of `attached_transaction.py`.  When it is settled it may be named among the winners of its
group; what was not settled must not be.  Its group has a deadline, which others may extend.
"""

from magnetar.context import ClientContext
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.attached_transaction import AttachedTransaction
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.key_holder import KeyHolder

__all__ = ["Attempt"]


class Attempt(AttachedTransaction):
    """One attempt of a group: it takes effect if the group commits it as a winner.

    Made by `TransactionKey.begin_attempt`; `async with` closes it.
    """

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        key: KeyHolder,
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
