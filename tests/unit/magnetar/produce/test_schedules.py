"""A whole producer against brokers that split, merge, move, refuse and lose connections, by seed.

Nothing is lost, nothing is stored twice, and messages of one key are stored in the order in which
they were sent; also where a connection is lost while its segment is sealed.
"""

import asyncio
import random
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from magnetar.errors import NotAllowed, ProducerQueueFull
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.schema.plain import BYTES
from tests.simulation.loop import SimulatedLoop
from tests.unit.magnetar.produce.world import BAD, TOPIC, Stored, World

T = TypeVar("T")
MESSAGES = 400
KEYS = 12


def run(seed: object, work: Coroutine[None, None, T]) -> T:
    """Run it on a loop with virtual time."""
    loop = SimulatedLoop(random.Random(f"loop {seed}"))
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(loop.spawn(loop.new_host("client"), work))
    finally:
        loop.bury()
        asyncio.set_event_loop(None)


async def send_all(
    producer: Producer[bytes], rng: random.Random, refused: float
) -> list[tuple[str, bytes, "asyncio.Future[MessageId]"]]:
    """Asynchronously, at an uneven rate, each message with its number."""
    sent = []
    for number in range(MESSAGES):
        key = f"k{rng.randrange(KEYS)}"
        payload = (BAD if rng.random() < refused else b"") + b"%d" % number
        while True:
            try:
                future = producer.send_nowait(payload, key=key if number % 7 else None)
            except ProducerQueueFull:
                async with asyncio.timeout(60):
                    await producer.room()
            else:
                break
        sent.append((key if number % 7 else "", payload, future))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.choice((0, 0.001, 0.02, 0.2)))
    return sent


async def trouble(world: World, rng: random.Random, *, told_late: bool, losses: bool) -> None:
    """Splits, merges, moves, lost connections, at any moment."""
    while True:
        await asyncio.sleep(rng.choice((0.001, 0.01, 0.1, 0.4)))
        active = world.active()
        what = rng.randrange(5)
        if what == 0 and len(active) < 6:
            world.split(rng.choice(active), told_late=told_late)
        elif what == 1 and len(active) > 1:
            at = rng.randrange(len(active) - 1)
            world.merge(active[at], active[at + 1], told_late=told_late)
        elif what == 2 and losses:
            world.move(rng.choice(active))
        elif what == 3 and losses and world.links:
            world.links[rng.choice(sorted(world.links))].lose()


async def scenario(
    seed: int, *, told_late: bool, losses: bool, refused: float = 0.0, in_turn: bool = True
) -> World:
    rng = random.Random(f"scenario {seed}")
    world = World(seed, segments=rng.choice((1, 2, 4)))
    world.in_turn = in_turn
    settings = ProducerSettings(
        batching=rng.random() < 0.8,
        batch_max_messages=rng.choice((2, 10, 1000)),
        batch_max_delay_ms=rng.choice((0, 1, 10)),
        max_pending_messages=rng.choice((20, 1000)),
        send_timeout_s=300,
        name=rng.choice((None, "mine")),
    )
    producer = Producer(world.context, TOPIC, BYTES, settings)
    await producer.open()
    troubles = asyncio.ensure_future(trouble(world, rng, told_late=told_late, losses=losses))
    sent = await send_all(producer, rng, refused)
    troubles.cancel()
    outcomes = await asyncio.gather(*(each[2] for each in sent), return_exceptions=True)
    await producer.close()
    judge(world, [(key, payload) for key, payload, _ in sent], outcomes, losses=losses)
    assert producer._capacity.messages == 0
    return world


def judge(
    world: World,
    sent: list[tuple[str, bytes]],
    outcomes: list[MessageId | BaseException],
    *,
    losses: bool,
) -> None:
    stored: dict[bytes, list[Stored]] = {}
    order: dict[str, list[bytes]] = {}
    for segment in world.segments.values():
        of_segment = [each.payload for each in segment.stored]
        assert len(of_segment) == len(set(of_segment)), "twice in one segment"
        for each in segment.stored:
            stored.setdefault(each.payload, []).append(each)
            if len(stored[each.payload]) == 1:
                order.setdefault(each.key, []).append(each.payload)
    for (_, payload), outcome in zip(sent, outcomes, strict=True):
        copies = stored.get(payload, [])
        if isinstance(outcome, MessageId):
            assert copies
        else:
            assert isinstance(outcome, NotAllowed), outcome
            assert any(each.startswith(BAD) for _, each in sent)
            assert not any(each.receipted for each in copies)
            assert losses or not copies
    for copies in stored.values():
        assert len(copies) == 1, "twice"
    for key, payloads in order.items():
        if key:
            asked = [payload for of, payload in sent if of == key and payload in stored]
            assert payloads == asked, f"order of {key}"


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("told_late", [False, True], ids=["magnetar", "m1"])
def test_splits_and_merges(seed: int, told_late: bool) -> None:
    world = run(seed, scenario(seed, told_late=told_late, losses=False))
    assert world.lost_connections == 0


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("told_late", [False, True], ids=["magnetar", "m1"])
def test_splits_merges_moves_and_lost_connections(seed: int, told_late: bool) -> None:
    run(seed, scenario(seed, told_late=told_late, losses=True))


@pytest.mark.parametrize("seed", range(10))
def test_refused_message_fails_only_its_batch(seed: int) -> None:
    run(seed, scenario(seed, told_late=seed % 2 == 0, losses=seed % 3 == 0, refused=0.02))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("told_late", [False, True], ids=["magnetar", "m1"])
def test_refusals_may_overtake_receipts(seed: int, told_late: bool) -> None:
    """Also that a segment takes no more: what was stored before is not sent to its children."""
    work = scenario(seed, told_late=told_late, losses=False, refused=0.02, in_turn=False)
    assert run(seed, work).lost_connections == 0


def test_the_schedules_have_what_they_are_about() -> None:
    worlds = [run(n, scenario(n, told_late=n % 2 == 0, losses=True)) for n in range(6)]
    assert sum(world.lost_connections for world in worlds) > 5
    assert sum(world.epoch for world in worlds) > 20
    assert any(len(segment.stored) > 5 for world in worlds for segment in world.segments.values())
