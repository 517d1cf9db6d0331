"""`Transaction`: sends and acknowledgements that all take effect, or none."""

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
_RAISED_AS_IS: Final = (
    InvalidTransactionStatus,
    TransactionConflict,
    TransactionKeyFenced,
    TransactionNotFound,
    TransactionTimedOut,
)


class Transaction(Work, ClosedAfterwards):
    """A transaction: all that is sent and acknowledged in it takes effect, or nothing.

    Made by `Client.transaction`.  The end of an `async with` block commits it, or aborts it on an
    error.  If the block is cancelled, the abort goes on in the background; `close` waits for it,
    for a bounded time.

    A commit or an abort goes on until it is answered or the operation timeout has passed, also if
    the caller is cancelled; calling it again waits for the same end.
    """

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
        """The error that `commit` raises."""
        self._deadline: asyncio.TimerHandle | None = None
        self._beginning: asyncio.Task[TxnId] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._committed_at_broker: bool | None = None
        """Whether it was committed; None until it is over at the broker too."""
        self._listeners: list[Callable[[bool], None]] = []
        self._asking: asyncio.Task[None] | None = None

    @property
    def id(self) -> TxnId:
        """The transaction's id at the broker.  Raises `AlreadyClosed` unless it has begun."""
        if self._id is None:
            raise AlreadyClosed("The transaction has not begun; await it, or enter it.")
        return self._id

    @property
    def state(self) -> TransactionState:
        """The state of the transaction."""
        return self._state

    # Begin and end

    async def open(self) -> None:
        """Begin.  Raises the errors of `Coordinators.begin`."""
        loop = self._context.loop
        # From before the request, so that the deadline passes here no later than at the broker.
        began = loop.time()
        ttl_ms = math.ceil(self.timeout_s * 1000)
        self._beginning = loop.create_task(self._coordinators.begin(ttl_ms, self.key))
        self._began(await finished(self._beginning))
        self._deadline = loop.call_at(began + self.timeout_s, self._time_is_up)

    async def commit(self) -> None:
        """Wait for the outcome of everything in it, and commit.

        Raises `TransactionFailed`, `TransactionConflict`, `TransactionTimedOut`,
        `TransactionNotFound`, `InvalidTransactionStatus`, `ExpiredTransaction` or
        `TransactionKeyFenced` if it is aborted, or will be by the broker.  Raises
        `OperationTimedOut` if the broker did not say whether it committed.
        """
        check_loop(self._loop)
        if self._state is _S.OPEN:
            self._enter(_S.COMMITTING)
            self._end_by(self._commit())
        elif self._state in (_S.ABORTING, _S.ABORTED) and self._error is None:
            raise InvalidTransactionStatus(
                f"Transaction {self.id} was aborted; begin another one to commit."
            )
        await self._wait_ended()

    async def abort(self) -> None:
        """Abort it; does nothing if it is aborted or timed out already.

        Raises `InvalidTransactionStatus` while it commits or if it has committed, and the errors of
        `commit`.
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
            self._begin_abort()
        else:
            try:
                await self._abort_after_error()
            except MagnetarError as failed:
                error.add_note(f"The transaction could not be aborted: {failed}")

    # Listeners

    def when_over(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(committed)` once, when it is over at the broker too.

        If it has timed out, or the broker did not say how it ended, the client asks the broker to
        abort it first: until then the broker holds the messages acknowledged in it.  The close of
        the client calls the listener too.
        """
        if self._committed_at_broker is not None:
            self._context.loop.call_soon(listener, self._committed_at_broker)
            return
        self._listeners.append(listener)
        if self._state.is_final:
            self._call_when_over()

    def _call_when_over(self) -> None:
        """Call the listeners of a transaction that has ended, now or after the broker's answer."""
        if self._state in (_S.COMMITTED, _S.ABORTED):
            self._call_listeners(self._state is _S.COMMITTED)
        elif self._listeners and self._asking is None:
            self._asking = self._tasks.start(self._abort_until_answered())

    async def _abort_until_answered(self) -> None:
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
            self._call_listeners(committed)

    def _call_listeners(self, committed: bool) -> None:
        self._committed_at_broker = committed
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(committed)

    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        if self._state is _S.OPEN or (ending and self._state is _S.COMMITTING and not self._sealed):
            return None
        return self._over()

    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        return TransactionFailed(
            f"Transaction {self.id} can only be aborted, because of an earlier error "
            f"({failure}) Begin another one."
        )

    # The end

    def _end_by(self, work: Coroutine[None, None, None]) -> None:
        self._ending = self._context.loop.create_task(work)

    async def _wait_ended(self) -> None:
        """Wait for the end that was requested.  Raises its error."""
        if self._ending is not None:
            await asyncio.wait((self._ending,))
        if self._error is not None:
            raise type(self._error)(*self._error.args) from (self._error.__cause__ or self._error)
        if not self._state.is_final:
            raise self._over()

    async def _commit(self) -> None:
        while self._unsettled and self._failure is None and self._state is _S.COMMITTING:
            await self._wait_settled()
        if self._state is not _S.COMMITTING:
            return  # The deadline has passed.
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
            self._end_failed(self._unknown(error, commit) if is_retriable(error) else error)
        except BaseException:
            self._end_failed(TransactionFailed(f"The end of transaction {self.id} was cancelled."))
            raise
        else:
            self._enter(_S.COMMITTED if commit else _S.ABORTED)

    def _unknown(self, error: MagnetarError, commit: bool) -> MagnetarError:
        unknown = unknown_end(self.id, error, commit=commit)
        unknown.__cause__ = error
        return unknown

    def _end_failed(self, error: MagnetarError) -> None:
        """Enter FAILED, as it did not end as requested; an earlier error is raised instead."""
        self._error = self._error or error
        self._enter(_S.FAILED)

    def _because(self, failure: MagnetarError) -> MagnetarError:
        if isinstance(failure, (*_RAISED_AS_IS, TransactionFailed)):
            return failure
        error = TransactionFailed(
            f"Transaction {self.id} was aborted, because a send or an acknowledgement in it failed "
            f"({failure}) Begin another one."
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
        """The error for each use after its end."""
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

    def _begin_abort(self) -> None:
        """Begin to abort in the background, if it is open."""
        if self._state is _S.OPEN:
            self._enter(_S.ABORTING)
            self._end_by(self._abort())

    async def _abort_after_error(self) -> None:
        if self._state is _S.COMMITTING:
            raise InvalidTransactionStatus(f"Transaction {self.id} is committing.")
        if self._state in (_S.OPEN, _S.ABORTING):
            await self.abort()

    async def _close(self) -> None:
        """Wait for what has begun, and abort the transaction if it is open."""
        loop = self._context.loop
        until = loop.time() + TXN_CLOSE_S
        if self._beginning is not None and self._id is None:
            await asyncio.wait((self._beginning,), timeout=TXN_CLOSE_S)
            begun = self._beginning.done() and not self._beginning.cancelled()
            if begun and self._beginning.exception() is None:
                self._began(self._beginning.result())
            self._beginning.cancel()
        self._begin_abort()
        if self._ending is not None and self._state is _S.COMMITTING and not self._sealed:
            await asyncio.wait((self._ending,), timeout=(until - loop.time()) / 2)
            await self._abort_unsealed(self._ending)
        if self._ending is not None:
            await asyncio.wait((self._ending,), timeout=max(0.0, until - loop.time()))
            self._ending.cancel()
            await asyncio.wait((self._ending,))
        if not self._state.is_final:
            self._end_failed(AlreadyClosed("The transaction was closed before it had ended."))
        self._tasks.cancel()
        self._stop_clock()

    async def _abort_unsealed(self, commit: asyncio.Task[None]) -> None:
        """Abort in place of a commit of which the broker does not know yet."""
        # Otherwise the broker would have to wait for the deadline.
        if self._state is _S.COMMITTING and not self._sealed:
            self._error = TransactionFailed(
                f"Transaction {self.id} was closed before everything in it was settled; it is "
                "aborted."
            )
            commit.cancel()
            await asyncio.wait((commit,))
            self._enter(_S.ABORTING)
            self._end_by(self._abort())

    # State

    def _enter(self, state: TransactionState) -> None:
        self._state = next_state(self._state, state)
        if state.is_final:
            self._stop_clock()
            self._call_when_over()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
