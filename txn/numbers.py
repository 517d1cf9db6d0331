"""The numbers that a coordinator gives to its transactions, from blocks reserved ahead of time.

Rules:

- A number is used only after the block it is in was reserved by a conditional write (T1): nobody
  else ever gets it, whatever becomes of this process.  Numbers that are not used are lost.
- The next block is reserved while the last quarter of the present one is being used, so that
  taking a number does not wait for the store.
- Numbers stay below 2^NUMBER_BITS, as what is above them in an id is of attempts (G1).
"""

import asyncio

from config.bounds import TXN_ID_BLOCK
from magnetar.protocol.txn_id import NUMBER_BITS, CoordinatorId
from txn.store import TransactionStore


class NumberBlocks:
    """The blocks of transaction numbers that one coordinator has reserved."""

    def __init__(self, store: TransactionStore, coordinator: CoordinatorId) -> None:
        self._store = store
        self._coordinator = coordinator
        self._next = 0
        self._end = 0
        self._reserving: asyncio.Task[range] | None = None

    @property
    def last(self) -> int:
        """The last number taken here; -1 before the first one."""
        return self._next - 1

    def prepare(self) -> None:
        """Reserve the next block, unless that is under way."""
        reserving = self._reserving
        if reserving is None or (reserving.done() and reserving.exception() is not None):
            self._reserving = asyncio.get_running_loop().create_task(self.reserve())

    async def take(self) -> int:
        """A number that was never given out.  Raises `MetadataError` when none can be reserved."""
        while self._next >= self._end:
            self.prepare()
            await self._use_next_block()
        number = self._next
        assert number >> NUMBER_BITS == 0, f"coordinator {self._coordinator} has no numbers left"
        self._next += 1
        if self._end - self._next <= TXN_ID_BLOCK // 4:
            self.prepare()
        return number

    async def reserve(self) -> range:
        """T1: a block that the stored counter has been moved past, by a conditional write."""
        return await self._store.reserve_numbers(self._coordinator, TXN_ID_BLOCK)

    async def close(self) -> None:
        """Return when no reservation is under way; whoever waits for one still gets it."""
        reserving = self._reserving  # whoever takes the block lets go of it meanwhile
        if reserving is not None:
            await asyncio.wait({reserving})
            reserving.exception()

    async def _use_next_block(self) -> None:
        reserving = self._reserving
        if reserving is None:
            return
        block = await asyncio.shield(reserving)
        if self._reserving is reserving:
            # The first of those who waited takes it; the others find numbers in it.
            self._reserving = None
            self._next, self._end = block.start, block.stop
