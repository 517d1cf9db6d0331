"""A streaming query over a fake topic, and what may happen to both."""

import json
from dataclasses import dataclass, field

from hypothesis import strategies as st

from magnetar.layout import Layout
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import KEY_SPACE
from magnetar.spark.cut import BEGINNING, Cut, Place, ahead_of, behind, enter_children
from magnetar.spark.cut_json import cut_of, object_of, text_of
from magnetar.spark.range_planning import Budget, Ordering, Planner
from magnetar.spark.tasks import (
    SegmentRange,
    ranges_between,
    segments_gone_between,
    split_large,
    tasks_of,
)
from tests.unit.magnetar.spark.fake_topic import FakeTopic, Row

NOTHING = Cut("topic://t", "")
UNBOUNDED = Budget()


def check_cover(cut: Cut, layout: Layout) -> None:
    """The ranges in the cut cover the key space once."""
    done, ahead = behind(cut, layout), ahead_of(cut, layout)
    for segment_id in layout.segments:
        there = segment_id in cut.pos
        assert there + (segment_id in ahead) + (segment_id in done - cut.pos.keys()) == 1
    expected = 0
    for segment_id in sorted(cut.pos, key=lambda i: layout.segments[i].hash_start):
        segment = layout.segments[segment_id]
        assert segment.hash_start == expected
        expected = segment.hash_end + 1
    assert expected == KEY_SPACE


def is_later(cut: Cut, than: Cut, layout: Layout) -> bool:
    done = behind(cut, layout)
    return all(i in done or cut.pos[i] >= place for i, place in than.pos.items())


def read(topic: FakeTopic, each: SegmentRange) -> list[Row]:
    start = Position(-1, -1) if each.start == BEGINNING else each.start.position
    return topic.rows(each.topic, start, each.end.position)


@dataclass
class Query:
    """A streaming query: where it is, and what each task of each batch has read."""

    topic: FakeTopic
    ordering: Ordering = Ordering.KEY
    chain: bool = False
    window_ms: int | None = None
    cut: Cut = NOTHING
    batches: list[list[list[Row]]] = field(default_factory=list)
    limits: dict[int, Place] | None = None

    def __post_init__(self) -> None:
        self.cut = enter_children(self.cut, self.topic.layout())

    def step(self, budget: Budget = UNBOUNDED) -> bool:
        """One batch; whether the cut moved."""
        layout = self.topic.layout()
        planner = Planner(self.topic, self.ordering, chain=self.chain, window_ms=self.window_ms)
        found = planner.next_cut(self.cut, layout, budget, self.limits)
        check_cover(found, layout)
        assert is_later(found, self.cut, layout)
        if found is self.cut:
            return False
        assert text_of(found) != text_of(self.cut)
        self.run_batch(self.cut, found, layout)
        self.cut = found
        return True

    def run_batch(self, start: Cut, end: Cut, layout: Layout) -> None:
        assert not segments_gone_between(start, end, layout)
        ranges = ranges_between(start, end, layout)
        if self.ordering is Ordering.NONE:
            tasks = [[each] for each in split_large(self.topic, ranges, 50)]
        else:
            tasks = tasks_of(ranges, layout, chain=self.chain)
        self.batches.append(
            [[row for each in task for row in read(self.topic, each)] for task in tasks]
        )

    def restart(self) -> None:
        self.cut = cut_of(json.loads(json.dumps(object_of(self.cut))), self.cut.topic, "")

    def drain(self, budget: Budget = UNBOUNDED) -> None:
        for _ in range(1000):
            if not self.step(budget):
                return
        raise AssertionError("it never ends")

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.batches for task in batch for row in task]

    def check_order(self) -> None:
        """The tasks of a batch run side by side: a key is in one of them."""
        last: dict[int, int] = {}
        for batch in self.batches:
            owner: dict[int, int] = {}
            for number, task in enumerate(batch):
                for row in task:
                    assert owner.setdefault(row.key, number) == number, "two tasks have a key"
                    assert row.number == last.get(row.key, 0) + 1, "a key's rows out of order"
                    last[row.key] = row.number


KEYS = st.lists(st.integers(0, KEY_SPACE - 1), min_size=1, max_size=5)
FEW = st.lists(st.sampled_from([0, 17_000, 33_000, 50_000, 65_535]), min_size=1, max_size=6)
BUDGETS = st.builds(Budget, st.none() | st.integers(1, 12), st.none() | st.integers(1, 200))
ACTIONS = st.one_of(
    st.tuples(st.just("send"), FEW | KEYS),
    st.tuples(st.just("send"), FEW),
    st.tuples(st.just("split"), st.integers(0, 7)),
    st.tuples(st.just("merge"), st.integers(0, 7)),
    st.tuples(st.just("hide"), st.integers(0, 7)),
    st.tuples(st.just("show"), st.just(0)),
    st.tuples(st.just("step"), BUDGETS),
    st.tuples(st.just("step"), BUDGETS),
    st.tuples(st.just("restart"), st.just(0)),
)


def hide(topic: FakeTopic, number: int) -> None:
    segments = list(topic.segments.values())
    segment = segments[number % len(segments)]
    if segment.hidden_from is None and segment.active:
        segment.hidden_from = len(segment.entries)


def change(topic: FakeTopic, action: str, value: object) -> list[Row]:
    """What actions do to a topic; the rows that were sent."""
    active = topic.active
    if action == "send":
        assert isinstance(value, list)
        return topic.send(value)
    number = value if isinstance(value, int) else 0
    if action == "split":
        topic.split(active[number % len(active)])
    elif action == "merge" and len(active) > 1:
        lower = number % (len(active) - 1)
        topic.merge(active[lower], active[lower + 1])
    elif action == "hide":
        hide(topic, number)
    elif action == "show":
        for segment in topic.segments.values():
            segment.hidden_from = None
    return []
