"""`Work`: the sends and acknowledgements under one transaction id."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Final, TypeVar

from magnetar.background_tasks import BackgroundTasks
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError, TransactionFailed
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.key_holder import KeyHolder

__all__ = ["Work"]

R = TypeVar("R")
_Name = tuple[str, str | None]
"""A topic, or a topic and a subscription."""


class Work(ABC):
    """The sends and acknowledgements under the id of a transaction or an attempt.

    Before the first send to a segment, and the first acknowledgement on a subscription, it is
    registered with the coordinator.  Sends and acknowledgements are counted until their outcome is
    known (`track`).  After the first failure no new one can begin.
    """

    def __init__(
        self, context: ClientContext, coordinators: Coordinators, key: KeyHolder | None
    ) -> None:
        self.key: Final = key
        self._context = context
        self._loop: Final = context.loop
        self._coordinators = coordinators
        self._registered: dict[_Name, asyncio.Future[None] | None] = {}
        """None for those that the coordinator knows; else a future that is done when it does."""
        self._unsettled = 0
        self._settled: asyncio.Future[None] | None = None
        self._failure: MagnetarError | None = None
        """The first failure in it."""
        self._tasks = BackgroundTasks()

    @property
    @abstractmethod
    def id(self) -> TxnId:
        """The id at the broker.  Raises `AlreadyClosed` unless it has begun."""

    @abstractmethod
    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        """The error if it accepts no more work.

        With `ending`, work that was begun earlier is still accepted while it ends.
        """

    @abstractmethod
    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        """The error for new work after a failure."""

    # Work

    def writing_to(self, topic: str) -> asyncio.Future[None] | None:
        """Register a topic, or segment, to write to.

        Returns None if the coordinator knows it, else a future that sends must wait for (do not
        cancel it).  Raises an error if no more work is accepted.
        """
        name = topic, None
        # Every message calls this, so the usual case comes first.
        if name in self._registered and self._registered[name] is None and self._failure is None:
            if (refusal := self._refusal(ending=True)) is not None:
                raise refusal
            return None
        return self._register(name, lambda: self._coordinators.add_topic(self.id, topic, self.key))

    def acknowledging_on(self, topic: str, subscription: str) -> asyncio.Future[None] | None:
        """Register a subscription to acknowledge on; returns and raises as `writing_to`."""
        return self._register(
            (topic, subscription),
            lambda: self._coordinators.add_subscription(self.id, topic, subscription, self.key),
        )

    def track(self, outcome: "asyncio.Future[R]") -> None:
        """Count a send or an acknowledgement: a commit waits for it, and aborts if it fails.

        Raises an error if no more work is accepted.
        """
        if (refusal := self._refusal(ending=False)) is not None:
            raise refusal
        self._unsettled += 1
        outcome.add_done_callback(self._count_outcome)

    # Outcomes

    async def _wait_settled(self) -> None:
        """Wait until all outcomes are known, or one has failed."""
        if self._settled is None:
            self._settled = self._context.loop.create_future()
        await asyncio.wait((self._settled,))

    def _count_outcome(self, outcome: "asyncio.Future[R]") -> None:
        self._unsettled -= 1
        if outcome.cancelled():
            self._fail(
                TransactionFailed("A send or an acknowledgement in the transaction was cancelled.")
            )
        elif (error := outcome.exception()) is not None:
            self._fail(error)
        if self._unsettled == 0:
            self._wake()

    def _register(
        self, name: _Name, request: Callable[[], Coroutine[None, None, None]]
    ) -> asyncio.Future[None] | None:
        if (refusal := self._refusal(ending=True)) is not None:
            raise refusal
        if self._failure is not None:
            raise self._spoilt(self._failure) from self._failure
        if name in self._registered:
            return self._registered[name]
        registered: asyncio.Future[None] = self._context.loop.create_future()
        self._registered[name] = registered
        self._unsettled += 1
        self._tasks.start(self._send_registration(name, registered, request))
        return registered

    async def _send_registration(
        self,
        name: _Name,
        registered: asyncio.Future[None],
        request: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        try:
            await request()
        except BaseException as error:
            self._fail(error)
            if registered.done():
                return
            if not isinstance(error, MagnetarError):
                registered.cancel()
                raise
            registered.set_exception(error)
            registered.exception()  # Retrieved, so that asyncio does not report it.
        else:
            self._registered[name] = None
            if not registered.done():
                registered.set_result(None)
        finally:
            self._unsettled -= 1
            if self._unsettled == 0:
                self._wake()

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None:
            return
        if isinstance(error, MagnetarError):
            self._failure = error
        else:
            self._failure = TransactionFailed(f"A part of the transaction failed: {error!r}.")
            self._failure.__cause__ = error
        self._wake()

    def _wake(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None and not settled.done():
            settled.set_result(None)
