"""What tests of ledgers that Python and Java share have in common.

Java learns from watches which bookies there are, and by the driver of Pulsar also what became of
records and of the list of ledgers: what others did a moment ago it may not know yet.  So it is
asked until it does, and judged then.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ledger_metadata import LedgerState
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from tests.cluster.bookkeeper.ledger_access import (
    STRIPED,
    USUAL,
    Quorums,
    Seal,
    ends,
    read_all,
    record_of,
)
from tests.servers.bookkeeper_peer.peer import (
    BOOKIE_HANDLE_NOT_AVAILABLE,
    NO_SUCH_LEDGER_METADATA,
    PeerClient,
    PeerEntry,
    PeerError,
    PeerMetadata,
    PeerReader,
    PeerWriter,
)
from tests.support.child_process import once_it_is

NOTICED_WITHIN_S: Final = 60
"""Java knows what others did, on a machine that has much else to do."""
POLL_S: Final = 0.05

_Answer = TypeVar("_Answer")

ENTRIES = (b"entry-0", b"", bytes(range(256)), b"x" * 5000, b"last")
LAST = len(ENTRIES) - 1
LENGTH = sum(map(len, ENTRIES))
CUSTOM = {"application": b"pulsar", "component": b"managed-ledger", "empty": b"", "raw": b"\0\xff"}


async def java_ledger(
    java: PeerClient, *entries: bytes, quorums: Quorums = STRIPED, seal: Seal = USUAL
) -> PeerWriter:
    """A new ledger of the Java client with these entries, open."""
    writer = await java.create_ledger(
        ensemble_size=quorums[0],
        write_quorum_size=quorums[1],
        ack_quorum_size=quorums[2],
        digest_type=seal.digest_type.name,
        password=seal.password,
        custom_metadata=CUSTOM,
    )
    assert await writer.add(*entries) == list(range(len(entries)))
    return writer


async def java_open(
    java: PeerClient, ledger_id: int, seal: Seal = USUAL, *, recover: bool
) -> PeerReader:
    return await java.open_ledger(
        ledger_id, recover=recover, digest_type=seal.digest_type.name, password=seal.password
    )


async def once_java_says(
    ask: Callable[[], Awaitable[_Answer]], is_so: Callable[[_Answer], bool]
) -> _Answer:
    """Its first answer that is so; if none is in time the last one, for the caller to judge."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + NOTICED_WITHIN_S
    while not is_so(answer := await ask()) and loop.time() < deadline:
        await asyncio.sleep(POLL_S)
    return answer


async def java_lists(java: PeerClient, ledger_ids: set[int]) -> None:
    """It finds all of these ledgers."""
    listed = await once_java_says(java.list_ledgers, lambda found: ledger_ids <= set(found))
    assert ledger_ids <= set(listed)


async def gone_for_java(java: PeerClient, ledger_id: int) -> None:
    """It finds no such ledger."""

    async def is_gone() -> bool:
        try:
            reader = await java_open(java, ledger_id, recover=False)
        except PeerError as refused:
            if refused.code != NO_SUCH_LEDGER_METADATA:
                raise
            return True
        await reader.close()
        return False

    await once_it_is(is_gone, f"the end of ledger {ledger_id} for Java", NOTICED_WITHIN_S)


async def java_reads(
    reader: PeerReader, entries: Sequence[bytes], *, length: int | None = None
) -> None:
    """It finds a closed ledger with exactly these entries, and their length unless one is given."""
    if length is None:
        length = ends(entries)[-1] if entries else 0
    assert (reader.closed, reader.last_add_confirmed) == (True, len(entries) - 1)
    assert reader.length == length
    found = await all_of(reader, len(entries)) if entries else []
    assert [each.data for each in found] == list(entries)
    assert [each.length for each in found] == ends(entries)


async def all_of(reader: PeerReader, count: int) -> list[PeerEntry]:
    """So many entries, as soon as Java has noticed that the bookies which hold them are back."""
    found: list[PeerEntry] = []

    async def are_read() -> bool:
        try:
            found[:] = await reader.read(0, count - 1)
        except PeerError as refused:
            if refused.code != BOOKIE_HANDLE_NOT_AVAILABLE:
                raise
            return False
        return True

    what = f"an answer of the bookies of ledger {reader.ledger_id} to Java"
    await once_it_is(are_read, what, NOTICED_WITHIN_S)
    return found


async def python_reads(
    store: BookKeeperLedgerStore,
    ledger_id: int,
    entries: Sequence[bytes],
    *,
    length: int | None = None,
) -> None:
    """It finds a closed ledger with exactly these entries, however it opens it, and their length
    unless one is given.
    """
    if length is None:
        length = sum(map(len, entries))
    for opening in (store.open_no_recovery, store.open):
        reader = await opening(LedgerId(ledger_id))
        assert reader.last_add_confirmed == len(entries) - 1
        assert reader.length == length
        assert await read_all(reader) == list(entries)


async def both_agree(
    store: BookKeeperLedgerStore, java: PeerClient, ledger_id: int, last: int, length: int
) -> None:
    """Each client understands the record as the other one does, and it is closed there."""
    record = await record_of(store, ledger_id)
    ensembles = [(each.first_entry_id, list(each.bookies)) for each in record.ensembles]

    def is_newest(metadata: PeerMetadata) -> bool:
        return metadata.state == "CLOSED" and list(metadata.ensembles.items()) == ensembles

    metadata = await once_java_says(lambda: java.ledger_metadata(ledger_id), is_newest)
    assert record.state is LedgerState.CLOSED
    assert (record.last_entry_id, record.length) == (last, length)
    assert metadata.state == "CLOSED"
    assert (metadata.last_entry_id, metadata.length) == (last, length)
    assert metadata.digest_type == record.digest_type.name
    assert metadata.password == record.password
    assert metadata.custom_metadata == record.custom
    assert (metadata.ensemble_size, metadata.write_quorum_size, metadata.ack_quorum_size) == (
        record.ensemble_size,
        record.write_quorum,
        record.ack_quorum,
    )
    assert list(metadata.ensembles.items()) == ensembles
