"""Ledger records and the list of bookies in ZooKeeper, in the form of BookKeeper's own drivers.

The drivers of Apache BookKeeper and Apache Pulsar have the same tree; only its root differs:

    zk+hierarchical://HOST:PORT;HOST:PORT/ledgers   that path (zk+null:// too)
    metadata-store:zk:HOST:PORT,HOST:PORT/CHROOT    `/ledgers` below the chroot
"""

import asyncio
from dataclasses import dataclass, replace
from random import Random
from typing import cast

import structlog

from config import bounds
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper import metadata_format
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata
from storage.ledger.bookkeeper.metadata_format import SHORT_ID_LIMIT, LedgerPaths, UnreadableRecord
from storage.ledger.bookkeeper.metadata_store import (
    BookieAddress,
    Bookies,
    LedgerMetadataConflict,
    LedgerMetadataStore,
    VersionedMetadata,
)
from storage.ledger.store import LedgerError, NoSuchLedger
from storage.metadata.access import StoreAccess
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.address import (
    InvalidZooKeeperAddress,
    ZooKeeperAddress,
    parse_address,
)
from storage.metadata.zookeeper.client import (
    Connection,
    NodeChange,
    RequestFailed,
    ZooKeeperClient,
)
from storage.metadata.zookeeper.requests import Failure, Read, Request, Stat, Value

_log = structlog.get_logger(__name__)

_BOOKKEEPER_SCHEMES = ("zk+hierarchical://", "zk+null://")
_PULSAR_SCHEME = "metadata-store:"
_ID_PREFIX = "ID-"
_HIGH_PREFIX = "HOB-"


@dataclass(frozen=True, slots=True)
class LedgerRoot:
    """The ZooKeeper servers, and the node below which the ledgers are."""

    servers: str
    path: str


def parse_metadata_service_uri(uri: str) -> LedgerRoot:
    """Parse the URI of a metadata service.  Raises `InvalidZooKeeperAddress`."""
    address: ZooKeeperAddress
    for scheme in _BOOKKEEPER_SCHEMES:
        if uri.startswith(scheme):
            address = parse_address(uri.removeprefix(scheme).replace(";", ","))
            if address.root:
                return LedgerRoot(address.servers, address.root)
    if uri.startswith(f"{_PULSAR_SCHEME}zk:"):
        address = parse_address(uri.removeprefix(_PULSAR_SCHEME))
        return LedgerRoot(address.servers, address.root + metadata_format.DEFAULT_ROOT)
    raise InvalidZooKeeperAddress(
        f"{uri!r} names no place of ledgers in ZooKeeper: use "
        "zk+hierarchical://HOST:PORT/ledgers or metadata-store:zk:HOST:PORT/CHROOT, as the "
        "bookies do."
    )


