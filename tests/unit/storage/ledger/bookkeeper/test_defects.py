"""A defect of this process, wherever it shows: whoever waits is told, and nobody waits for ever."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
import uvloop

from storage.ledger.bookkeeper.adds import Adds, WriterState
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.connection import BookieState
from storage.ledger.bookkeeper.ledger_metadata import LedgerState
from storage.ledger.bookkeeper.ledger_services import LedgerServices
from storage.ledger.bookkeeper.reads import LastConfirmedRead
from storage.ledger.bookkeeper.recovery import Recovery
from storage.ledger.bookkeeper.window import Window
from storage.ledger.bookkeeper.wire import ReplyDecoder
from storage.ledger.bookkeeper.writable_ledger import BookKeeperWritableLedger
from storage.ledger.store import LedgerAssertion, LedgerError
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S
from tests.unit.storage.ledger.bookkeeper.fake_bookie import FakeBookie
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookieClient,
    SimulatedMetadata,
)
from tests.unit.storage.ledger.bookkeeper.test_connection import Peer
from tests.unit.storage.ledger.bookkeeper.test_store import DATA, Ground, created, freeze, kill
from tests.unit.storage.ledger.local.support import Outcomes, append_all, read_all

ANY = pytest.mark.parametrize("kind", [RuntimeError, LedgerAssertion])
Reported = list[object]


@pytest.fixture
async def ground(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    set_bound(monkeypatch, "WRITER_DRAIN_S", 0.05)
    made = Ground()
    yield made
    for store in made.stores:
        await store.close()


@pytest.fixture
async def reported() -> Reported:
    """What the loop was told of."""
    found: Reported = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(context["exception"]))
    return found


def raising(error: Exception) -> Callable[..., object]:
    def fails(*_: object, **__: object) -> object:
        raise error

    return fails


def once(error: Exception, then: Callable[..., object]) -> Callable[..., object]:
    """Fails the first time."""
    errors = [error]

    def fails(*arguments: object, **named: object) -> object:
        if errors:
            raise errors.pop()
        return then(*arguments, **named)

    return fails


# Recovery, and looking


@ANY
@pytest.mark.parametrize("method", ["replied", "write_replied"])
async def test_a_recovery_ends_with_it_and_may_be_tried_again(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, method: str, kind: type[Exception]
) -> None:
    mine, theirs = await ground.store(), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA)
    defect = kind("a defect")
    monkeypatch.setattr(Recovery, method, once(defect, getattr(Recovery, method)))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(kind, match="a defect"):
            await theirs.open(ledger.ledger_id)
        assert theirs.counters.failed_recoveries == 1
        assert await read_all(await theirs.open(ledger.ledger_id)) == DATA


async def test_looking_without_recovery_ends_with_it(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = await ground.store(), await ground.store()
    ledger = await created(mine)
    await append_all(ledger, DATA)
    monkeypatch.setattr(LastConfirmedRead, "replied", raising(RuntimeError("a defect")))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(RuntimeError, match="a defect"):
            await theirs.open_no_recovery(ledger.ledger_id)


# Writing


async def told_of_the_end(ledger: BookKeeperWritableLedger, outcomes: Outcomes) -> None:
    """Everything appended has an error, what comes later too; the record is left alone."""
    for _, error in outcomes.all:
        assert isinstance(error, LedgerError)
    count = len(outcomes.all)
    ledger.append(b"later", outcomes)
    _, error = (await outcomes.wait(count + 1))[-1]
    assert isinstance(error, LedgerError)
    assert ledger.state is WriterState.FAILED
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(LedgerError):
            await ledger.close()


@ANY
@pytest.mark.parametrize("method", ["replied", "next_confirmed"])
async def test_a_writer_ends_when_answers_cannot_be_counted(
    ground: Ground,
    reported: Reported,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: type[Exception],
) -> None:
    ledger = await created(await ground.store())
    outcomes = Outcomes()
    defect = kind("a defect")
    monkeypatch.setattr(Adds, method, once(defect, getattr(Adds, method)))
    for entry in DATA:
        ledger.append(entry, outcomes)
    assert [entry_id for entry_id, _ in await outcomes.wait(len(DATA))] == [*range(len(DATA))]
    assert reported == [defect]
    await told_of_the_end(ledger, outcomes)
    assert ground.record(ledger.ledger_id).state is LedgerState.OPEN


@ANY
@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Adds, "begin_change"),
        (Adds, "replace"),
        (Adds, "end_change"),
        (LedgerServices, "choose_replacements"),
        (SimulatedMetadata, "write"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
async def test_a_writer_ends_when_bookies_cannot_be_replaced(
    ground: Ground,
    reported: Reported,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    kind: type[Exception],
) -> None:
    ledger = await created(await ground.store(2, 2, 2))
    await append_all(ledger, DATA[:3])
    outcomes = Outcomes()
    defect = kind("a defect")
    monkeypatch.setattr(owner, method, raising(defect))
    kill(ground.bookie_at(ledger.ledger_id, 0))
    for entry in DATA[3:6]:
        ledger.append(entry, outcomes)
    await outcomes.wait(3)
    assert reported == [defect]
    await told_of_the_end(ledger, outcomes)


async def test_a_writer_ends_when_the_change_before_an_append_cannot_begin(
    ground: Ground, reported: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await created(await ground.store())
    await append_all(ledger, DATA[:1])
    ledger._adds.change_due = True
    defect = RuntimeError("a defect")
    monkeypatch.setattr(Adds, "begin_change", raising(defect))
    outcomes = Outcomes()
    assert ledger.append(b"next", outcomes) == 1
    await outcomes.wait(1)
    assert reported == [defect]
    await told_of_the_end(ledger, outcomes)


async def test_a_writer_ends_when_an_entry_cannot_be_sent(
    ground: Ground, reported: Reported
) -> None:
    """It has its id, and nothing behind it could ever be confirmed."""
    ledger = await created(await ground.store())
    await append_all(ledger, DATA[:1])
    defect = RuntimeError("a defect")
    ledger._send_add = raising(defect)  # type: ignore[assignment]
    outcomes = Outcomes()
    assert ledger.append(b"next", outcomes) == 1
    assert (await outcomes.wait(1))[0][0] == 1
    assert reported == [defect]
    await told_of_the_end(ledger, outcomes)


async def test_a_store_closes_its_doors_when_a_writer_does_not_stop(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await ground.store()
    other = await created(store)
    ground.everywhere(freeze)
    outcomes = Outcomes()
    other.append(b"hangs", outcomes)
    stuck = await created(store)
    monkeypatch.setattr(stuck, "stop", raising_coroutine(RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        await store.close()
    assert isinstance((await outcomes.wait(1))[0][1], LedgerError)
    assert cast(SimulatedBookieClient, store._services.bookies)._closed


async def test_a_store_closes_its_doors_when_closing_is_cancelled(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = SimulatedMetadata(ground.cluster)
    closed: list[str] = []

    async def close() -> None:
        closed.append("metadata")

    monkeypatch.setattr(metadata, "close", close)
    store = await ground.store(metadata=metadata)
    stopping = asyncio.Event()

    async def stop(_reason: Exception) -> None:
        stopping.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(await created(store), "stop", stop)
    closing = asyncio.create_task(store.close())
    await stopping.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert cast(SimulatedBookieClient, store._services.bookies)._closed
    assert closed == ["metadata"]


def raising_coroutine(error: Exception) -> Callable[..., object]:
    async def fails(*_: object) -> None:
        raise error

    return fails


# A connection


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(Window, "tick"), (Window, "answered"), (ReplyDecoder, "feed")],
    ids=["tick", "answered", "feed"],
)
def test_defect_closes_the_connection_and_answers_every_request(
    monkeypatch: pytest.MonkeyPatch,
    factory: Callable[[], asyncio.AbstractEventLoop],
    owner: type,
    method: str,
) -> None:
    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        fake = FakeBookie()
        await fake.start()
        peer = Peer(fake, BookieOptions(request_timeout_s=0.2))
        await peer.open()
        if method == "tick":
            fake.hold()
        monkeypatch.setattr(owner, method, raising(RuntimeError("a defect")))
        peer.add(1, 0)
        async with asyncio.timeout(TIMEOUT_S):
            await peer.until_told(1)
        assert peer.told == [("add 1:0", ReplyCode.DISCONNECTED)]
        assert (peer.connection.state, peer.closed) == (BookieState.CLOSED, 1)
        await peer.connection.wait_closed()
        await fake.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(ask())
