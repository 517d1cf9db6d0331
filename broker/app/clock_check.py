"""This machine's clock beside that of the metadata store, which all brokers share.

Rules:

- Deadlines of transactions are wall-clock times, and whoever leads a coordinator judges those that
  another broker set.  So no broker starts whose clock differs from the store's by more than
  CLOCK_SKEW_MAX_MS, and a deadline that another one set waits for twice that: no transaction ends
  before its time.
- The skew is the least by which the clocks must differ.  The store's answer may be of any moment
  between question and answer, so a difference that this explains counts as none.
- Later the clocks are compared every CLOCK_CHECK_S.  A difference is logged, and the metric has it:
  who serves already does not stop for it, since the others cannot tell whose clock is wrong.
- A store inside this process has no other clock.
"""

import asyncio
from typing import ClassVar

import structlog

from config.bounds import CLOCK_CHECK_S, CLOCK_SKEW_MAX_MS
from magnetar.protocol.server_error import OperatorError, ServerError
from storage.clock import Clock
from storage.metadata.store import MetadataError, MetadataStore
from storage.supervised import Supervised

log = structlog.get_logger(__name__)


class ClockSkew(OperatorError):
    """The machine's clock is not the metadata store's."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ClockCheck:
    """Compares this machine's clock with the metadata store's, at the start and later."""

    def __init__(
        self, metadata: MetadataStore, clock: Clock, *, check_s: float = CLOCK_CHECK_S
    ) -> None:
        self.skew_ms = 0
        """By how much this clock is ahead at least; negative: behind."""
        self._metadata = metadata
        self._clock = clock
        self._check_s = check_s
        self._tasks = Supervised()

    async def start(self) -> None:
        """Compare, now and from time to time.  Raises `ClockSkew`, `MetadataError`."""
        if not await self._compare():
            return
        if abs(self.skew_ms) > CLOCK_SKEW_MAX_MS:
            raise ClockSkew(self._text())
        self._tasks.keep("clock check", self._watch)

    async def stop(self) -> None:
        """Compare no more."""
        await self._tasks.stop()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._check_s)
            try:
                await self._compare()
            except MetadataError as error:
                log.warning("clock_not_compared", error=str(error))
                continue
            if abs(self.skew_ms) > CLOCK_SKEW_MAX_MS:
                log.error("clock_skew", skew_ms=self.skew_ms, error=self._text())

    async def _compare(self) -> bool:
        """Whether the store has a clock of its own."""
        before_ms = self._clock.now_ms()
        server_ms = await self._metadata.server_time_ms()
        after_ms = self._clock.now_ms()
        if server_ms is None:
            return False
        self.skew_ms = max(before_ms - server_ms, 0) or min(after_ms - server_ms, 0)
        return True

    def _text(self) -> str:
        side = "ahead of" if self.skew_ms > 0 else "behind"
        return (
            f"The clock of this machine is {abs(self.skew_ms)} ms {side} the metadata store's, and "
            f"{CLOCK_SKEW_MAX_MS} ms are allowed: transactions of other brokers would end at the "
            "wrong time. Let NTP set the clocks of brokers and of the store's servers."
        )
