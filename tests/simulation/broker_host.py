"""One broker process: the real broker over simulated stores, on a host of its own."""

import random
from collections.abc import Mapping
from typing import ClassVar, cast

from broker.app.service import Broker
from broker.app.stores import Stores
from broker.wire.connection import Connection
from broker.wire.handlers.produce import send
from broker.wire.handlers.table import handler_table
from broker.wire.server import BinaryServer
from config.settings import Settings
from magnetar.protocol.ids import LedgerId
from storage.clock import Clock
from storage.ledger.local.limits import LedgerLimits
from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import Copies, LedgerError, ReadableLedger, WritableLedger
from storage.metadata.store import MetadataStore
from tests.simulation.disk import TimedDisk
from tests.simulation.loop import Host
from tests.simulation.metadata import MetadataHandle

SMALL_LOG = LedgerLimits(
    file_bytes=16 * 1024,
    file_records=200,
    reclaim_pause_s=5,
    compact_step_bytes=4096,
)
"""So that files are sealed, merged and dropped within a run."""


class _Port:
    """What stands for a bound socket."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        """Nothing was taken."""


class _NumberedConnection(Connection):
    """A connection with the same hash in every run."""

    number: int

    def __hash__(self) -> int:
        return self.number


class SimulatedServer(BinaryServer):
    """Listens on the simulated network."""

    _accepted = 0

    def bind(self, host: str, port: int) -> None:
        self._socket = cast("object", _Port(port))  # type: ignore[assignment]
        self.port = port

    def _accept(self) -> Connection:
        self._accepted += 1
        connection = _NumberedConnection.__new__(_NumberedConnection)
        connection.number = self._accepted
        connection.__init__(self._broker, self.handlers, self._send)  # type: ignore[misc]
        return connection


class SimulatedBroker(Broker):
    """The real broker, but for its socket.

    One that was replaced must not hear of it: what keeps it from harm is fencing alone.
    """

    joins_others: ClassVar[bool] = False

    def __init__(
        self, settings: Settings, *, clock: Clock, rng: random.Random, stores: Stores
    ) -> None:
        super().__init__(settings, clock=clock, rng=rng, stores=stores)
        self._server = SimulatedServer(self, handler_table(), send)


class MovableLedgerStore(LocalLedgerStore):
    """A store whose disk may be given to another host: then no ledger is opened here any more.

    What this one writes fails by itself; but what it would make of a ledger that it opens again is
    not what its successor has.  The lock of a data directory is what keeps real ones from it.
    """

    def __init__(
        self, disk: TimedDisk, metadata: MetadataStore, clock: Clock, rng: random.Random
    ) -> None:
        super().__init__(disk, metadata, clock, limits=SMALL_LOG, rng=rng)
        self._timed = disk

    def _require_disk(self) -> None:
        if self._timed.fenced:
            raise LedgerError("The disk is with another host: start again there.")

    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        self._require_disk()
        return await super().create(custom=custom, copies=copies)

    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        self._require_disk()
        return await super().open(ledger_id)

    async def delete(self, ledger_id: LedgerId) -> None:
        self._require_disk()
        await super().delete(ledger_id)


class BrokerHost:
    """A process: its host, its disk, its handle on the metadata, and the broker once it runs."""

    broker: SimulatedBroker

    def __init__(
        self,
        host: Host,
        disk: TimedDisk,
        metadata: MetadataHandle,
        settings: Settings,
        *,
        shared: bool,
    ) -> None:
        """`shared`: there may be others on the same stores."""
        self.host = host
        self.disk = disk
        self.metadata = metadata
        self.settings = settings
        self.shared = shared
        self.started = False
        self.failed = False

    async def run(self, clock: Clock, rng: random.Random) -> None:
        """Start as `magnetar` does.  Raises what keeps it from starting."""
        ledgers = MovableLedgerStore(self.disk, self.metadata, clock, rng)
        await ledgers.start()
        stores = Stores(self.metadata, ledgers, shared=self.shared)
        self.broker = SimulatedBroker(self.settings, clock=clock, rng=rng, stores=stores)
        await self.broker.start()
        self.started = True

    @property
    def alive(self) -> bool:
        return self.started and not self.host.dead
