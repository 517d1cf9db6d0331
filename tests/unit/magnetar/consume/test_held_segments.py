"""Segment consumers as assignments want them, at a broker where a segment has one owner."""

import asyncio
import random
from collections.abc import Callable
from typing import cast

import pytest

from magnetar.consume.assignments import AssignedSegment
from magnetar.consume.ordered_segments import HeldSegments
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.errors import ConsumerBusy, MagnetarError, NotAllowed, TopicNotFound
from magnetar.protocol.backoff import Backoff
from tests.support.waiting import until
from tests.unit.magnetar.layout.fakes import FakePool, context_of


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "pause_s", lambda backoff: 0)


def segment(number: int) -> AssignedSegment:
    return AssignedSegment(number, f"segment://public/default/t/0000-0009-{number}")


class FakeBroker:
    """Who has which segment; a second one is refused.  It takes its time."""

    def __init__(self, seed: int = 0) -> None:
        self.luck = random.Random(seed)
        self.owners: dict[int, FakeSegmentConsumer] = {}
        self.refusals: dict[int, list[MagnetarError]] = {}
        self.busy = 0

    async def takes_time(self) -> None:
        for _ in range(self.luck.randrange(4)):
            await asyncio.sleep(0)


class FakeSegmentConsumer:
    def __init__(self, broker: FakeBroker, what: AssignedSegment) -> None:
        self.segment = what
        self.error: MagnetarError | None = None
        self.on_failure: Callable[[object], None] | None = None
        self._broker = broker

    async def open(self, timeout_s: float | None) -> None:
        broker, number = self._broker, self.segment.segment_id
        await broker.takes_time()
        if broker.refusals.get(number):
            raise broker.refusals[number].pop(0)
        if number in broker.owners:
            broker.busy += 1
            raise ConsumerBusy("Another one has it; wait for it to go.")
        broker.owners[number] = self

    async def close(self) -> None:
        await self._broker.takes_time()
        if self._broker.owners.get(self.segment.segment_id) is self:
            del self._broker.owners[self.segment.segment_id]

    def fail(self, error: MagnetarError) -> None:
        self.error = error
        del self._broker.owners[self.segment.segment_id]
        assert self.on_failure is not None
        self.on_failure(self)


class FakeReader:
    """One ordered consumer."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.held = HeldSegments(context_of(FakePool()), self)
        self.failures: list[MagnetarError] = []
        self.skips = False
        self.left: list[int] = []

    async def segment_consumer(self, what: AssignedSegment) -> SegmentConsumer:
        return cast("SegmentConsumer", FakeSegmentConsumer(self.broker, what))

    def missing(self, what: AssignedSegment, times: int) -> bool:
        return not self.skips

    async def part_with(self, consumer: SegmentConsumer) -> None:
        await self.broker.takes_time()

    def parted(self, what: AssignedSegment) -> None:
        self.left.append(what.segment_id)

    def failed(self, error: MagnetarError) -> None:
        self.failures.append(error)

    def assign(self, *numbers: int) -> None:
        self.held.assign(segment(number) for number in numbers)

    @property
    def owned(self) -> set[int]:
        owners = cast("dict[int, SegmentConsumer]", self.broker.owners)
        return {n for n, each in owners.items() if self.held.consumer_of(n) is each}


async def test_assigned_segments_are_open_once_settled() -> None:
    reader = FakeReader(FakeBroker())
    reader.assign(1, 2)
    await reader.held.settled()
    assert reader.owned == {1, 2}
    reader.assign(2)
    await until(lambda: reader.left == [1])
    assert set(reader.broker.owners) == {2}
    await reader.held.close()
    assert not reader.broker.owners


async def test_a_segment_that_another_one_has_is_waited_for() -> None:
    broker = FakeBroker()
    old, new = FakeReader(broker), FakeReader(broker)
    old.assign(1)
    await old.held.settled()
    new.assign(1)
    await until(lambda: broker.busy > 3)
    old.assign()
    await new.held.settled()
    assert new.owned == {1}
    assert not new.failures
    await new.held.close()


async def test_a_refusal_for_good_fails_everything() -> None:
    reader = FakeReader(FakeBroker())
    reader.broker.refusals[1] = [NotAllowed("No.")]
    reader.assign(1, 2)
    with pytest.raises(NotAllowed):
        await reader.held.settled()
    assert len(reader.failures) == 1
    await reader.held.close()


async def test_missing_segment_is_retried_or_skipped_as_the_reader_decides() -> None:
    reader = FakeReader(FakeBroker())
    reader.broker.refusals[1] = [TopicNotFound("Gone.")] * 3
    reader.assign(1)
    await reader.held.settled()
    assert reader.owned == {1}
    reader.skips = True
    reader.broker.refusals[2] = [TopicNotFound("Gone.")]
    reader.assign(1, 2)
    await reader.held.settled()
    assert reader.owned == {1}
    reader.assign(1)
    await until(lambda: reader.left == [2])
    await reader.held.close()


async def test_segment_that_was_given_up_is_opened_when_it_is_assigned_again() -> None:
    """The topic may have been deleted and created again: its segments have the same names."""
    reader = FakeReader(FakeBroker())
    reader.skips = True
    gone: list[MagnetarError] = [TopicNotFound("Gone."), TopicNotFound("Gone.")]
    reader.broker.refusals[1] = gone
    reader.assign(1)
    await reader.held.settled()
    reader.assign(1)
    await until(lambda: not gone)
    assert reader.owned == set()
    reader.assign(1)
    await until(lambda: reader.owned == {1})
    reader.broker.owners[1].fail(TopicNotFound("Gone."))
    assert reader.owned == set()
    reader.assign(1)
    await until(lambda: reader.owned == {1})
    await reader.held.close()


async def test_one_that_fails_later_is_opened_anew() -> None:
    reader = FakeReader(FakeBroker())
    reader.assign(1)
    await reader.held.settled()
    first = reader.broker.owners[1]
    first.fail(ConsumerBusy("Another one took it."))
    await until(lambda: reader.owned == {1})
    assert reader.broker.owners[1] is not first
    reader.broker.owners[1].fail(NotAllowed("No."))
    assert [type(error) for error in reader.failures] == [NotAllowed]
    await reader.held.close()


async def test_segment_removed_while_it_opens_is_not_kept() -> None:
    reader = FakeReader(FakeBroker())
    reader.broker.refusals[1] = [ConsumerBusy("Busy.")] * 5
    reader.assign(1)
    await asyncio.sleep(0)
    reader.assign()
    await until(lambda: reader.left == [1])
    assert not reader.broker.owners
    await reader.held.close()


@pytest.mark.parametrize("seed", range(40))
async def test_in_the_end_everything_is_where_it_was_assigned(seed: int) -> None:
    luck = random.Random(seed)
    broker = FakeBroker(seed)
    readers = [FakeReader(broker) for _ in range(3)]
    wanted: list[set[int]] = [set(), set(), set()]
    for _ in range(30):
        wanted = [set(), set(), set()]
        for number in range(5):
            if luck.random() < 0.9:
                wanted[luck.randrange(3)].add(number)
        for reader, numbers in zip(readers, wanted, strict=True):
            reader.assign(*numbers)
        if broker.owners and luck.random() < 0.3:
            broker.owners[luck.choice(list(broker.owners))].fail(ConsumerBusy("Taken."))
        for _ in range(luck.randrange(6)):
            await asyncio.sleep(0)
    await until(lambda: [reader.owned for reader in readers] == wanted)
    assert not any(reader.failures for reader in readers)
    for reader in readers:
        await reader.held.close()
    assert not broker.owners
