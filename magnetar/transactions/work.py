"""What is sent and acknowledged under one transaction id: of a transaction, or of an attempt.

Rules:

- Before the first send to a segment, and the first acknowledgement on a subscription, the
  coordinator is told, once; they wait for that.
- Everything in it is counted until its outcome is known (`track`).  The first that fails is kept
  (`_failure`): nothing new begins in it afterwards.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
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
"""A topic, or a subscription of it."""


class Work(ABC):
    """The sends and acknowledgements under one transaction id, and the first failure among them."""

    def __init__(
        self, context: ClientContext, coordinators: Coordinators, key: KeyHolder | None
    ) -> None:
        self.key: Final = key
        self._context = context
        self._loop: Final = context.loop
        self._coordinators = coordinators
        self._told: dict[_Name, asyncio.Future[None] | None] = {}
        self._unsettled = 0
        self._settled: asyncio.Future[None] | None = None
        self._failure: MagnetarError | None = None
        """The first that went wrong in it."""
        self._tasks = BackgroundTasks()

    @property
    @abstractmethod
    def id(self) -> TxnId:
        """What the broker calls it.  Raises `AlreadyClosed` unless it has begun."""

    @abstractmethod
    def _refusal(self, *, ending: bool) -> MagnetarError | None:
        """Why it takes no more, if so.

        `ending`: what was given to it before, and comes only now, is taken while it ends.
        """

    @abstractmethod
    def _spoilt(self, failure: MagnetarError) -> MagnetarError:
        """Why nothing can begin in it any more, because of that failure."""

    # What happens in it

    def writing_to(self, topic: str) -> asyncio.Future[None] | None:
        """None if the coordinator knows; else a future, and sends wait for it (never cancel it).

        `topic` is what is written to: a segment, or a topic that is none.  Raises why no more is
        taken.
        """
        name = topic, None
        if name in self._told and self._told[name] is None and self._failure is None:
            if (refusal := self._refusal(ending=True)) is not None:
                raise refusal
            return None  # every message asks, so the usual answer comes first
        return self._tell(name, lambda: self._coordinators.add_topic(self.id, topic, self.key))

    def acknowledging_on(self, topic: str, subscription: str) -> asyncio.Future[None] | None:
        """As `writing_to`, for acknowledgements on a subscription."""
        return self._tell(
            (topic, subscription),
            lambda: self._coordinators.add_subscription(self.id, topic, subscription, self.key),
        )

    def track(self, outcome: "asyncio.Future[R]") -> None:
        """Something sent or acknowledged in it: its end waits, and it is spoilt if that fails.

        Raises why no more is taken.
        """
        if (refusal := self._refusal(ending=False)) is not None:
            raise refusal
        self._unsettled += 1
        outcome.add_done_callback(self._outcome)

    # How it is done

    async def _settles(self) -> None:
        """Until nothing is left of which the outcome is not known, or something has failed."""
        if self._settled is None:
            self._settled = self._context.loop.create_future()
        await asyncio.wait((self._settled,))

    def _outcome(self, outcome: "asyncio.Future[R]") -> None:
        self._unsettled -= 1
        if outcome.cancelled():
            self._fail(
                TransactionFailed("Something sent or acknowledged in the transaction was given up.")
            )
        elif (error := outcome.exception()) is not None:
            self._fail(error)
        if self._unsettled == 0:
            self._wake()

    def _tell(
        self, name: _Name, request: Callable[[], Coroutine[None, None, None]]
    ) -> asyncio.Future[None] | None:
        if (refusal := self._refusal(ending=True)) is not None:
            raise refusal
        if self._failure is not None:
            raise self._spoilt(self._failure) from self._failure
        if name in self._told:
            return self._told[name]
        told: asyncio.Future[None] = self._context.loop.create_future()
        self._told[name] = told
        self._unsettled += 1
        self._tasks.start(self._say(name, told, request()))
        return told

    async def _say(self, name: _Name, told: asyncio.Future[None], request: Awaitable[None]) -> None:
        try:
            await request
        except BaseException as error:
            self._fail(error)
            if told.done():
                return
            if not isinstance(error, MagnetarError):
                told.cancel()
                raise
            told.set_exception(error)
            told.exception()  # seen, even if nobody waits
        else:
            self._told[name] = None
            if not told.done():
                told.set_result(None)
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
            self._failure = TransactionFailed(f"Something in the transaction failed: {error!r}.")
            self._failure.__cause__ = error
        self._wake()

    def _wake(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None and not settled.done():
            settled.set_result(None)
