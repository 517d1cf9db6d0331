"""`Attempt`: one try of a part of a batch, which its group commits or aborts."""

from magnetar.context import ClientContext
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.attached_transaction import AttachedTransaction
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.key_holder import KeyHolder

__all__ = ["Attempt"]


class Attempt(AttachedTransaction):
    """One attempt of a group: it takes effect if the group commits it as a winner.

    Made by `TransactionKey.begin_attempt`; `async with` closes it.  It can be a winner only after
    `settled` has returned.  The deadline is that of its group.
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
        """The id of its group."""
        return self.id.group

    def describe(self) -> str:
        """The name used in errors, as the beginning of a sentence."""
        return f"Attempt {self.id}"
