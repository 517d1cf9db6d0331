"""What an ordered consumer holds, by random schedules of assignments against a model."""

import random
from collections.abc import Iterable

import pytest

from magnetar.consume.assignments import (
    AssignedSegment,
    Effect,
    Holdings,
    HoldingState,
    LeaveSegment,
    OpenSegment,
    assignment_of,
)
from magnetar.protocol import pulsar_pb2 as pb


def segment(segment_id: int, topic: str = "t") -> AssignedSegment:
    return AssignedSegment(segment_id, f"segment://public/default/{topic}/{segment_id}")


def test_assigned_segment_is_opened_once() -> None:
    holdings = Holdings()
    assert holdings.assign([segment(1), segment(2)]) == [
        OpenSegment(segment(1)),
        OpenSegment(segment(2)),
    ]
    assert holdings.assign([segment(2), segment(1)]) == []
    assert holdings.held == {1, 2}


def test_segment_missing_in_an_assignment_is_left_and_removed() -> None:
    holdings = Holdings()
    holdings.assign([segment(1), segment(2)])
    assert holdings.assign([segment(2)]) == [LeaveSegment(segment(1))]
    assert holdings.held == {2}
    assert holdings.closed(segment(1)) == []
    assert holdings.state(1) is HoldingState.GONE
    assert holdings.assign([]) == [LeaveSegment(segment(2))]
    holdings.closed(segment(2))
    assert holdings.is_empty


def test_segment_assigned_again_while_leaving_is_opened_after_its_close() -> None:
    holdings = Holdings()
    holdings.assign([segment(1)])
    holdings.assign([])
    assert holdings.assign([segment(1)]) == []
    assert holdings.closed(segment(1)) == [OpenSegment(segment(1))]


def test_segment_assigned_and_removed_while_leaving_is_not_opened() -> None:
    holdings = Holdings()
    holdings.assign([segment(1)])
    holdings.assign([])
    holdings.assign([segment(1)])
    assert holdings.assign([]) == []
    assert holdings.closed(segment(1)) == []
    assert holdings.is_empty


def test_the_same_id_of_another_topic_is_another_segment() -> None:
    holdings = Holdings()
    holdings.assign([segment(1)])
    assert holdings.assign([segment(1, "anew")]) == [LeaveSegment(segment(1))]
    assert holdings.closed(segment(1)) == [OpenSegment(segment(1, "anew"))]


def test_a_partition_stays_open_when_its_range_of_hashes_changes() -> None:
    message = pb.ScalableConsumerAssignment(layout_epoch=0)
    name = "persistent://public/default/t-partition-1"
    message.segments.add(segment_id=1, hash_start=0x8000, hash_end=0xFFFF, segment_topic=name)
    holdings = Holdings()
    assert len(holdings.assign(assignment_of(message).segments)) == 1
    message.layout_epoch, message.segments[0].hash_start = 1, 0
    assert holdings.assign(assignment_of(message).segments) == []


def test_the_close_of_something_else_changes_nothing() -> None:
    holdings = Holdings()
    holdings.assign([segment(1)])
    assert holdings.closed(segment(1, "other")) == []
    assert holdings.closed(segment(1)) == []
    assert holdings.closed(segment(9)) == []
    assert holdings.held == {1}


class Controller:
    """Grants a segment only when its earlier owner has closed it, as a broker does."""

    def __init__(self, luck: random.Random, consumers: int, segments: int) -> None:
        self.luck = luck
        self.holdings = [Holdings() for _ in range(consumers)]
        self.segments = [segment(number) for number in range(segments)]
        self.granted: dict[AssignedSegment, int] = {}
        self.attached: dict[AssignedSegment, int] = {}
        self.leaving: list[tuple[int, AssignedSegment]] = []
        self.on_their_way: list[list[frozenset[AssignedSegment]]] = [[] for _ in range(consumers)]

    def decide(self, wanted: dict[AssignedSegment, int]) -> None:
        for each in self.segments:
            owner = wanted.get(each)
            if self.granted.get(each) != owner:
                self.granted.pop(each, None)
            # To the same consumer it may go back at once: that is the consumer's to sort out.
            if owner is not None and self.attached.get(each, owner) == owner:
                if any(each in told for late in self.on_their_way for told in late):
                    continue
                self.granted[each] = owner
        for number, late in enumerate(self.on_their_way):
            late.append(frozenset(e for e, owner in self.granted.items() if owner == number))

    def deliver(self, number: int) -> None:
        told = self.on_their_way[number].pop(0)
        self.do(number, self.holdings[number].assign(told))

    def do(self, number: int, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenSegment):
                assert effect.segment not in self.attached, "two have it, or one has it twice"
                self.attached[effect.segment] = number
            else:
                assert self.attached[effect.segment] == number
                self.leaving.append((number, effect.segment))

    def close(self) -> None:
        number, closed = self.leaving.pop(self.luck.randrange(len(self.leaving)))
        del self.attached[closed]
        self.do(number, self.holdings[number].closed(closed))

    def step(self) -> bool:
        """Something that is due happens; False if nothing is."""
        late = [number for number, told in enumerate(self.on_their_way) if told]
        if late and (not self.leaving or self.luck.random() < 0.5):
            self.deliver(self.luck.choice(late))
        elif self.leaving:
            self.close()
        else:
            return False
        return True


@pytest.mark.parametrize("seed", range(60))
def test_no_segment_is_with_two_and_none_is_lost(seed: int) -> None:
    luck = random.Random(seed)
    world = Controller(luck, consumers=luck.randint(1, 4), segments=luck.randint(1, 6))
    wanted: dict[AssignedSegment, int] = {}
    for _ in range(80):
        if luck.random() < 0.4:
            who = len(world.holdings)
            wanted = {e: luck.randrange(who) for e in world.segments if luck.random() < 0.9}
            world.decide(wanted)
        else:
            world.step()
    for _ in range(3):
        while world.step():
            pass
        world.decide(wanted)
    while world.step():
        pass
    assert world.attached == wanted
    for number, holdings in enumerate(world.holdings):
        mine = {e.segment_id for e, owner in wanted.items() if owner == number}
        assert holdings.held == mine
