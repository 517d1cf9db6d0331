"""What is in flight and what waits: order, bounds, tombstones, time in ticks."""

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from config.bounds import BOOKIE_INFLIGHT_BYTES, BOOKIE_INFLIGHT_REQUESTS, BOOKIE_LATE_TIMEOUTS
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.waiters import AddWaiter, Waiter
from storage.ledger.bookkeeper.window import TICKS, Admission, Window

KEYS = [(1, 7, entry) for entry in range(3)]


def nobody(_code: ReplyCode) -> None:
    raise AssertionError("a window tells nobody anything")


def waiter(key: tuple[int, int, int], size: int = 100) -> Waiter:
    return AddWaiter(key, size, (), nobody)


def opened() -> Window:
    window = Window()
    window.open()
    return window


def test_nothing_is_sent_before_it_opens() -> None:
    window = Window()
    first = waiter(KEYS[0])
    assert window.admit(first) is Admission.WAIT
    assert window.sendable() == []
    window.open()
    second = waiter(KEYS[1])
    assert window.admit(second) is Admission.WAIT, "it may not pass the one before"
    assert window.sendable() == [first, second]


def test_a_request_is_overdue_after_a_timeout_and_once() -> None:
    window = opened()
    window.tick()
    late = waiter(KEYS[0])
    window.admit(late)
    for _ in range(TICKS):
        assert window.tick() == ([], False)
    assert window.tick() == ([late], False)
    assert window.tick() == ([], False)
    assert window.answered(KEYS[0]) is late
    assert late.expired


def test_a_tombstone_takes_the_late_answer() -> None:
    window = opened()
    old, new = waiter(KEYS[0]), waiter(KEYS[0])
    window.admit(old)
    for _ in range(TICKS + 1):
        window.tick()
    window.admit(new)
    assert window.answered(KEYS[0]) is old
    assert window.answered(KEYS[0]) is new
    assert window.answered(KEYS[0]) is None


def test_a_tombstone_that_gets_too_old_ends_the_connection() -> None:
    window = opened()
    window.admit(waiter(KEYS[0]))
    ticks = [window.tick().given_up for _ in range(BOOKIE_LATE_TIMEOUTS * TICKS + 1)]
    assert ticks == [False] * BOOKIE_LATE_TIMEOUTS * TICKS + [True]


def test_overdue_waiting_request_is_removed() -> None:
    window = Window()
    late = waiter(KEYS[0])
    window.admit(late)
    for _ in range(TICKS):
        window.tick()
    assert window.tick().waiters == [late]
    window.open()
    assert window.sendable() == []
    assert window.drain() == []


def test_drain_returns_every_unanswered_request() -> None:
    window = opened()
    expired = waiter(KEYS[0])
    window.admit(expired)
    for _ in range(TICKS + 1):
        window.tick()
    large = waiter(KEYS[0], BOOKIE_INFLIGHT_BYTES)
    twice = waiter(KEYS[0])
    assert [window.admit(each) for each in (twice, large)] == [Admission.SEND, Admission.WAIT]
    assert window.drain() == [twice, large]
    assert window.drain() == []


def test_the_largest_request_goes_when_it_is_alone() -> None:
    window = opened()
    assert window.admit(waiter(KEYS[0], 2 * BOOKIE_INFLIGHT_BYTES)) is Admission.SEND
    assert window.admit(waiter(KEYS[1], 1)) is Admission.WAIT


def test_requests_are_counted_not_only_bytes() -> None:
    window = opened()
    admitted = [window.admit(waiter((1, 1, n), 1)) for n in range(BOOKIE_INFLIGHT_REQUESTS + 1)]
    assert set(admitted[:-1]) == {Admission.SEND}
    assert admitted[-1] is Admission.WAIT


@pytest.mark.parametrize(
    "window",
    [Window(waiting_requests=2), Window(waiting_bytes=200)],
    ids=["requests", "bytes"],
)
def test_waiting_requests_are_bounded(window: Window) -> None:
    admitted = [window.admit(waiter(KEYS[0])) for _ in range(3)]
    assert admitted == [Admission.WAIT, Admission.WAIT, Admission.REFUSE]
    window.open()
    assert len(window.sendable()) == 2
    assert window.admit(waiter(KEYS[1])) is Admission.SEND


class AnyOrder(RuleBasedStateMachine):
    """Against a plain model: one queue of requests for each key, and one of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.window = opened()
        self.sent: dict[tuple[int, int, int], deque[Waiter]] = {key: deque() for key in KEYS}
        self.waiting: deque[Waiter] = deque()
        self.told: dict[int, Waiter] = {}

    @property
    def in_flight(self) -> list[Waiter]:
        return [each for queue in self.sent.values() for each in queue]

    @rule(key=st.sampled_from(KEYS), size=st.sampled_from([1, 10, BOOKIE_INFLIGHT_BYTES // 2]))
    def ask(self, key: tuple[int, int, int], size: int) -> None:
        asked = waiter(key, size)
        if self.window.admit(asked) is Admission.SEND:
            assert not self.waiting
            self.sent[key].append(asked)
        else:
            self.waiting.append(asked)

    @rule(key=st.sampled_from(KEYS))
    def answer(self, key: tuple[int, int, int]) -> None:
        expected = self.sent[key].popleft() if self.sent[key] else None
        assert self.window.answered(key) is expected
        for each in self.window.sendable():
            assert each is self.waiting.popleft()
            self.sent[each.key].append(each)

    @rule(ticks=st.integers(1, TICKS + 2))
    def time_goes_on(self, ticks: int) -> None:
        for _ in range(ticks):
            for late in self.window.tick().waiters:
                assert id(late) not in self.told
                self.told[id(late)] = late
                if late in self.waiting:
                    assert late is self.waiting.popleft()
                else:
                    assert late in self.in_flight

    @precondition(lambda self: self.in_flight or self.waiting)
    @rule()
    def end(self) -> None:
        found: Sequence[Waiter] = self.window.drain()
        everybody = [*self.in_flight, *self.waiting]
        assert {id(each) for each in found} == {id(each) for each in everybody} - self.told.keys()
        self.__init__()  # type: ignore[misc]

    @invariant()
    def bytes_are_bounded(self) -> None:
        sizes = [each.frame_bytes for each in self.in_flight]
        assert len(sizes) <= 1 or sum(sizes) <= BOOKIE_INFLIGHT_BYTES

    @invariant()
    def nobody_waits_for_an_empty_connection(self) -> None:
        assert self.in_flight or not self.waiting


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