class ZooKeeperLedgerMetadata(LedgerMetadataStore):
    """`LedgerMetadataStore` on ZooKeeper, with the records of BookKeeper's own drivers."""

    def __init__(self, root: LedgerRoot, rng: Random, access: StoreAccess | None = None) -> None:
        """Make it in the running loop.  `rng` makes creator tokens."""
        self._paths = LedgerPaths(root.path)
        self._racks_path = root.path.rpartition("/")[0] + metadata_format.RACKS_PATH
        self._rng = rng
        self._zookeeper = ZooKeeperClient(
            root.servers,
            session_timeout_ms=bounds.ZOOKEEPER_SESSION_MS,
            on_state=self._state_changed,
            on_change=self._node_changed,
            access=access,
        )
        self._bookies = Bookies()
        self._following = BackgroundTasks(_log)
        self._watched = False
        self._stale = asyncio.Event()

    async def start(self) -> None:
        """See `LedgerMetadataStore.start`.  Raises `UnreadableRecord` for another layout."""
        try:
            await self._zookeeper.connect()
            layout = await self._read(requests.get_data(self._paths.layout))
            metadata_format.check_layout(None if layout is None else _value(layout))
            await self._list_bookies()
        except MetadataError as error:
            await self.close()
            raise LedgerError(str(error)) from error
        except BaseException:
            await self.close()
            raise
        self._following.keep("list of bookies", self._follow_bookies)

    async def next_ledger_id(self) -> LedgerId:
        """See `LedgerMetadataStore.next_ledger_id`."""
        highs = await self._high_parts()
        if not highs:
            number = await self._count(self._paths.id_generator)
            if number is not None and number < SHORT_ID_LIMIT:
                return LedgerId(number)
        for high in range(max(highs, default=1), max(highs, default=1) + 2):
            level = f"{self._paths.long_id_generator}/{_HIGH_PREFIX}{high:010d}"
            number = await self._count(level)
            if number is not None:
                return metadata_format.long_ledger_id(high, number)
        raise LedgerError(
            f"Ledger ids have run out below {self._paths.long_id_generator}: look at its children."
        )

    async def create(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> VersionedMetadata:
        """See `LedgerMetadataStore.create`."""
        # With a random token: after a lost answer the same bytes are our write.
        made = replace(metadata, creator_token=self._rng.getrandbits(63))
        path = self._paths.ledger(ledger_id)
        record = metadata_format.encode_metadata(made)
        try:
            await self._create(path, record)
        except RequestFailed as error:
            if error.failure is not Failure.NODE_EXISTS:
                raise _failed(error, path) from error
            stored = await self._read(requests.get_data(path)) if error.lost else None
            if stored is None or _value(stored) != record:
                raise _conflict(ledger_id) from None
            return VersionedMetadata(made, _stat(stored).version)
        return VersionedMetadata(made, 0)

    async def read(self, ledger_id: LedgerId) -> VersionedMetadata:
        """See `LedgerMetadataStore.read`.  The newest record, not a follower's."""
        path = self._paths.ledger(ledger_id)
        await self._read(requests.sync(path))
        stored = await self._read(requests.get_data(path))
        if stored is None:
            raise _no_such_ledger(ledger_id)
        metadata = metadata_format.decode_metadata(_value(stored), ledger_id)
        return VersionedMetadata(metadata, _stat(stored).version)

    async def write(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, *, expect: int
    ) -> VersionedMetadata:
        """See `LedgerMetadataStore.write`."""
        if expect < 0:  # ZooKeeper would take it for "any"
            raise _conflict(ledger_id)
        path = self._paths.ledger(ledger_id)
        record = metadata_format.encode_metadata(metadata)
        try:
            stat, _ = await self._call(requests.set_data(path, record, expect))
        except RequestFailed as error:
            if error.failure is Failure.NO_NODE:
                raise _no_such_ledger(ledger_id) from None
            if error.failure is not Failure.BAD_VERSION:
                raise _failed(error, path) from error
            stored = await self._read(requests.get_data(path)) if error.lost else None
            if stored is None or _value(stored) != record:
                raise _conflict(ledger_id) from None
            return VersionedMetadata(metadata, _stat(stored).version)
        return VersionedMetadata(metadata, cast(Stat, stat).version)

    async def delete(self, ledger_id: LedgerId) -> None:
        """See `LedgerMetadataStore.delete`.  The parents stay: there are few."""
        path = self._paths.ledger(ledger_id)
        try:
            await self._call(requests.delete(path, requests.ANY_VERSION))
        except RequestFailed as error:
            if error.failure is not Failure.NO_NODE:
                raise _failed(error, path) from error

    async def list_ledgers(self) -> list[LedgerId]:
        """See `LedgerMetadataStore.list_ledgers`."""
        found: list[LedgerId] = []
        levels = [self._paths.root]
        while levels:
            page, levels = (
                levels[: bounds.ZOOKEEPER_READ_NODES],
                levels[bounds.ZOOKEEPER_READ_NODES :],
            )
            lists = await self._read_many([requests.get_children(level) for level in page])
            for level, names in zip(page, lists, strict=True):
                for name in names if isinstance(names, list) else ():
                    path = f"{level}/{name}"
                    ledger_id = self._paths.ledger_id(path)
                    if ledger_id is not None:
                        found.append(ledger_id)
                    elif metadata_format.is_level(name):
                        levels.append(path)
        return sorted(found)

    @property
    def bookies(self) -> Bookies:
        """See `LedgerMetadataStore.bookies`."""
        return self._bookies

    async def close(self) -> None:
        """See `LedgerMetadataStore.close`.  Idempotent."""
        try:
            await self._following.stop()
        finally:
            await self._zookeeper.close()

    # Ids

    async def _high_parts(self) -> list[int]:
        """The high halves of long ids that are in use; empty while ids are short."""
        names = await self._read(requests.get_children(self._paths.long_id_generator))
        if names is None:
            return []
        found = [
            metadata_format.number_of(name)
            for name in cast(list[str], names)
            if name.startswith(_HIGH_PREFIX)
        ]
        return [number for number in found if number is not None] or [1]

    async def _count(self, generator: str) -> int | None:
        """The next number of a generator, None once it has run over."""
        # A sequential node's number counts the children ever made there.  So the generator is never
        # deleted, and a lost answer costs one number.
        try:
            path = await self._create(f"{generator}/{_ID_PREFIX}", b"", sequential=True)
        except RequestFailed as error:
            raise _failed(error, generator) from error
        self._zookeeper.submit(requests.delete(path, 0), lambda _: None)
        return metadata_format.number_of(path.rpartition("/")[2])

    # Requests

    async def _create(self, path: str, value: bytes, *, sequential: bool = False) -> str:
        """Make a node and its missing parents.  Raises `RequestFailed`, `LedgerError`."""
        # In a loop, as BookKeeper's clients remove empty parents meanwhile.
        request = requests.create(path, value, ephemeral=sequential, sequential=sequential)
        lost = False
        for _ in range(bounds.ZOOKEEPER_TRIES):
            try:
                made, _ = await self._call(request)
                return cast(str, made)
            except RequestFailed as error:
                lost = error.lost = lost or error.lost
                if error.failure is not Failure.NO_NODE:
                    raise
            await self._make_parents(path)
        raise LedgerError(
            f"The parents of {path} in ZooKeeper were removed {bounds.ZOOKEEPER_TRIES} times "
            "while a record was made: try again."
        )

    async def _make_parents(self, path: str) -> None:
        parts = path.split("/")
        for end in range(2, len(parts)):
            parent = "/".join(parts[:end])
            try:
                await self._call(requests.create(parent))
            except RequestFailed as error:
                if error.failure not in (Failure.NODE_EXISTS, Failure.NO_NODE):
                    raise _failed(error, parent) from error

    async def _read(self, request: Request) -> Value:
        """The answer to a read, None if there is no such node."""
        try:
            return (await self._call(request))[0]
        except RequestFailed as error:
            if error.failure is Failure.NO_NODE:
                return None
            raise _failed(error, "a record") from error

    async def _read_many(self, reads: list[Request]) -> list[Read]:
        if not reads:
            return []
        return cast("list[Read]", await self._read(requests.read_many(reads)))

    async def _call(self, request: Request) -> tuple[Value, bool]:
        try:
            return await self._zookeeper.call_again(request)
        except MetadataError as error:
            raise LedgerError(str(error)) from error

    # Bookies

    def _state_changed(self, state: Connection) -> None:
        if state is Connection.CONNECTED:
            self._watched = False
            self._stale.set()

    def _node_changed(self, _change: NodeChange) -> None:
        self._stale.set()

    async def _follow_bookies(self) -> None:
        """List the bookies after each change and reconnection, until an error."""
        # The watch comes first, so that no change is missed.  If it cannot be set, the bookies are
        # listed at least, and again each time this is restarted.
        while True:
            self._stale.clear()
            try:
                await self._watch_bookies()
            except LedgerError:
                await self._list_bookies()
                raise
            await self._list_bookies()
            await self._stale.wait()

    async def _watch_bookies(self) -> None:
        """Set the watches, unless they are set."""
        if self._watched:
            return
        # Noted before the calls: a reconnection meanwhile clears it.
        self._watched = True
        for path, recursive in ((self._paths.available, True), (self._racks_path, False)):
            try:
                await self._call(requests.add_watch(path, recursive=recursive))
            except BaseException as error:
                self._watched = False
                if isinstance(error, RequestFailed):
                    raise _failed(error, path) from error
                raise

    async def _list_bookies(self) -> None:
        names = await self._read_many(
            [
                requests.get_children(self._paths.available),
                requests.get_children(self._paths.read_only),
            ]
        )
        writable, read_only = (sorted(each) if isinstance(each, list) else [] for each in names)
        writable = [name for name in writable if name != metadata_format.READ_ONLY]
        records = await self._read_many(
            [
                requests.get_data(self._racks_path),
                *(requests.get_data(f"{self._paths.available}/{name}") for name in writable),
                *(requests.get_data(f"{self._paths.read_only}/{name}") for name in read_only),
            ]
        )
        split = 1 + len(writable)
        self._bookies = Bookies(
            _addresses(writable, records[1:split]),
            _addresses(read_only, records[split:]),
            self._racks(records[0]),
        )

    def _racks(self, record: Read) -> dict[BookieId, str]:
        """The racks; those known before if the record cannot be decoded."""
        if not isinstance(record, tuple):
            return {}
        try:
            return dict(metadata_format.decode_racks(record[0]))
        except UnreadableRecord as error:
            _log.warning("racks_unreadable", error=str(error))
            return dict(self._bookies.racks)


def _addresses(names: list[str], records: list[Read]) -> dict[BookieId, BookieAddress]:
    """The bookies that are still registered and have an address."""
    found: dict[BookieId, BookieAddress] = {}
    for name, record in zip(names, records, strict=True):
        if not isinstance(record, tuple):
            continue
        address = metadata_format.decode_bookie(BookieId(name), record[0])
        if address is not None:
            found[BookieId(name)] = address
    return found


def _value(answer: Value) -> bytes:
    return cast(tuple[bytes, Stat], answer)[0]


def _stat(answer: Value) -> Stat:
    return cast(tuple[bytes, Stat], answer)[1]


def _conflict(ledger_id: LedgerId) -> LedgerMetadataConflict:
    return LedgerMetadataConflict(
        f"The record of ledger {ledger_id} was made or changed by another: read it again."
    )


def _no_such_ledger(ledger_id: LedgerId) -> NoSuchLedger:
    return NoSuchLedger(f"There is no ledger {ledger_id}: it was deleted, or never made.")


def _failed(error: RequestFailed, path: str) -> LedgerError:
    return LedgerError(
        f"ZooKeeper refused a request for {path} ({error.failure.name}): look at the access "
        "rights of that node and the server's log."
    )
