"""A real bookie: one process, on 127.0.0.1, on ZooKeeper or Oxia, with little memory unless told.

Rules: where its metadata is decides its driver: `BookieRoot` knows the URI, and who is registered;
a bookie serves when its port is open and its record is one that this process made, for a record
can outlive a killed bookie, and a port be open without one.  `settings` are lines of BookKeeper's
own configuration and go before ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tests.servers.java_parts import PULSAR_DRIVERS, java_command
from tests.support.child_process import (
    HOST,
    ChildProcess,
    free_port,
    once_it_is,
    port_is_open,
)

MAX_FRAME_BYTES: Final = 5 * 1024 * 1024 + 10 * 1024
"""What Pulsar sets for messages of at most 5 MiB."""

SETTINGS: Final = {
    "allowLoopback": "true",
    "advertisedAddress": HOST,
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    "dbStorage_writeCacheMaxSizeMb": "16",
    "dbStorage_readAheadCacheMaxSizeMb": "16",
    "dbStorage_rocksDB_blockCacheSize": str(16 * 1024 * 1024),
    "journalSyncData": "true",
    "journalPreAllocSizeMB": "4",
    "logSizeLimit": str(64 * 1024 * 1024),
    "diskUsageThreshold": "0.99",
    "diskUsageWarnThreshold": "0.98",
    "diskUsageLwmThreshold": "0.98",
    "httpServerEnabled": "false",
    "numAddWorkerThreads": "1",
    "numReadWorkerThreads": "1",
    "serverNumIOThreads": "2",
    "nettyMaxFrameSizeBytes": str(MAX_FRAME_BYTES),
    "gcWaitTime": "60000",
}
"""As Pulsar runs bookies, but small: the journal is synced, garbage is collected each minute."""


class BookieRoot(Protocol):
    """Where bookies keep their metadata: one per BookKeeper cluster."""

    @property
    def uri(self) -> str:
        """`metadataServiceUri` of bookies and clients."""
        ...

    @property
    def session_ms(self) -> int:
        """How long the record of a bookie that was killed stays."""
        ...

    @property
    def one_by_one(self) -> bool:
        """Whether bookies must not be started at the same time."""
        ...

    async def registrations(self, bookie_id: str) -> set[str]:
        """Names of the sessions that hold a record of this bookie, writable or read-only."""
        ...


@dataclass(frozen=True, slots=True)
class BookieProcess:
    """How the process of a bookie is run.  `options` are more of Java's."""

    heap_mb: int = 128
    direct_mb: int = 128
    options: tuple[str, ...] = ()


SMALL: Final = BookieProcess()


class BookieServer(ChildProcess):
    """The bookie `number` of a cluster; `bookie_id` is `host:port`."""

    poll_s = 0.05

    stop_patience_s: float | None = 10
    """A bookie that is told to end while its journal opens never does: the journal's thread, which
    was interrupted, calls `exit`, which waits for the shutdown, which waits for that thread."""

    def __init__(
        self,
        number: int,
        directory: Path,
        root: BookieRoot,
        settings: Mapping[str, object] | None = None,
        process: BookieProcess = SMALL,
    ) -> None:
        super().__init__(f"bookie-{number}", directory)
        self.port = free_port()
        self.root = root
        self.settings = dict(settings or {})
        self._run_as = process
        self._old_registrations: set[str] = set()

    @property
    def bookie_id(self) -> str:
        """`host:port`."""
        return f"{HOST}:{self.port}"

    def command(self) -> list[str]:
        return self._java("org.apache.bookkeeper.server.Main", "-conf", str(self._configure()))

    def environment(self) -> Mapping[str, str]:
        # RocksDB unpacks its library of 15 MB there at each start.  A bookie that is killed leaves
        # it behind: in /tmp those of all runs would fill the disk.
        return {**super().environment(), "ROCKSDB_SHAREDLIB_DIR": str(self.directory)}

    async def start(self) -> None:
        # A record of a killed run stays until its session has expired: it is not ours.
        self._old_registrations = await self.root.registrations(self.bookie_id)
        await super().start()

    async def is_serving(self) -> bool:
        return await self.is_registered() and port_is_open(self.port)

    async def is_registered(self) -> bool:
        """Whether there is a record that the process which runs has made."""
        return bool(await self.root.registrations(self.bookie_id) - self._old_registrations)

    async def until_registered(self) -> None:
        """Wait for its record: after a pause that was longer than its session, say."""
        await once_it_is(self.is_registered, f"the record of {self.name}", self.start_timeout_s)

    async def until_unregistered(self) -> None:
        """Wait until there is no record of this bookie."""

        async def gone() -> bool:
            return not await self.root.registrations(self.bookie_id)

        await once_it_is(gone, f"the end of the record of {self.name}", self.start_timeout_s)

    def shell_command(self, *arguments: str) -> list[str]:
        """The command line of the bookie shell, with the configuration of this bookie."""
        self.directory.mkdir(parents=True, exist_ok=True)
        main = "org.apache.bookkeeper.bookie.BookieShell"
        return self._java(main, "-conf", str(self._configure()), *arguments)

    def _java(self, main_class: str, *arguments: str) -> list[str]:
        on_pulsar_driver = self.root.uri.startswith("metadata-store:")
        return java_command(
            main_class,
            *arguments,
            heap_mb=self._run_as.heap_mb,
            direct_mb=self._run_as.direct_mb,
            options=(*self._run_as.options, *(PULSAR_DRIVERS if on_pulsar_driver else ())),
        )

    def _configure(self) -> Path:
        lines = SETTINGS | {
            "metadataServiceUri": self.root.uri,
            "zkTimeout": self.root.session_ms,
            "bookiePort": self.port,
            "journalDirectories": self.directory / "journal",
            "ledgerDirectories": self.directory / "ledgers",
            **self.settings,
        }
        path = self.directory / f"{self.name}.conf"
        path.write_text("".join(f"{k}={v}\n" for k, v in lines.items()), "utf-8")
        return path
