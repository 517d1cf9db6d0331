"""Every bookie that this process talks with: connections made on demand.

Rules:

- One connection to a bookie for adds and reads, and another one for recovery (adds that pass a
  fence, reads that fence).  The same operation on the same entry can be on the way on both, and
  with nothing but operation, ledger and entry in an answer it could pass for the other's: a plain
  read for one that fenced, a refused add for one that was stored.
- After a failure to connect nobody tries again for a while, which doubles each time
  (BOOKIE_BACKOFF_MIN_S to BOOKIE_BACKOFF_MAX_S); requests are answered DISCONNECTED at once.
- A connection that was lost is made again by the next request, at the address known then.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import (
    AddDone,
    BatchDone,
    BookieClient,
    BookieCounters,
    ReadDone,
    ReplyCode,
)
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.connection import BookieConnection
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.metadata_format import parse_address
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from storage.ledger.store import LedgerError

log = structlog.get_logger(__name__)

AddressOf = Callable[[BookieId], BookieAddress | None]
"""Where a bookie says it listens, None if it is not registered."""


class _Outage(NamedTuple):
    backoff: Backoff
    until_s: float


class _Purpose:
    """The connections of one kind: at most one for each bookie, none that is closed."""

    __slots__ = ("connections", "outages")

    def __init__(self) -> None:
        self.connections: dict[BookieId, BookieConnection] = {}
        self.outages: dict[BookieId, _Outage] = {}


class BookiePool(BookieClient):
    """Connections to all bookies in use, made on demand. Must be made in a running loop."""

    def __init__(self, address_of: AddressOf, options: BookieOptions | None = None) -> None:
        self.counters = BookieCounters()
        self._address_of = address_of
        self._options = options or BookieOptions()
        self._loop = asyncio.get_running_loop()
        self._plain = _Purpose()
        self._recovery = _Purpose()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        master_key: bytes,
        body: Sequence[bytes],
        done: AddDone,
        *,
        recovery: bool = False,
    ) -> None:
        """See `BookieClient`."""
        purpose = self._recovery if recovery else self._plain
        connection = purpose.connections.get(bookie) or self._connect(purpose, bookie)
        if connection is None:
            self._refuse(partial(done, ReplyCode.DISCONNECTED))
        else:
            connection.add(ledger_id, entry_id, master_key, body, done, recovery=recovery)

    def read(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        done: ReadDone,
        *,
        fence_with: bytes | None = None,
    ) -> None:
        """See `BookieClient`."""
        purpose = self._plain if fence_with is None else self._recovery
        connection = purpose.connections.get(bookie) or self._connect(purpose, bookie)
        if connection is None:
            self._refuse(partial(done, ReplyCode.DISCONNECTED, b""))
        else:
            connection.read(ledger_id, entry_id, done, fence_with=fence_with)

    def read_batch(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        first: int,
        max_entries: int,
        max_bytes: int,
        done: BatchDone,
    ) -> None:
        """See `BookieClient`."""
        purpose = self._plain
        connection = purpose.connections.get(bookie) or self._connect(purpose, bookie)
        if connection is None:
            self._refuse(partial(done, ReplyCode.DISCONNECTED, ()))
        else:
            connection.read_batch(ledger_id, first, max_entries, max_bytes, done)

    async def close(self) -> None:
        """See `BookieClient`.  Idempotent."""
        self._closed = True
        connections = [
            *self._plain.connections.values(),
            *self._recovery.connections.values(),
        ]
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        for connection in connections:
            connection.close()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in connections:
            await connection.wait_closed()

    def _refuse(self, answer: Callable[[], None]) -> None:
        self.counters.requests += 1
        self.counters.refusals[ReplyCode.DISCONNECTED] += 1
        self._loop.call_soon(answer)

    def _connect(self, purpose: _Purpose, bookie: BookieId) -> BookieConnection | None:
        """A connection that is being made, None while that makes no sense."""
        outage = purpose.outages.get(bookie)
        if self._closed or (outage is not None and self._loop.time() < outage.until_s):
            return None
        address = self._address_of(bookie) or parse_address(bookie)
        if address is None:
            self._failed(purpose, bookie, "it is not registered, and its id is no address")
            return None
        closed = partial(self._on_closed, purpose, bookie)
        connection = BookieConnection(self._options, self.counters, closed)
        purpose.connections[bookie] = connection
        task = self._loop.create_task(self._open(purpose, bookie, connection, address))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return connection

    async def _open(
        self,
        purpose: _Purpose,
        bookie: BookieId,
        connection: BookieConnection,
        address: BookieAddress,
    ) -> None:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await connection.open(address)
        except TimeoutError:
            stage, limit_s = connection.ended_while.value, self._options.connect_timeout_s
            self._failed(purpose, bookie, f"no answer within {limit_s} s ({stage})")
        except (OSError, LedgerError) as error:
            self._failed(purpose, bookie, str(error) or type(error).__name__)
        except Exception:
            log.exception("bookie_connect_broke", bookie=bookie)
            self._failed(purpose, bookie, "of an error in this process")
        else:
            purpose.outages.pop(bookie, None)

    def _failed(self, purpose: _Purpose, bookie: BookieId, reason: str) -> None:
        now_s = self._loop.time()
        # Old failures are forgotten: those of this bookie, and bookies that nobody asks for.
        purpose.outages = {
            other: outage
            for other, outage in purpose.outages.items()
            if now_s < outage.until_s + 2 * self._options.backoff_max_s
        }
        known = purpose.outages.get(bookie)
        if known is None:
            backoff = Backoff(self._options.backoff_min_s, self._options.backoff_max_s)
        else:
            backoff = known.backoff
        pause_s = backoff.pause_s()
        purpose.outages[bookie] = _Outage(backoff, now_s + pause_s)
        self.counters.failed_connects += 1
        log.warning("bookie_not_connected", bookie=bookie, reason=reason, pause_s=pause_s)

    @staticmethod
    def _on_closed(purpose: _Purpose, bookie: BookieId, connection: BookieConnection) -> None:
        if purpose.connections.get(bookie) is connection:
            del purpose.connections[bookie]
