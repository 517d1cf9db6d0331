"""The pool of connections to bookies."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from magnetar.background_tasks import BackgroundTasks
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
"""Returns the registered address of a bookie, None if it is not registered."""


class _Outage(NamedTuple):
    backoff: Backoff
    until_s: float


class _ConnectionSet:
    """The connections of one kind: at most one for each bookie, none that is closed."""

    __slots__ = ("connections", "outages")

    def __init__(self) -> None:
        self.connections: dict[BookieId, BookieConnection] = {}
        self.outages: dict[BookieId, _Outage] = {}


class BookiePool(BookieClient):
    """Connections to all bookies in use, made on demand.  Make it in the running loop.

    The next request makes a lost connection again, at the address known then.  After a failure to
    connect there is no attempt for a while, which doubles each time (BOOKIE_BACKOFF_MIN_S to
    BOOKIE_BACKOFF_MAX_S); meanwhile requests are answered DISCONNECTED at once.
    """

    def __init__(self, address_of: AddressOf, options: BookieOptions | None = None) -> None:
        self.counters = BookieCounters()
        self._address_of = address_of
        self._options = options or BookieOptions()
        self._loop = asyncio.get_running_loop()
        # Two connections to a bookie: one for adds and reads, one for recovery (adds that pass a
        # fence, reads that fence).  An answer has only operation, ledger and entry: on one
        # connection that of a plain read could pass for that of a read that fences.
        self._plain = _ConnectionSet()
        self._recovery = _ConnectionSet()
        self._opening = BackgroundTasks()
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
        kind = self._recovery if recovery else self._plain
        connection = kind.connections.get(bookie) or self._connect(kind, bookie)
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
        kind = self._plain if fence_with is None else self._recovery
        connection = kind.connections.get(bookie) or self._connect(kind, bookie)
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
        kind = self._plain
        connection = kind.connections.get(bookie) or self._connect(kind, bookie)
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
        self._opening.cancel()
        for connection in connections:
            connection.close()
        await self._opening.wait()
        for connection in connections:
            await connection.wait_closed()

    def _refuse(self, answer: Callable[[], None]) -> None:
        self.counters.requests += 1
        self.counters.refusals[ReplyCode.DISCONNECTED] += 1
        self._loop.call_soon(answer)

    def _connect(self, kind: _ConnectionSet, bookie: BookieId) -> BookieConnection | None:
        """Begin a new connection; None after a failure not long ago, or without an address."""
        outage = kind.outages.get(bookie)
        if self._closed or (outage is not None and self._loop.time() < outage.until_s):
            return None
        address = self._address_of(bookie) or parse_address(bookie)
        if address is None:
            self._failed(kind, bookie, "it is not registered, and its id is no address")
            return None
        closed = partial(self._on_closed, kind, bookie)
        connection = BookieConnection(self._options, self.counters, closed)
        kind.connections[bookie] = connection
        self._opening.start(self._open(kind, bookie, connection, address))
        return connection

    async def _open(
        self,
        kind: _ConnectionSet,
        bookie: BookieId,
        connection: BookieConnection,
        address: BookieAddress,
    ) -> None:
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                await connection.open(address)
        except TimeoutError:
            stage, limit_s = connection.ended_while.value, self._options.connect_timeout_s
            self._failed(kind, bookie, f"no answer within {limit_s} s ({stage})")
        except (OSError, LedgerError) as error:
            self._failed(kind, bookie, str(error) or type(error).__name__)
        except Exception:
            log.exception("bookie_connect_broke", bookie=bookie)
            self._failed(kind, bookie, "of an error in this process")
        else:
            kind.outages.pop(bookie, None)

    def _failed(self, kind: _ConnectionSet, bookie: BookieId, reason: str) -> None:
        now_s = self._loop.time()
        # Old failures are forgotten, also those of bookies that are not in use any more.
        kind.outages = {
            other: outage
            for other, outage in kind.outages.items()
            if now_s < outage.until_s + 2 * self._options.backoff_max_s
        }
        known = kind.outages.get(bookie)
        if known is None:
            backoff = Backoff(self._options.backoff_min_s, self._options.backoff_max_s)
        else:
            backoff = known.backoff
        pause_s = backoff.pause_s()
        kind.outages[bookie] = _Outage(backoff, now_s + pause_s)
        self.counters.failed_connects += 1
        log.warning("bookie_not_connected", bookie=bookie, reason=reason, pause_s=pause_s)

    @staticmethod
    def _on_closed(kind: _ConnectionSet, bookie: BookieId, connection: BookieConnection) -> None:
        if kind.connections.get(bookie) is connection:
            del kind.connections[bookie]
