"""Transactions of one process: the store, the decisions and what every part is given.

Rules:

- What topics and subscriptions keep of transactions is always there: entries of open and aborted
  transactions stay hidden when transactions are switched off.
- Switched off means that no client may begin or use one; those that are open end at their
  deadlines and are collected.
"""

import asyncio
from typing import TYPE_CHECKING

from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.parts import TransactionParts
from txn.store import TransactionStore

if TYPE_CHECKING:
    from broker.service import Broker


class Transactions:
    """See the module's rules.  Made before topics are, stopped after them."""

    def __init__(self, broker: "Broker") -> None:
        self.enabled = broker.settings.transactions_enabled
        self.counters = TransactionCounters()
        self.store = TransactionStore(
            broker.metadata, self.counters, elapsed_s=asyncio.get_running_loop().time
        )
        self.decisions = Decisions(self.store)
        self.parts = TransactionParts(
            store=self.store,
            decisions=self.decisions,
            counters=self.counters,
            clock=broker.clock,
            broker_id=broker.broker_id,
            eager_epochs=False,
        )

    async def start(self) -> None:
        """Begin to tell participants what ended."""
        self.decisions.start()

    async def stop(self) -> None:
        """Tell nothing more.  May be called again."""
        await self.decisions.stop()
