"""The policy of how a stream is stored: copies of its ledgers, pauses between cursor writes."""

import pytest

from config import bounds
from magnetar.protocol.ids import EARLIEST
from storage.ledger.store import Copies
from storage.managed_ledger.types import Limits, Persistence
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.fakes import NAME, World, publish

OTHER = "public/default/persistent/other"
THREE = Persistence(Copies(3, 3, 2))
SELDOM = Persistence(cursor_writes_per_s=1 / 50)
WRITES_PER_LEDGER = 10


async def test_new_ledgers_of_a_stream_have_the_copies_of_its_policy() -> None:
    world = World(Limits(ledger_max_entries=WRITES_PER_LEDGER, ledger_min_age_ms=0))
    ledger, other = await world.open(), await world.open(OTHER)
    await publish(ledger, 1)
    world.persistence[NAME] = THREE
    # The present ledger goes on with the copies that it has.
    await publish(ledger, WRITES_PER_LEDGER - 1)
    await publish(other, 1)
    assert world.ledgers.copies == [None, None]
    await publish(ledger, 1)
    assert world.ledgers.copies == [None, None, THREE.copies]
    del world.persistence[NAME]
    await publish(ledger, WRITES_PER_LEDGER)
    assert world.ledgers.copies == [None, None, THREE.copies, None]


async def test_ledgers_of_cursors_have_the_copies_of_the_streams_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "CURSOR_INLINE_WRITES", 0)
    world = World()
    world.persistence[NAME] = THREE
    ledger = await world.open()
    cursor = await ledger.open_cursor("s", EARLIEST)
    (position,) = await publish(ledger, 1)
    cursor.acknowledge(position)
    await cursor.persist()
    assert cursor.ledger[0] != -1
    assert world.ledgers.copies == [THREE.copies, THREE.copies]


@pytest.mark.parametrize(
    ("rate", "pause_s"), [(0, 0.1), (100, 0.1), (2, 0.5), (0.1, 10), (1e-9, 60), (5e-324, 60)]
)
def test_a_rate_of_cursor_writes_makes_pauses_longer_and_none_shorter(
    rate: float, pause_s: float
) -> None:
    assert Persistence(cursor_writes_per_s=rate).cursor_pause_s(0.1) == pause_s
    assert bounds.CURSOR_PAUSE_MAX_S == 60
    assert Persistence(cursor_writes_per_s=rate).cursor_pause_s(100) == 100


async def test_a_cursor_is_written_as_seldom_as_the_policy_says_or_on_request() -> None:
    world = World(Limits(cursor_flush_ms=1))
    world.persistence[NAME] = SELDOM
    ledger, other = await world.open(), await world.open(OTHER)
    cursor = await ledger.open_cursor("s", EARLIEST)
    quick = await other.open_cursor("s", EARLIEST)
    positions = await publish(ledger, 2)
    await publish(other, 1)
    cursor.acknowledge(positions[0])
    quick.acknowledge_up_to(other.last_confirmed)
    await until(lambda: not quick.dirty)
    assert cursor.dirty
    await cursor.persist()
    assert not cursor.dirty
    del world.persistence[NAME]
    cursor.acknowledge(positions[1])
    await until(lambda: not cursor.dirty)
