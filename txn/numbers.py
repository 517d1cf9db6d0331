"""The numbers of a coordinator's transactions, taken from blocks that are reserved in advance."""

import asyncio

from config.bounds import TXN_ID_BLOCK
from magnetar.protocol.txn_id import NUMBER_BITS, CoordinatorId
from txn.store import TransactionStore


class NumberBlocks:
    """The blocks of transaction numbers that one coordinator has reserved (T1).

    Numbers of a block that are not used are lost.
    """

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
        """Reserve the next block, unless one is being reserved."""
        reserving = self._reserving
        if reserving is None or (reserving.done() and reserving.exception() is not None):
            self._reserving = asyncio.get_running_loop().create_task(self.reserve())

    async def take(self) -> int:
        """A number that was never used.  Raises `MetadataError` when none can be reserved."""
        while self._next >= self._end:
            self.prepare()
            await self._use_next_block()
        number = self._next
        # G1: the higher bits of an id are the index of an attempt.
        assert number >> NUMBER_BITS == 0, f"coordinator {self._coordinator} has no numbers left"
        self._next += 1
        # Reserved early, so that taking a number seldom waits for the store.
        if self._end - self._next <= TXN_ID_BLOCK // 4:
            self.prepare()
        return number

    async def reserve(self) -> range:
        """Reserve a block of numbers (T1).  Raises `MetadataError`."""
        # T1: the stored counter is moved past the block before any number of it is used.
        return await self._store.reserve_numbers(self._coordinator, TXN_ID_BLOCK)

    async def close(self) -> None:
        """Return when no block is being reserved; waiting callers of `take` still get a number."""
        reserving = self._reserving  # kept here, as a caller of `take` may reset it meanwhile
        if reserving is not None:
            await asyncio.wait({reserving})
            reserving.exception()

    async def _use_next_block(self) -> None:
        reserving = self._reserving
        if reserving is None:
            return
        block = await asyncio.shield(reserving)
        if self._reserving is reserving:
            # The first caller that waited installs the block; the others find numbers in it.
            self._reserving = None
            self._next, self._end = block.start, block.stop
