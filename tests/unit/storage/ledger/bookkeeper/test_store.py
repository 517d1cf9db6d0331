"""The store and its handles, on bookies inside this process."""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import cast

import pytest

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper import wire
from storage.ledger.bookkeeper.adds import WriterState
from storage.ledger.bookkeeper.digest import Digest
from storage.ledger.bookkeeper.ensemble_choice import NotEnoughBookies
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict, VersionedMetadata
from storage.ledger.bookkeeper.reads import RangeRead
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.bookkeeper.writable_ledger import BookKeeperWritableLedger
from storage.ledger.store import (
    Copies,
    CorruptEntry,
    EntryTooLarge,
    LedgerBusy,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    NoSuchLedger,
)
from tests.support.bounds import set_bound
from tests.support.clocks import NOW_MS, FakeClock
from tests.support.waiting import until
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookie,
    SimulatedBookieClient,
    SimulatedCluster,
    SimulatedMetadata,
    Weather,
)
from tests.unit.storage.ledger.local.support import Outcomes, append_all, read_all

DATA = [b"entry %d" % number for number in range(20)]


class Ground:
    """Bookies, and the stores that were made on them."""

    def __init__(self, count: int = 5) -> None:
        weather = Weather(random.Random(1), slow_s=0.0002)
        loop = asyncio.get_running_loop()
        self.cluster = SimulatedCluster(loop, contextvars.Context(), weather)
        self.stores: list[BookKeeperLedgerStore] = []
        self.add_bookies(count)

    def add_bookies(self, count: int) -> None:
        for _ in range(count):
            bookie = SimulatedBookie(f"bookie-{len(self.cluster.bookies)}")
            self.cluster.bookies[bookie.id] = bookie

    async def store(
        self, *quorums: int, metadata: SimulatedMetadata | None = None, **more: object
    ) -> BookKeeperLedgerStore:
        ensemble, write, ack = quorums or (3, 3, 2)
        options = BookKeeperOptions(Copies(ensemble, write, ack))
        made = BookKeeperLedgerStore(
            metadata or SimulatedMetadata(self.cluster),
            SimulatedBookieClient(self.cluster),
            FakeClock(),
            random.Random(2),
            replace(options, **more),  # type: ignore[arg-type]
        )
        await made.start()
        self.stores.append(made)
        return made

    def record(self, ledger_id: LedgerId) -> LedgerMetadata:
        return self.cluster.records[ledger_id].metadata

    def put(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
        self.cluster.put(ledger_id, metadata)

    def bookie_at(self, ledger_id: LedgerId, place: int) -> SimulatedBookie:
        return self.cluster.bookies[self.record(ledger_id).last_ensemble.bookies[place]]

    def everywhere(self, change: Callable[[SimulatedBookie], None]) -> None:
        for bookie in self.cluster.bookies.values():
            change(bookie)


@pytest.fixture
async def ground(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    set_bound(monkeypatch, "WRITER_DRAIN_S", 0.05)
    made = Ground()
    yield made
    for store in made.stores:
        await store.close()


def kill(bookie: SimulatedBookie) -> None:
    bookie.up = False


def freeze(bookie: SimulatedBookie) -> None:
    bookie.frozen = True


async def created(store: BookKeeperLedgerStore) -> BookKeeperWritableLedger:
    return cast(BookKeeperWritableLedger, await store.create(custom={}))


async def test_the_record_of_a_new_ledger(ground: Ground) -> None:
    store = await ground.store(3, 2, 2, digest_type=DigestType.MAC, password=b"secret")
    ledger = await store.create(custom={"component": b"managed-ledger"})
    record = ground.record(ledger.ledger_id)
    assert (record.ensemble_size, record.write_quorum, record.ack_quorum) == (3, 2, 2)
    assert (record.digest_type, record.password) == (DigestType.MAC, b"secret")
    assert record.custom == {"component": b"managed-ledger"}
    assert (record.state, record.last_entry_id, record.ctime_ms) == (LedgerState.OPEN, -1, NOW_MS)
    assert record.ensembles[0].first_entry_id == 0
    await append_all(ledger, DATA)
    await ledger.close()
    assert await read_all(await store.open(ledger.ledger_id)) == DATA


async def test_an_id_that_others_took_is_left_to_them(ground: Ground) -> None:
    store = await ground.store()
    theirs = ground.record((await store.create(custom={"theirs": b""})).ledger_id)
    for ledger_id in (LedgerId(2), LedgerId(3)):
        ground.put(ledger_id, theirs)
    assert (await store.create(custom={})).ledger_id == 4
    assert ground.record(LedgerId(2)) == theirs


async def test_ids_are_not_tried_for_ever(ground: Ground) -> None:
    store = await ground.store()
    theirs = ground.record((await store.create(custom={})).ledger_id)
    for number in range(bounds.LEDGER_ID_TRIES):
        ground.put(LedgerId(2 + number), theirs)
    with pytest.raises(LedgerError, match="taken already"):
        await store.create(custom={})


@pytest.mark.parametrize("quorums", [(2, 3, 2), (3, 2, 3), (3, 2, 0), (0, 0, 0)])
def test_quorums_that_are_none(quorums: tuple[int, int, int]) -> None:
    with pytest.raises(LedgerError, match="impossible"):
        Copies(*quorums)


async def test_a_ledger_is_made_with_the_copies_that_are_asked_for(ground: Ground) -> None:
    store = await ground.store(3, 3, 2)
    made = [
        ground.record((await store.create(custom={}, copies=copies)).ledger_id)
        for copies in (None, Copies(4, 2, 1))
    ]
    assert [(each.ensemble_size, each.write_quorum, each.ack_quorum) for each in made] == [
        (3, 3, 2),
        (4, 2, 1),
    ]
    assert [len(each.last_ensemble.bookies) for each in made] == [3, 4]


async def test_too_few_bookies(ground: Ground) -> None:
    with pytest.raises(NotEnoughBookies):
        await (await ground.store(6, 2, 2)).create(custom={})


async def test_an_entry_above_the_frame_size_is_refused_alone(ground: Ground) -> None:
    store = await ground.store(frame_bytes=1000)
    ledger = await created(store)
    overhead = 28 + Digest(DigestType.CRC32C, b"").overhead_bytes
    assert store.max_entry_bytes == 1000 - overhead
    with pytest.raises(EntryTooLarge, match="send less"):
        ledger.append(b"x" * (1001 - overhead), Outcomes())
    await append_all(ledger, [b"x" * (1000 - overhead), b"next"])
    assert ledger.last_add_confirmed == 1


async def test_a_header_has_what_was_confirmed_when_it_was_sent(ground: Ground) -> None:
    ledger = await created(await ground.store(3, 3, 3))
    await append_all(ledger, DATA[:3])
    await append_all(ledger, DATA[3:5])
    digest = Digest(DigestType.CRC32C, b"")
    for bookie in (ground.bookie_at(ledger.ledger_id, place) for place in range(3)):
        bodies = [bookie.entries[ledger.ledger_id, number] for number in range(5)]
        opened = [digest.open(body, ledger.ledger_id, None) for body in bodies]
        assert [entry.last_add_confirmed for entry in opened] == [-1, -1, -1, 2, 2]
        assert [entry.length for entry in opened] == [7, 14, 21, 28, 35]


@pytest.mark.parametrize("digest", DigestType)
async def test_the_largest_entry_fits_into_a_frame(ground: Ground, digest: DigestType) -> None:
    store = await ground.store(frame_bytes=1000, digest_type=digest, password=b"p")
    body = Digest(digest, b"p").seal(1, 0, -1, 0, bytes(store.max_entry_bytes))
    assert wire.ADD_HEAD_BYTES + sum(len(piece) for piece in body) == 1000


async def test_pending_adds_are_bounded_over_all_ledgers(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or connections, on which all of them meet, would refuse what has an id already."""
    store = await ground.store()
    ledger, other = await created(store), await created(store)
    outcomes = Outcomes()
    set_bound(monkeypatch, "LEDGER_PENDING_ADDS", 2)
    assert [ledger.append(b"x", outcomes), ledger.append(b"x", outcomes)] == [0, 1]
    for each in (ledger, other):
        with pytest.raises(LedgerBusy, match="wait for bookies"):
            each.append(b"x", outcomes)
    await outcomes.wait(2)
    set_bound(monkeypatch, "LEDGER_PENDING_BYTES", 1)
    assert ledger.append(b"x", outcomes) == 2
    for each in (ledger, other):
        with pytest.raises(LedgerBusy, match="wait for bookies"):
            each.append(b"x", outcomes)
    assert await outcomes.wait(3) == [(0, None), (1, None), (2, None)]
    await append_all(other, [b"x"])
    assert (store.counters.recoveries, store.counters.failed_adds) == (0, 0)


async def test_abandoned_appends_free_the_bound_of_pending_adds(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await ground.store()
    ledger, other = await created(store), await created(store)
    ground.everywhere(freeze)
    set_bound(monkeypatch, "LEDGER_PENDING_ADDS", 2)
    outcomes = Outcomes()
    ledger.append(b"x", outcomes)
    ledger.append(b"x", outcomes)
    ledger.abandon(LedgerFenced("gone"))
    await outcomes.wait(2)
    other.append(b"x", outcomes)
    other.append(b"x", outcomes)
    with pytest.raises(LedgerBusy):
        other.append(b"x", outcomes)


def test_bound_of_waiting_requests_covers_all_pending_adds() -> None:
    assert bounds.BOOKIE_WAITING_REQUESTS > bounds.LEDGER_PENDING_ADDS
    overhead = wire.ADD_HEAD_BYTES + Digest(DigestType.MAC, b"").overhead_bytes
    heads = bounds.LEDGER_PENDING_ADDS * overhead
    one_more = bounds.BOOKIE_FRAME_BYTES
    assert bounds.LEDGER_PENDING_BYTES + heads + one_more <= bounds.BOOKIE_WAITING_BYTES


async def test_a_bookie_dies_under_load(ground: Ground) -> None:
    store = await ground.store(3, 2, 2)
    ledger = await created(store)
    await append_all(ledger, DATA[:5])
    outcomes = Outcomes()
    kill(ground.bookie_at(ledger.ledger_id, 1))
    dead = ground.record(ledger.ledger_id).last_ensemble.bookies[1]
    for entry in DATA[5:]:
        ledger.append(entry, outcomes)
    assert await outcomes.wait(15) == [(number, None) for number in range(5, 20)]
    record = ground.record(ledger.ledger_id)
    assert [dead in ensemble.bookies for ensemble in record.ensembles] == [True, False]
    assert 5 <= record.last_ensemble.first_entry_id <= 7
    assert store.counters.ensemble_changes == 1
    assert (store.counters.adds, store.counters.failed_adds) == (20, 0)
    assert store.counters.add_bytes == sum(map(len, DATA))
    await ledger.close()
    assert await read_all(await store.open(ledger.ledger_id)) == DATA


async def test_no_bookie_is_left(ground: Ground) -> None:
    store = await ground.store(5, 3, 3)
    ledger = await created(store)
    await append_all(ledger, DATA[:3])
    kill(ground.bookie_at(ledger.ledger_id, 0))
    outcomes = Outcomes()
    for entry in DATA[3:6]:
        ledger.append(entry, outcomes)
    await outcomes.wait(3)
    failures = {type(error) for _, error in outcomes.all if error is not None}
    assert failures == {NotEnoughBookies}
    assert ledger.append(b"later", outcomes) == 6
    assert isinstance((await outcomes.wait(4))[3][1], NotEnoughBookies)
    with pytest.raises(NotEnoughBookies):
        await ledger.close()
    assert ground.record(ledger.ledger_id).state is LedgerState.OPEN
    ground.everywhere(lambda bookie: setattr(bookie, "up", True))
    reader = await store.open(ledger.ledger_id)
    assert await read_all(reader) == DATA[: reader.last_add_confirmed + 1]
    assert reader.last_add_confirmed >= 2


async def test_a_failure_after_confirmation_changes_the_ensemble_before_the_next_add(
    ground: Ground,
) -> None:
    ground.cluster.timeout_s = 0.1
    store = await ground.store(3, 3, 2)
    ledger = await created(store)
    third = ground.bookie_at(ledger.ledger_id, 2)
    freeze(third)
    await append_all(ledger, DATA[:1])
    assert len(ground.record(ledger.ledger_id).ensembles) == 1
    await until(lambda: ledger._adds.change_due)
    await append_all(ledger, DATA[1:2])
    record = ground.record(ledger.ledger_id)
    assert third.id not in record.last_ensemble.bookies
    assert store.counters.bookie_failures == 1


async def test_a_read_only_bookie_is_replaced(ground: Ground) -> None:
    ledger = await created(await ground.store(2, 2, 2))
    old = ground.bookie_at(ledger.ledger_id, 0)
    old.read_only = True
    await append_all(ledger, DATA)
    assert old.id not in ground.record(ledger.ledger_id).last_ensemble.bookies


async def test_bookies_that_fail_again_and_again_are_left_out(ground: Ground) -> None:
    store = await ground.store(2, 2, 2)
    bad = BookieId("bookie-0")
    loop = asyncio.get_running_loop()
    for number in range(bounds.BOOKIE_ERRORS):
        store._services.quarantine.failed(bad, loop.time() - 10 + 2 * number)
    for _ in range(20):
        ledger = await created(store)
        assert bad not in ground.record(ledger.ledger_id).last_ensemble.bookies


async def test_another_client_takes_over(ground: Ground) -> None:
    mine, theirs = await ground.store(), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA)
    reader = await theirs.open(ledger.ledger_id)
    assert (reader.last_add_confirmed, theirs.counters.recoveries) == (19, 1)
    outcomes = Outcomes()
    ledger.append(b"late", outcomes)
    ((_, error),) = await outcomes.wait(1)
    assert isinstance(error, LedgerFenced)
    with pytest.raises(LedgerFenced):
        ledger.append(b"later", outcomes)
    with pytest.raises(LedgerFenced):
        await ledger.close()
    assert mine.counters.fenced == 1
    assert await read_all(await mine.open(ledger.ledger_id)) == DATA


async def test_a_change_finds_that_another_client_took_over(ground: Ground) -> None:
    ledger = await created(await ground.store(2, 2, 2))
    record = ground.record(ledger.ledger_id)
    ground.put(ledger.ledger_id, replace(record, state=LedgerState.IN_RECOVERY))
    kill(ground.bookie_at(ledger.ledger_id, 0))
    outcomes = Outcomes()
    ledger.append(b"late", outcomes)
    ((_, error),) = await outcomes.wait(1)
    assert isinstance(error, LedgerFenced)


async def test_a_deleted_record_fences_the_writer(ground: Ground) -> None:
    mine, theirs = await ground.store(2, 2, 2), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA[:1])
    await theirs.delete(ledger.ledger_id)
    with pytest.raises(LedgerFenced):
        await ledger.close()
    with pytest.raises(LedgerFenced):
        ledger.append(b"late", Outcomes())


class LostAnswers(SimulatedMetadata):
    """Writes take effect, and look like conflicts."""

    async def write(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, *, expect: int
    ) -> VersionedMetadata:
        await super().write(ledger_id, metadata, expect=expect)
        raise LedgerMetadataConflict("no answer came: read it again.")


async def test_a_close_that_is_there_already_is_a_close(ground: Ground) -> None:
    store = await ground.store(metadata=LostAnswers(ground.cluster))
    ledger = await created(store)
    await append_all(ledger, DATA)
    await ledger.close()
    await ledger.close()
    record = ground.record(ledger.ledger_id)
    assert (record.state, record.last_entry_id) == (LedgerState.CLOSED, 19)


@pytest.mark.parametrize(
    ("last", "length", "state"),
    [(18, 100, LedgerState.CLOSED), (19, 1, LedgerState.CLOSED), (-1, 0, LedgerState.IN_RECOVERY)],
)
async def test_another_end_is_not_ours(
    ground: Ground, last: int, length: int, state: LedgerState
) -> None:
    ledger = await created(await ground.store())
    await append_all(ledger, DATA)
    record = ground.record(ledger.ledger_id)
    ground.put(ledger.ledger_id, replace(record, state=state, last_entry_id=last, length=length))
    with pytest.raises(LedgerFenced):
        await ledger.close()
    assert ledger.state is WriterState.FAILED


async def test_a_close_goes_on_top_of_what_others_rewrote(ground: Ground) -> None:
    ledger = await created(await ground.store())
    await append_all(ledger, DATA)
    ground.cluster.touch(ledger.ledger_id)
    await ledger.close()
    record = ground.record(ledger.ledger_id)
    assert (record.state, "touched" in record.custom) == (LedgerState.CLOSED, True)


async def test_a_close_that_failed_may_be_tried_again(ground: Ground) -> None:
    ledger = await created(await ground.store())
    await append_all(ledger, DATA)
    ground.cluster.weather.metadata_error = 1.0
    with pytest.raises(LedgerError):
        await ledger.close()
    ground.cluster.weather.metadata_error = 0.0
    await ledger.close()
    assert ground.record(ledger.ledger_id).state is LedgerState.CLOSED


async def test_a_broken_callback_does_not_keep_the_others(ground: Ground) -> None:
    ledger = await created(await ground.store())
    outcomes = Outcomes()
    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))

    def broken(_entry_id: int, _error: LedgerError | None) -> None:
        raise ValueError("broken")

    ledger.append(b"a", outcomes)
    ledger.append(b"b", broken)
    ledger.append(b"c", outcomes)
    assert await outcomes.wait(2) == [(0, None), (2, None)]
    assert [type(error) for error in reported] == [ValueError]


async def test_entries_that_were_moved_are_found(ground: Ground) -> None:
    """As auto-recovery does after a bookie was lost: other bookies, and another record."""
    store = await ground.store(2, 2, 2)
    ledger = await created(store)
    await append_all(ledger, DATA)
    await ledger.close()
    reader = await store.open(ledger.ledger_id)
    record = ground.record(ledger.ledger_id)
    old = record.last_ensemble.bookies
    new = tuple(b for b in ground.cluster.bookies if b not in old)[:2]
    for place in range(2):
        source, target = ground.cluster.bookies[old[place]], ground.cluster.bookies[new[place]]
        target.entries, source.entries = source.entries, {}
    ground.put(ledger.ledger_id, replace(record, ensembles=(Ensemble(0, new),)))
    assert await read_all(reader) == DATA
    assert store.counters.read_retries > 0
    retries = store.counters.read_retries
    assert await read_all(reader) == DATA
    assert store.counters.read_retries == retries


async def test_a_ledger_that_others_deleted(ground: Ground) -> None:
    mine, theirs = await ground.store(), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA)
    await ledger.close()
    reader = await mine.open(ledger.ledger_id)
    await theirs.delete(ledger.ledger_id)
    ground.everywhere(lambda bookie: bookie.entries.clear())
    with pytest.raises(NoSuchLedger):
        await reader.read(0, 0, max_bytes=1)


async def test_replicas_that_are_damaged(ground: Ground) -> None:
    store = await ground.store(3, 2, 2)
    ledger = await created(store)
    await append_all(ledger, DATA)
    await ledger.close()
    reader = await store.open(ledger.ledger_id)
    first = ground.bookie_at(ledger.ledger_id, 0)
    first.entries = {place: body[:-1] + b"?" for place, body in first.entries.items()}
    assert await read_all(reader) == DATA
    for place in (1, 2):
        bookie = ground.bookie_at(ledger.ledger_id, place)
        bookie.entries = {place: body[:-1] + b"?" for place, body in bookie.entries.items()}
    with pytest.raises(CorruptEntry):
        await reader.read(0, 5, max_bytes=1000)


@pytest.mark.parametrize("replied", ["entry_replied", "batch_replied"])
async def test_a_defect_while_an_answer_is_taken_ends_the_read(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, replied: str
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    store = await (ground.store(3, 2, 2) if replied == "entry_replied" else ground.store())
    ledger = await created(store)
    await append_all(ledger, DATA)
    await ledger.close()
    reader = await store.open(ledger.ledger_id)
    monkeypatch.setattr(RangeRead, replied, fails)
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(reader.read(0, 5, max_bytes=1000), 5)


@pytest.mark.parametrize("what", [kill, lambda bookie: bookie.entries.clear()])
async def test_entries_that_cannot_be_had(
    ground: Ground, what: Callable[[SimulatedBookie], None]
) -> None:
    ledger = await created(await ground.store())
    await append_all(ledger, DATA)
    ground.everywhere(what)
    with pytest.raises(LedgerError, match="Entry 3") as caught:
        await ledger.read(3, 5, max_bytes=1000)
    assert type(caught.value) is LedgerError


async def test_recovery_waits_for_enough_bookies(ground: Ground) -> None:
    mine, theirs = await ground.store(3, 2, 2), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA)
    for place in (0, 1):
        kill(ground.bookie_at(ledger.ledger_id, place))
    with pytest.raises(LedgerError, match="cannot be recovered now"):
        await theirs.open(ledger.ledger_id)
    with pytest.raises(LedgerError, match="cannot be opened now"):
        await theirs.open_no_recovery(ledger.ledger_id)
    assert theirs.counters.failed_recoveries == 1
    ground.everywhere(lambda bookie: setattr(bookie, "up", True))
    assert await read_all(await theirs.open(ledger.ledger_id)) == DATA


async def test_looking_without_recovery(ground: Ground) -> None:
    mine, theirs = await ground.store(), await ground.store()
    ledger = await created(mine)
    assert (await theirs.open_no_recovery(ledger.ledger_id)).last_add_confirmed == -1
    for entry in DATA:
        await append_all(ledger, [entry])
    reader = await theirs.open_no_recovery(ledger.ledger_id)
    assert (reader.last_add_confirmed, reader.length) == (18, sum(map(len, DATA[:19])))
    assert await read_all(reader) == DATA[:19]
    assert ledger.state is WriterState.OPEN
    await ledger.close()
    closed = await theirs.open_no_recovery(ledger.ledger_id)
    assert (closed.last_add_confirmed, closed.length) == (19, ledger.length)


async def test_opening_gives_up_on_what_its_own_writer_waits_for(ground: Ground) -> None:
    store = await ground.store(2, 2, 2)
    ledger = await created(store)
    await append_all(ledger, DATA[:3])
    freeze(ground.bookie_at(ledger.ledger_id, 0))
    outcomes = Outcomes()
    ledger.append(b"hangs", outcomes)
    opening = asyncio.create_task(store.open(ledger.ledger_id))
    ((entry_id, error),) = await outcomes.wait(1)
    assert (entry_id, type(error)) == (3, LedgerFenced)
    ground.everywhere(lambda bookie: setattr(bookie, "frozen", False))
    assert (await opening).last_add_confirmed in (2, 3)


async def test_closing_the_store_ends_what_hangs(ground: Ground) -> None:
    store = await ground.store(2, 2, 2)
    ledger = await created(store)
    outcomes = Outcomes()
    ground.everywhere(freeze)
    ledger.append(b"hangs", outcomes)
    await store.close()
    ((_, error),) = await outcomes.wait(1)
    assert isinstance(error, LedgerClosed)
    assert ground.record(ledger.ledger_id).state is LedgerState.OPEN
