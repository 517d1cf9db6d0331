"""Delivery of Exclusive and Failover subscriptions behind messages that transactions hold."""

from collections.abc import Callable, Collection
from functools import partial

import structlog

from broker.topics.consumer import Consumer
from broker.topics.dispatch.source import HoldingTransactions
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.txn_id import TxnId
from storage.callbacks import ignore

log = structlog.get_logger(__name__)


class Holds:
    """Decides whether an Exclusive or Failover consumer gets messages behind held ones (A8, A9).

    Behind a hold of another consumer's transaction nothing is sent until that has ended.  A hold of
    the consumer's own is passed over if its header, read after the last rewind, is OPEN.  `wake` is
    called when the read of a header has ended, so that another call makes sense.
    """

    def __init__(self, transactional: HoldingTransactions, wake: Callable[[], None]) -> None:
        self._transactional = transactional
        self._wake = wake
        self._tasks = BackgroundTasks(log)
        self._open: set[TxnId] = set()
        """Transactions whose headers were OPEN when they were read after the last rewind."""
        self._rewinds = 0
        self._reading = False

    def rewound(self) -> None:
        """Forget the headers that were read: messages are sent again from now on."""
        self._open.clear()
        self._rewinds += 1

    def may_pass(self, txns: Collection[TxnId], consumer: Consumer) -> bool:
        """Whether messages that these transactions hold may be passed over now (A8).

        If a header has to be read first, `wake` is called after the read.
        """
        if self._transactional.must_wait_for(consumer, txns):
            return False
        # A8: an end that the header decides is carried out first.  A release redelivers messages,
        # and these must not come after later ones: a cumulative acknowledgement of the later ones
        # would count for them too.
        if self._open.issuperset(txns):
            return True
        if not self._reading:
            self._reading = True
            # All open transactions of the consumer are read, because it will meet them all.
            unread = {*txns, *self._transactional.open_of(consumer)} - self._open
            read = partial(self._read, unread, self._rewinds)
            self._tasks.see_through("transaction_holds", read)
        return False

    def close(self) -> None:
        """Read no more; `wake` is not called again."""
        self._tasks.cancel()
        self._wake = ignore

    async def _read(self, txns: Collection[TxnId], rewinds: int) -> None:
        still_open = await self._transactional.pending.learn_ends(txns)
        self._reading = False
        # A read that began before the last rewind is useless: another one follows it.
        if rewinds == self._rewinds:
            self._open |= still_open
        self._wake()
