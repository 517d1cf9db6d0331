"""What one segment consumer asks its broker for again, on one timer.

Rules: what was negatively acknowledged is asked for when its delay is over (`redelivery.py`), what
is not acknowledged in time when that is (`processing_timeouts.py`).  An entry that is asked for
waits for nothing else any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from magnetar.consume.ack_tracker import AckTracker
from magnetar.consume.consumer_settings import SubscribeSettings
from magnetar.consume.processing_timeouts import ProcessingTimeouts
from magnetar.consume.received import EntryKey
from magnetar.consume.redelivery import Redelivery
from magnetar.message_id import EntryId

__all__ = ["RedeliveryTimer"]


class RedeliveryTimer:
    """See the module's rules."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        how: SubscribeSettings,
        tracker: AckTracker,
        ask: Callable[[Sequence[EntryKey]], None],
    ) -> None:
        """`ask` is called with what is due; it says so by `asked`."""
        delay, timeout_ms = how.nack_delay, how.processing_timeout_ms
        self.nacked: Final = Redelivery(delay.min_ms, delay.max_ms, delay.multiplier)
        self.timeouts: Final = ProcessingTimeouts(timeout_ms) if timeout_ms else None
        """None: the application may take as long as it likes."""
        self._loop = loop
        self._tracker = tracker
        self._ask = ask
        self._handle: asyncio.TimerHandle | None = None
        self._at_ms = 0
        """When `_handle` is called."""

    def nack(self, keys: Sequence[EntryKey], redelivery_count: int, index: int = -1) -> None:
        """Ask for entries when their delay is over, for the message of this index."""
        self.nacked.add(keys, redelivery_count, self._now_ms(), index)
        self._aim(self.nacked.next_ms)

    def handed_out(self, key: EntryKey, index: int) -> None:
        """The time of a message begins, if there is a timeout."""
        if self.timeouts is not None:
            due_ms = self.timeouts.handed_out(key, index, self._now_ms())
            if self._handle is None or due_ms < self._at_ms:
                self._aim(due_ms)

    def ends(self, message_id: EntryId) -> bool:
        """The time of a message ends; whether it had begun."""
        timeouts = self.timeouts
        return timeouts is not None and timeouts.end(message_id.key, message_id.batch_index)

    def asked(self, keys: Sequence[EntryKey]) -> None:
        """These entries are asked for."""
        for key in keys:
            self.nacked.forget(key)
        if self.timeouts is not None:
            self.timeouts.end_all(keys)

    def clear(self) -> None:
        """The broker delivers everything again anyway, or nothing any more."""
        self.nacked.clear()
        if self.timeouts is not None:
            self.timeouts.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _aim(self, due_ms: int | None) -> None:
        """At this time, unless it is sooner."""
        if due_ms is None or (self._handle is not None and self._at_ms <= due_ms):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._at_ms = due_ms
        wait_s = max(0, due_ms - self._now_ms()) / 1000
        self._handle = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        """Ask for what is due, all at once."""
        self._handle = None
        now_ms = self._now_ms()
        due = dict.fromkeys(self.nacked.due(now_ms))
        if self.timeouts is not None:
            for late in self.timeouts.due(now_ms):
                due.update(dict.fromkeys(self._tracker.entries_of(EntryId(*late))))
            self._aim(self.timeouts.next_ms)
        if due:
            self._ask(tuple(due))
        self._aim(self.nacked.next_ms)

    def _now_ms(self) -> int:
        return int(self._loop.time() * 1000)
