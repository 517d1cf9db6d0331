"""The bounds and turns of TLS handshakes."""

import asyncio
from collections.abc import Callable

import pytest

from broker.wire.tls_handshakes import Handshakes


class FakeHandshake:
    """A handshake that notes what happens to it."""

    def __init__(self) -> None:
        self.steps = 0
        self.aborted = False

    def step(self) -> None:
        self.steps += 1

    def abort(self) -> None:
        self.aborted = True


def has_room(handshakes: int) -> bool:
    return True


def begin(handshakes: Handshakes, *addresses: str) -> list[FakeHandshake]:
    made = [FakeHandshake() for _ in addresses]
    for each, address in zip(made, addresses, strict=True):
        assert handshakes.begin(each, address)
    return made


async def step(handshakes: Handshakes, *addresses: str, waits: bool = True) -> list[FakeHandshake]:
    """Begin handshakes whose peers send something; then they wait for more, if `waits`."""
    made = begin(handshakes, *addresses)
    for each in made:
        handshakes.has_input(each)
        await asyncio.sleep(0)
        if waits:
            handshakes.needs_input(each)
    return made


@pytest.fixture
def of_address() -> Handshakes:
    return Handshakes(has_room, most=100, most_of_address=2)


async def test_silent_peers_count_as_connections_alone(of_address: Handshakes) -> None:
    made = begin(of_address, *["a"] * 200)
    assert not any(each.aborted for each in made)
    (other,) = await step(of_address, "a")
    assert (other.steps, len(of_address), of_address.failed) == (1, 201, 0)


async def test_newcomer_replaces_the_oldest_of_its_address(of_address: Handshakes) -> None:
    first, second, other, third = await step(of_address, "a", "a", "b", "a")
    assert [each.aborted for each in (first, second, other, third)] == [True, False, False, False]
    assert (third.steps, len(of_address), of_address.failed) == (1, 3, 1)


async def test_handshake_that_waits_for_its_turn_is_not_replaced(of_address: Handshakes) -> None:
    first, second = await step(of_address, "a", "a")
    (third,) = begin(of_address, "a")
    for each in (third, first):
        of_address.has_input(each)
    await asyncio.sleep(0)
    assert (first.aborted, second.aborted) == (False, True)
    await asyncio.sleep(0)
    assert [each.steps for each in (first, second, third)] == [2, 1, 1]


async def test_newcomer_is_refused_while_none_waits_for_its_peer(of_address: Handshakes) -> None:
    await step(of_address, "a", "a", waits=False)
    (third,) = await step(of_address, "a", waits=False)
    assert (third.aborted, third.steps) == (True, 0)
    assert (len(of_address), of_address.failed) == (2, 1)


async def test_address_with_the_most_gives_way_above_the_bound_of_all() -> None:
    handshakes = Handshakes(has_room, most=3, most_of_address=100)
    honest, *many = await step(handshakes, "honest", "many", "many")
    (other,) = await step(handshakes, "other")
    assert not honest.aborted
    assert [each.aborted for each in many] == [True, False]
    assert other.steps == 1


async def test_further_steps_of_a_handshake_are_within_the_bounds(of_address: Handshakes) -> None:
    first, second = await step(of_address, "a", "a")
    for each in (second, first):
        of_address.has_input(each)
        await asyncio.sleep(0)
    assert [each.steps for each in (first, second)] == [2, 2]
    assert not of_address.failed


@pytest.mark.parametrize("rooms", [0, 1])
async def test_handshakes_count_against_the_connections_of_the_port(rooms: int) -> None:
    handshakes = Handshakes(lambda half_open: half_open < rooms)
    first = FakeHandshake()
    assert handshakes.begin(first, "a") is bool(rooms)
    assert handshakes.begin(FakeHandshake(), "a") is bool(rooms)
    assert first.aborted is bool(rooms)
    assert len(handshakes) == rooms


async def test_room_is_made_for_other_connections() -> None:
    handshakes = Handshakes(has_room)
    assert not handshakes.make_room()
    (waiting,) = begin(handshakes, "a")
    assert handshakes.make_room()
    assert waiting.aborted
    assert len(handshakes) == 0


async def test_one_step_is_computed_in_each_turn_of_the_loop() -> None:
    handshakes = Handshakes(has_room)
    made = begin(handshakes, *"abc")
    for each in made:
        handshakes.has_input(each)
    for stepped in range(4):
        assert sum(each.steps for each in made) == stepped
        await asyncio.sleep(0)
        if stepped == 3:
            break
    assert [each.steps for each in made] == [1, 1, 1]


async def test_handshake_that_has_ended_has_no_turn() -> None:
    handshakes = Handshakes(has_room)
    gone, there = begin(handshakes, "a", "b")
    for each in (gone, there):
        handshakes.has_input(each)
    handshakes.end(gone, completed=False)
    await asyncio.sleep(0)
    assert (gone.steps, there.steps) == (0, 1)


async def test_handshake_that_needs_more_input_can_be_replaced_again() -> None:
    handshakes = Handshakes(has_room, most_of_address=1)
    (first,) = await step(handshakes, "a")
    await step(handshakes, "a")
    assert first.aborted


@pytest.mark.parametrize(
    ("completed", "counts"), [(True, (1, 0)), (False, (0, 1))], ids=["completed", "failed"]
)
async def test_ends_are_counted_once(completed: bool, counts: tuple[int, int]) -> None:
    handshakes = Handshakes(has_room)
    (each,) = begin(handshakes, "a")
    for _ in range(2):
        handshakes.end(each, completed=completed)
    assert (handshakes.completed, handshakes.failed) == counts
    for late in (handshakes.has_input, handshakes.needs_input):
        call: Callable[[FakeHandshake], None] = late
        call(each)
    assert len(handshakes) == 0


async def test_close_ends_all() -> None:
    handshakes = Handshakes(has_room)
    made = begin(handshakes, *"aab")
    handshakes.close()
    assert all(each.aborted for each in made)
    assert len(handshakes) == 0
