"""Comparison of this machine's clock with that of the metadata store, which all brokers share."""

import asyncio
from typing import ClassVar

import structlog

from config.bounds import CLOCK_CHECK_S, CLOCK_SKEW_MAX_MS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import OperatorError, ServerError
from storage.clock import Clock
from storage.metadata.store import MetadataError, MetadataStore

log = structlog.get_logger(__name__)


class ClockSkew(OperatorError):
    """The machine's clock differs too much from the metadata store's."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class ClockCheck:
    """Compares this machine's clock with the metadata store's, at the start and later.

    Deadlines of transactions are wall-clock times, and the leader of a coordinator enforces those
    that an earlier leader set.  So a broker whose clock differs by more than CLOCK_SKEW_MAX_MS does
    not start, and deadlines of other brokers are enforced later by twice that: no transaction ends
    before its time.
    """

    def __init__(
        self, metadata: MetadataStore, clock: Clock, *, check_s: float = CLOCK_CHECK_S
    ) -> None:
        self.skew_ms = 0
        """The least time by which this clock is ahead; negative: behind."""
        self._metadata = metadata
        self._clock = clock
        self._check_s = check_s
        self._tasks = BackgroundTasks(log)

    async def start(self) -> None:
        """Compare now, and every CLOCK_CHECK_S.  Raises `ClockSkew`, `MetadataError`."""
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
            # A broker that serves already goes on: it may be the store's clock that is wrong.
            if abs(self.skew_ms) > CLOCK_SKEW_MAX_MS:
                log.error("clock_skew", skew_ms=self.skew_ms, error=self._text())

    async def _compare(self) -> bool:
        """Update the skew; False for a store inside this process, which has no other clock."""
        before_ms = self._clock.now_ms()
        server_ms = await self._metadata.server_time_ms()
        after_ms = self._clock.now_ms()
        if server_ms is None:
            return False
        # The store's time may be of any moment between request and answer.
        self.skew_ms = max(before_ms - server_ms, 0) or min(after_ms - server_ms, 0)
        return True

    def _text(self) -> str:
        side = "ahead of" if self.skew_ms > 0 else "behind"
        return (
            f"The clock of this machine is {abs(self.skew_ms)} ms {side} the metadata store's, and "
            f"{CLOCK_SKEW_MAX_MS} ms are allowed: transactions of other brokers would end at the "
            "wrong time. Let NTP set the clocks of brokers and of the store's servers."
        )
