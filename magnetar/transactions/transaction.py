"""`Transaction`: sends and acknowledgements that all take effect, or none.

Rules:

- What is sent and acknowledged in it is told and counted as `work.py` says.
- `commit` waits for the outcome of everything in it (`track`).  If one failed the transaction is
  aborted, and `commit` raises why: what the broker says of transactions as it is, anything else as
  the cause of `TransactionFailed`.
- The deadline counts from before the broker heard of the transaction, so it is over here no later
  than there.  What is asked of the broker before is not given up for it.
- An end, once asked for, goes on until it is answered or the operation timeout, whoever stops
  waiting for it; asking for it again waits for the same.  Without an answer the state is FAILED.
- Leaving the block commits, or aborts on an error; a body that is cancelled is not kept waiting:
  the abort goes on behind it, and `close` waits for it, for a bounded time.
- Consumers that acknowledged in it follow it (`when_over`): what did not commit comes to them again
  when the broker has let go of it, not before.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Final

from magnetar.bounds import TXN_CLOSE_S
from magnetar.context import ClientContext, check_loop
from magnetar.errors import (
    AlreadyClosed,
    InvalidTransactionStatus,
    MagnetarError,
    TransactionConflict,
    TransactionFailed,
    TransactionKeyFenced,
    TransactionNotFound,
    TransactionTimedOut,
)
from magnetar.opening import ClosedAfterwards, completed, finished
from magnetar.protocol.txn_id import TxnId
from magnetar.settings import check_positive
from magnetar.transactions.coordinators import Coordinators, unknown_end
from magnetar.transactions.keys import TransactionKey
from magnetar.transactions.states import TransactionState, next_state
from magnetar.transactions.work import Work
from magnetar.wire.attachment import is_retriable

__all__ = ["Transaction", "TxnId"]

_S: Final = TransactionState
_TOLD_AS_IS: Final = (
    InvalidTransactionStatus,
    TransactionConflict,
    TransactionKeyFenced,
    TransactionNotFound,
    TransactionTimedOut,
)


class Transaction(Work, ClosedAfterwards):
    """A transaction: what is sent and acknowledged in it takes effect as one, or not at all."""

    def __init__(
        self,
        context: ClientContext,
        coordinators: Coordinators,
        timeout_s: float = 60.0,
        key: TransactionKey | None = None,
    ) -> None:
        """Raises `InvalidArgument`."""
        check_positive("timeout_s", timeout_s)
        super().__init__(context, coordinators, key)
        self.timeout_s: Final = timeout_s
        self._state = _S.NEW
        self._id: TxnId | None = None
        self._sealed = False
        self._error: MagnetarError | None = None
        """What its end raises."""
        self._deadline: asyncio.TimerHandle | None = None
        self._beginning: asyncio.Task[TxnId] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._over_there: bool | None = None
        """Whether it was committed, once it is over at the broker too."""
        self._followers: list[Callable[[bool], None]] = []
        self._asking: asyncio.Task[None] | None = None

    @property
    def id(self) -> TxnId:
        """What the broker calls it.  Raises `AlreadyClosed` unless it has begun."""
        if self._id is None:
            raise AlreadyClosed("The transaction has not begun; await it, or enter it.")
        return self._id

    @property
    def state(self) -> TransactionState:
        """Where it stands."""
        return self._state

    # Begin and end

    async def open(self) -> None:
        """Begin.  Raises as `Coordinators.begin`."""
        loop = self._context.loop
        began = loop.time()
        ttl_ms = math.ceil(self.timeout_s * 1000)
        self._beginning = loop.create_task(self._coordinators.begin(ttl_ms, self.key))
        self._began(await finished(self._beginning))
        self._deadline = loop.call_at(began + self.timeout_s, self._time_is_up)

    async def commit(self) -> None:
        """Make everything in it take effect.

        Raises `TransactionFailed`, `TransactionConflict`, `TransactionTimedOut`,
        `TransactionNotFound`, `InvalidTransactionStatus`, `ExpiredTransaction`,
        `TransactionKeyFenced`; it is aborted then, or will be by the broker.  `OperationTimedOut`:
        the broker has not said whether it committed.
        """
        check_loop(self._loop)
        if self._state is _S.OPEN:
            self._enter(_S.COMMITTING)
            self._end_by(self._commit())
        elif self._state in (_S.ABORTING, _S.ABORTED) and self._error is None:
            raise InvalidTransactionStatus(
                f"Transaction {self.id} was aborted; begin another one to commit."
            )
        await self._ended()

    async def abort(self) -> None:
        """Undo everything in it; nothing to do if it has been, or its time is up.

        Raises as `commit`, when it cannot be: also while it is committed.
        """
        check_loop(self._loop)
        if self._state is _S.OPEN:
            self._enter(_S.ABORTING)
            self._end_by(self._abort())
        elif self._state in (_S.COMMITTING, _S.COMMITTED):
            raise InvalidTransactionStatus(
                f"Transaction {self.id} is {self._state.value}; it cannot be aborted any more."
            )
        if self._ending is not None:
            await asyncio.wait((self._ending,))
        if self._state in (_S.NEW, _S.FAILED):
            raise self._over()

    async def close(self) -> None:
        """Abort it unless it has ended, and wait for its end; bounded in time."""
        await completed(self._close())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            if self._state is not _S.ABORTED or self._error is not None:
                await self.commit()
        elif not isinstance(error, Exception):
            self._abort_behind()
        else:
            try:
                await self._abort_after_error()
            except MagnetarError as failed:
                error.add_note(f"The transaction could not be aborted: {failed}")

    # What happens in it

    def when_over(self, told: Callable[[bool], None]) -> None:
        """`told(committed)` is called once, when it is over at the broker too.

        Where the broker has not said so, or the time is up, it is asked to abort it first: until
        then it keeps what was acknowledged in it.  The end of the client tells as well.
        """
        if self._over_there is not None:
            self._context.loop.call_soon(told, self._over_there)
            return
        self._followers.append(told)
        if self._state.is_final:
            self._follow_up()

    def _follow_up(self) -> None:
        """It has ended: tell those that follow it, now or when the broker knows."""
        if self._state in (_S.COMMITTED, _S.ABORTED):
            self._tell_over(self._state is _S.COMMITTED)
        elif self._followers and self._asking is None:
            self._asking = self._tasks.start(self._abort_for_sure())

    async def _abort_for_sure(self) -> None:
        committed = False
        backoff = self._context.backoff()
        try:
            while self._id is not None:
                try:
                    await self._coordinators.end(self._id, commit=False, key=self.key)
                except MagnetarError as error:
                    if is_retriable(error):
                        await asyncio.sleep(backoff.pause_s())
                        continue
                    committed = type(error) is InvalidTransactionStatus and self._state is _S.FAILED
                return
        finally:
            self._tell_over(committed)

    def _tell_over(self, committed: bool) -> None:
        self._over_there = committed
        followers, self._followers = self._followers, []
        for told in followers:
            told(committed)

    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        if self._state is _S.OPEN or (ending and self._state is _S.COMMITTING and not self._sealed):
            return None
        return self._over()

    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        return TransactionFailed(
            f"Transaction {self.id} can only abort, because of an earlier error "
            f"({failure}) Begin another one."
        )

    # The end

    def _end_by(self, work: Coroutine[None, None, None]) -> None:
        self._ending = self._context.loop.create_task(work)

    async def _ended(self) -> None:
        """Wait for the end that was asked for; raises what it raised."""
        if self._ending is not None:
            await asyncio.wait((self._ending,))
        if self._error is not None:
            raise type(self._error)(*self._error.args) from (self._error.__cause__ or self._error)
        if not self._state.is_final:
            raise self._over()

    async def _commit(self) -> None:
        while self._unsettled and self._failure is None and self._state is _S.COMMITTING:
            await self._settles()
        if self._state is not _S.COMMITTING:
            return  # its time was up
        self._sealed = True
        if self._failure is not None:
            self._error = self._because(self._failure)
            self._enter(_S.ABORTING)
            await self._end(commit=False)
            return
        await self._end(commit=True)

    async def _abort(self) -> None:
        self._sealed = True
        await self._end(commit=False)

    async def _end(self, *, commit: bool) -> None:
        try:
            await self._coordinators.end(self.id, commit=commit, key=self.key)
        except MagnetarError as error:
            self._over_with(self._unknown(error, commit) if is_retriable(error) else error)
        except BaseException:
            self._over_with(TransactionFailed(f"The end of transaction {self.id} was given up."))
            raise
        else:
            self._enter(_S.COMMITTED if commit else _S.ABORTED)

    def _unknown(self, error: MagnetarError, commit: bool) -> MagnetarError:
        unknown = unknown_end(self.id, error, commit=commit)
        unknown.__cause__ = error
        return unknown

    def _over_with(self, error: MagnetarError) -> None:
        """It did not end as was asked for; what was wrong before counts more."""
        self._error = self._error or error
        self._enter(_S.FAILED)

    def _because(self, failure: MagnetarError) -> MagnetarError:
        if isinstance(failure, (*_TOLD_AS_IS, TransactionFailed)):
            return failure
        error = TransactionFailed(
            f"Transaction {self.id} was aborted, because something in it failed ({failure}) "
            "Begin another one."
        )
        error.__cause__ = failure
        return error

    def _time_is_up(self) -> None:
        if self._state is not _S.OPEN and (self._sealed or self._state is not _S.COMMITTING):
            return
        self._error = TransactionTimedOut(
            f"Transaction {self.id} was not ended within {self.timeout_s:g} s, so the broker "
            "aborts it; begin another one, with a longer timeout_s if need be."
        )
        self._enter(_S.TIMED_OUT)
        self._wake()

    def _over(self) -> MagnetarError:
        """Why nothing can be done in it any more."""
        if self._error is not None:
            return type(self._error)(*self._error.args)
        if self._id is None:
            return AlreadyClosed("The transaction has not begun; await it, or enter it.")
        return InvalidTransactionStatus(
            f"Transaction {self.id} is {self._state.value}; begin another one."
        )

    def _began(self, id: TxnId) -> None:
        self._id = id
        if self._state is _S.NEW:
            self._enter(_S.OPEN)

    def _abort_behind(self) -> None:
        """Begin to abort, if it can be, and go on."""
        if self._state is _S.OPEN:
            self._enter(_S.ABORTING)
            self._end_by(self._abort())

    async def _abort_after_error(self) -> None:
        if self._state is _S.COMMITTING:
            raise InvalidTransactionStatus(f"its commit goes on (transaction {self.id}).")
        if self._state in (_S.OPEN, _S.ABORTING):
            await self.abort()

    async def _close(self) -> None:
        """What is begun is waited for; what is open is aborted."""
        loop = self._context.loop
        until = loop.time() + TXN_CLOSE_S
        if self._beginning is not None and self._id is None:
            await asyncio.wait((self._beginning,), timeout=TXN_CLOSE_S)
            begun = self._beginning.done() and not self._beginning.cancelled()
            if begun and self._beginning.exception() is None:
                self._began(self._beginning.result())
            self._beginning.cancel()
        self._abort_behind()
        if self._ending is not None and self._state is _S.COMMITTING and not self._sealed:
            await asyncio.wait((self._ending,), timeout=(until - loop.time()) / 2)
            await self._abort_unsealed(self._ending)
        if self._ending is not None:
            await asyncio.wait((self._ending,), timeout=max(0.0, until - loop.time()))
            self._ending.cancel()
            await asyncio.wait((self._ending,))
        if not self._state.is_final:
            self._over_with(AlreadyClosed("The transaction was closed before it had ended."))
        self._tasks.cancel()
        self._stop_clock()

    async def _abort_unsealed(self, commit: asyncio.Task[None]) -> None:
        """The broker was not asked to commit yet: so that it need not wait for the deadline."""
        if self._state is _S.COMMITTING and not self._sealed:
            self._error = TransactionFailed(
                f"Transaction {self.id} was closed before everything in it was done; it is aborted."
            )
            commit.cancel()
            await asyncio.wait((commit,))
            self._enter(_S.ABORTING)
            self._end_by(self._abort())

    # Small things

    def _enter(self, state: TransactionState) -> None:
        self._state = next_state(self._state, state)
        if state.is_final:
            self._stop_clock()
            self._follow_up()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
