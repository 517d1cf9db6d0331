"""`ClientContext`, which all parts of one client share, and checks of the event loop."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from magnetar.bounds import RETRY_FIRST_S, RETRY_JITTER, RETRY_LIMIT_S
from magnetar.errors import WrongLoop
from magnetar.identity import Identities
from magnetar.protocol.backoff import Backoff
from magnetar.settings import ClientSettings
from magnetar.wire.pool import ConnectionPool

__all__ = ["ClientContext", "check_loop", "client_backoff"]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_loop(own: asyncio.AbstractEventLoop) -> None:
    """Raises `WrongLoop` unless `own` is the loop that runs."""
    # On another loop, or without one, waiting would never end.
    if running_loop() is not own:
        raise WrongLoop(
            "This was opened on another event loop than the one that runs here, or none runs here: "
            "connect a client in each loop (each asyncio.run, each thread, each test), or use "
            "magnetar.sync, which any thread may use."
        )


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def client_backoff(rng: random.Random, limit_s: float = RETRY_LIMIT_S) -> Backoff:
    """The pauses of a new series of attempts, each shortened by a random part."""
    return Backoff(RETRY_FIRST_S, limit_s, lambda: 1 - RETRY_JITTER * rng.random())


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The pool, settings, counters, randomness and clocks that all parts of one client share.

    Tests replace `rng` and `wall_clock_ms`.  Timers are those of the loop (`loop.call_later`).
    """

    pool: ConnectionPool
    settings: ClientSettings = field(default_factory=ClientSettings)
    ids: Identities = field(default_factory=Identities)
    rng: random.Random = field(default_factory=random.Random)
    wall_clock_ms: Callable[[], int] = _wall_clock_ms

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.wall_clock_ms()

    def backoff(self, limit_s: float = RETRY_LIMIT_S) -> Backoff:
        """See `client_backoff`; with the context's `rng`."""
        return client_backoff(self.rng, limit_s)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs."""
        return asyncio.get_running_loop()
