"""`SendTurns`: when one replicator sends."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

from broker.replication.sent_counts import SentCounts
from config.bounds import REPLICATED_AT_ONCE, REPLICATED_BYTES_AT_ONCE
from storage.callbacks import ignore


class SendTurns:
    """Runs a replicator when there may be something to send, and not while it waits.

    It sends in turns, between which the event loop serves others.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        """`run` sends what can be sent now, if `may_send`; it may call `send` for that."""
        self.stopped = False
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._waiting: asyncio.Task[None] | None = None

    @property
    def may_send(self) -> bool:
        """Whether it is not stopped, and waits for nothing."""
        return self._waiting is None and not self.stopped

    def wake(self) -> None:
        """Run once, soon."""
        if not self._scheduled and not self.stopped:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_run)

    def send(self, send_next: Callable[[], bool], counts: SentCounts) -> bool:
        """Send up to REPLICATED_AT_ONCE entries and REPLICATED_BYTES_AT_ONCE, the rest soon.

        `send_next` sends or skips the next entry.  Returns False as soon as that does: there is
        none, or it has to wait.
        """
        enough = counts.bytes + REPLICATED_BYTES_AT_ONCE
        for _ in range(REPLICATED_AT_ONCE):
            if not send_next():
                return False
            if counts.bytes >= enough:
                break
        self.wake()
        return True

    def wait_for(
        self,
        until: Coroutine[None, None, None],
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Send nothing until this has ended, then run; with `failed`, call that for an error."""
        if self.stopped:
            until.close()
            return
        self._waiting = self._loop.create_task(until)
        self._waiting.add_done_callback(partial(self._waited, failed))

    def stop(self) -> None:
        """Run no more, and wait for nothing."""
        self.stopped = True
        # The replicator has this object: a circle would keep both until a garbage collection.
        self._run = ignore
        if self._waiting is not None:
            self._waiting.cancel()

    async def ended(self) -> None:
        """Return when the wait has ended that `stop` cancelled."""
        if self._waiting is not None:
            await asyncio.wait((self._waiting,))

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self._run()

    def _waited(
        self, failed: Callable[[BaseException], None] | None, task: "asyncio.Task[None]"
    ) -> None:
        self._waiting = None
        if task.cancelled() or self.stopped:
            return
        error = task.exception()
        if error is None or failed is None:
            self._run()
        else:
            failed(error)
