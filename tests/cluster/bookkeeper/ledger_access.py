"""Short ways to write and read ledgers on real bookies, through the store and past it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.bookkeeper.auth import NewAuthProvider
from storage.ledger.bookkeeper.bookie_client import BookieClient, ReplyCode
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.bookies import BookiePool
from storage.ledger.bookkeeper.digest import Digest, OpenedEntry, master_key
from storage.ledger.bookkeeper.ledger_metadata import BookieId, DigestType, LedgerMetadata
from storage.ledger.bookkeeper.open import open_bookkeeper
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.store import Copies, LedgerError, ReadableLedger, WritableLedger
from storage.metadata.access import StoreAccess
from tests.servers.bookie_part import MAX_FRAME_BYTES

Quorums = tuple[int, int, int]
STRIPED: Quorums = (3, 2, 2)
REQUEST_TIMEOUT_S = 20.0
"""For a machine that has much else to do."""


class Seal(NamedTuple):
    """What protects the entries of a ledger."""

    digest_type: DigestType
    password: bytes

    @property
    def name(self) -> str:
        """As tests are called."""
        return f"{self.digest_type.name}-{self.password.decode() or 'none'}"


USUAL = Seal(DigestType.CRC32C, b"")


@asynccontextmanager
async def store_at(
    uri: str,
    quorums: Quorums = STRIPED,
    seal: Seal = USUAL,
    *,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    auth: NewAuthProvider | None = None,
) -> AsyncIterator[BookKeeperLedgerStore]:
    """A store of its own, opened as a broker opens it."""
    store = await open_bookkeeper(
        uri,
        SystemClock(),
        random.Random(),
        ledgers=BookKeeperOptions(
            Copies(*quorums), seal.digest_type, seal.password, MAX_FRAME_BYTES
        ),
        bookies=BookieOptions(
            request_timeout_s=request_timeout_s, max_frame_bytes=MAX_FRAME_BYTES, auth=auth
        ),
        access=StoreAccess(),
    )
    try:
        yield store
    finally:
        await store.close()


async def append(ledger: WritableLedger, *entries: bytes) -> list[int]:
    """Append all at once; their ids when all are durable.  Raises the first error."""
    loop = asyncio.get_running_loop()
    told: list[asyncio.Future[int]] = []
    for entry in entries:
        future: asyncio.Future[int] = loop.create_future()

        def done(
            entry_id: int, error: LedgerError | None, future: asyncio.Future[int] = future
        ) -> None:
            if error is None:
                future.set_result(entry_id)
            else:
                future.set_exception(error)

        ledger.append(entry, done)
        told.append(future)
    outcomes = await asyncio.gather(*told, return_exceptions=True)
    return [raised(outcome) for outcome in outcomes]


def raised(outcome: int | BaseException) -> int:
    """The outcome, unless it is an error."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def written(store: BookKeeperLedgerStore, *entries: bytes) -> WritableLedger:
    """A new ledger with these entries, open."""
    ledger = await store.create(custom={})
    await append(ledger, *entries)
    return ledger


async def read_all(reader: ReadableLedger, max_bytes: int = 64 << 20) -> list[bytes]:
    """Every entry up to the last add confirmed."""
    found: list[bytes] = []
    last = reader.last_add_confirmed
    while len(found) <= last:
        found += await reader.read(len(found), last, max_bytes=max_bytes)
    return found


def ends(entries: Sequence[bytes]) -> list[int]:
    """Length of a ledger with these entries, up to and with each of them."""
    return [sum(map(len, entries[: place + 1])) for place in range(len(entries))]


async def record_of(store: BookKeeperLedgerStore, ledger_id: int) -> LedgerMetadata:
    """The ledger's record as it is stored."""
    return (await store._services.metadata.read(LedgerId(ledger_id))).metadata


async def members(store: BookKeeperLedgerStore, ledger_id: int) -> tuple[BookieId, ...]:
    """The bookies of the last ensemble."""
    return (await record_of(store, ledger_id)).last_ensemble.bookies


# Past the store


@asynccontextmanager
async def raw_bookies() -> AsyncIterator["RawBookies"]:
    """Connections to bookies and nothing else."""
    pool = BookiePool(
        lambda _: None,
        BookieOptions(request_timeout_s=REQUEST_TIMEOUT_S, max_frame_bytes=MAX_FRAME_BYTES),
    )
    try:
        yield RawBookies(pool)
    finally:
        await pool.close()


class RawBookies:
    """Single copies of single entries."""

    def __init__(self, pool: BookieClient) -> None:
        self._pool = pool

    async def read(self, bookie: BookieId, ledger_id: int, entry_id: int) -> ReplyCode:
        """What a bookie says to being asked for an entry."""
        return (await self._read(bookie, ledger_id, entry_id))[0]

    async def holds(self, bookie: BookieId, ledger_id: int, entry_id: int) -> bool:
        """Whether the bookie has a copy."""
        return await self.read(bookie, ledger_id, entry_id) is ReplyCode.OK

    async def opened(
        self, bookie: BookieId, ledger_id: int, entry_id: int, seal: Seal = USUAL
    ) -> OpenedEntry:
        """The copy that a bookie holds.  Raises `DigestMismatch` if it is damaged."""
        code, body = await self._read(bookie, ledger_id, entry_id)
        assert code is ReplyCode.OK
        return Digest(*seal).open(body, ledger_id, entry_id)

    async def put(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        body: Sequence[bytes],
        password: bytes = b"",
    ) -> None:
        """Store one copy, whatever it is, even where the ledger is fenced."""
        code = await self.add(bookie, ledger_id, entry_id, body, password, recovery=True)
        assert code is ReplyCode.OK

    async def add(
        self,
        bookie: BookieId,
        ledger_id: int,
        entry_id: int,
        body: Sequence[bytes],
        password: bytes = b"",
        *,
        recovery: bool = False,
    ) -> ReplyCode:
        """What a bookie says to being sent one copy, as a writer sends it."""
        told: asyncio.Future[ReplyCode] = asyncio.get_running_loop().create_future()
        self._pool.add(
            bookie,
            LedgerId(ledger_id),
            entry_id,
            master_key(password),
            body,
            told.set_result,
            recovery=recovery,
        )
        return await told

    async def _read(
        self, bookie: BookieId, ledger_id: int, entry_id: int
    ) -> tuple[ReplyCode, bytes]:
        told: asyncio.Future[tuple[ReplyCode, bytes]] = asyncio.get_running_loop().create_future()
        self._pool.read(
            bookie,
            LedgerId(ledger_id),
            entry_id,
            lambda code, body: told.set_result((code, body)),
        )
        return await told
