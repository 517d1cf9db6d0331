"""Entries that are appended together: groups of their callbacks, and what is not taken."""

import asyncio
from collections.abc import Sequence

import pytest

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import DiskFull, LedgerBusy
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Limits, ManagedLedgerBusy
from tests.support.waiting import until
from tests.unit.storage.managed_ledger.fakes import AppendFault, World, contents, data_of, publish


class Groups:
    """What group callbacks said: positions, or how often an error came."""

    def __init__(self) -> None:
        self.said: list[list[Position] | type[MagnetarError]] = []
        self.done = self._done

    def _done(self, positions: Sequence[Position], error: MagnetarError | None) -> None:
        self.said.append(list(positions) if error is None else type(error))

    def append(self, ledger: ManagedLedger, entries: list[bytes]) -> None:
        taken = 0
        while taken < len(entries):
            more = ledger.append_all(entries[taken:], self.done)
            assert 0 < more <= len(entries) - taken
            taken += more

    @property
    def positions(self) -> list[Position]:
        return [position for group in self.said if isinstance(group, list) for position in group]


async def test_entries_appended_together_are_confirmed_together_and_in_order() -> None:
    ledger = await World(Limits()).open()
    await publish(ledger, 1)
    one, other = Groups(), Groups()
    seen: list[Position | None] = []
    one.append(ledger, [b"0", b"1"])
    one.append(ledger, [b"2"])
    ledger.append(b"3", lambda position, _: seen.append(position))
    ledger.append(b"4", lambda position, _: seen.append(position))
    other.append(ledger, [b"5"])
    one.append(ledger, [b"6", b"7"])
    await until(lambda: len(one.said) == 2)
    at = [Position(1, entry_id) for entry_id in range(1, 9)]
    assert one.said == [at[:3], at[6:]]
    assert seen == at[3:5]
    assert other.said == [at[5:6]]
    assert data_of(await contents(ledger))[1:] == [b"%d" % number for number in range(8)]


async def test_groups_end_with_their_ledger() -> None:
    ledger = await World().open()
    groups = Groups()
    entries = [f"e{number}".encode() for number in range(35)]
    groups.append(ledger, entries)
    await until(lambda: len(groups.positions) == 35)
    assert all(len({position.ledger_id for position in group}) == 1 for group in groups.said)  # type: ignore[union-attr]
    assert groups.positions == [entry.position for entry in await contents(ledger)]
    assert data_of(await contents(ledger)) == entries
    assert len({position.ledger_id for position in groups.positions}) == 4


async def test_append_of_a_group_returns_the_count_taken_or_fails() -> None:
    world = World(Limits(roll_over_buffer_entries=3))
    ledger = await world.open()
    world.ledgers.gates["create"] = asyncio.Event()
    groups = Groups()
    with pytest.raises(ManagedLedgerBusy):
        groups.append(ledger, [b"0", b"1", b"2", b"one too many"])
    world.ledgers.gates["create"].set()
    await until(lambda: len(groups.positions) == 3)
    assert data_of(await contents(ledger)) == [b"0", b"1", b"2"]


async def test_busy_ledger_takes_as_many_entries_of_a_group_as_fit() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    world.ledgers.room = 2
    groups = Groups()
    with pytest.raises(LedgerBusy):
        groups.append(ledger, [b"0", b"1", b"one too many"])
    await until(lambda: len(groups.positions) == 2)
    assert data_of(await contents(ledger)) == [b"e0", b"0", b"1"]


async def test_failed_group_calls_back_once_for_each_entry() -> None:
    world = World()
    ledger = await world.open()
    await publish(ledger, 1)
    world.ledgers.fault = AppendFault(world.ledgers.appends + 1, DiskFull("full"))
    groups = Groups()
    groups.append(ledger, [b"0", b"1", b"2"])
    await until(lambda: len(groups.said) == 3)
    assert groups.said == [[Position(1, 1)], DiskFull, DiskFull]
