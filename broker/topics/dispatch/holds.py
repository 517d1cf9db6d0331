"""Whether an Exclusive or Failover consumer may be sent what lies behind held messages.

Rules (A8, A9):

- Behind a hold of another consumer's transaction nothing is sent until that has ended.
- A hold of the consumer's own is passed over when its header, read after the last rewind, said
  OPEN.  What the header decides is carried out first: a release brings messages back that must not
  come after later ones, for a cumulative acknowledgement of these would count for those too.
- One read is under way at a time; one that a rewind has made useless is followed by another.
"""

from collections.abc import Callable, Collection
from functools import partial

import structlog

from broker.topics.consumer import Consumer
from broker.topics.dispatch.source import HoldingTransactions
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.txn_id import TxnId

log = structlog.get_logger(__name__)


class Holds:
    """How far an Exclusive or Failover consumer may read while messages are held (A8, A9).

    `wake` is called when a read has ended and asking makes sense.
    """

    def __init__(self, transactional: HoldingTransactions, wake: Callable[[], None]) -> None:
        self._transactional = transactional
        self._wake = wake
        self._tasks = BackgroundTasks(log)
        self._open: set[TxnId] = set()
        """Whose headers were read since the last rewind."""
        self._rewinds = 0
        self._reading = False

    def rewound(self) -> None:
        """Messages are sent again from now on: what was read before does not count."""
        self._open.clear()
        self._rewinds += 1

    def may_pass(self, txns: Collection[TxnId], consumer: Consumer) -> bool:
        """Whether what these transactions hold may be passed over now.

        If a header has to be read first, `wake` is called after the read.
        """
        if self._transactional.keeps_from(consumer, txns):
            return False
        if self._open.issuperset(txns):
            return True
        if not self._reading:
            self._reading = True
            # All that it has open, for it will meet them all.
            unread = {*txns, *self._transactional.open_of(consumer)} - self._open
            read = partial(self._read, unread, self._rewinds)
            self._tasks.see_through("transaction_holds", read)
        return False

    def close(self) -> None:
        """Read no more; `wake` is not called again."""
        self._tasks.cancel()

    async def _read(self, txns: Collection[TxnId], rewinds: int) -> None:
        still_open = await self._transactional.pending.learn_ends(txns)
        self._reading = False
        if rewinds == self._rewinds:
            self._open |= still_open
        self._wake()
