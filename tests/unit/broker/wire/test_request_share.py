"""The fair share of the loop: turns, and costly requests round robin by connection."""

from collections.abc import Callable

from broker.wire.request_share import CostlyRequests, Turn
from config.bounds import TURN_FRAMES, TURN_S


class Started:
    """Records the requests that were started, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def start(self, name: str) -> Callable[[], None]:
        return lambda: self.names.append(name)


def test_single_request_is_served_second_beside_a_thousand() -> None:
    started, share = Started(), CostlyRequests(1)
    for number in range(1000):
        share.add("many", started.start(f"many-{number}"))
    share.add("one", started.start("one"))
    share.finished("many")
    assert started.names == ["many-0", "one"]
    share.finished("one")
    assert started.names[2] == "many-1"


def test_requests_of_one_connection_start_one_by_one_in_order() -> None:
    started, share = Started(), CostlyRequests(10)
    for number in range(4):
        share.add("a", started.start(str(number)))
    assert started.names == ["0"]
    assert share.waiting("a") == 3
    for _ in range(3):
        share.finished("a")
    assert started.names == ["0", "1", "2", "3"]
    share.finished("a")
    share.add("a", started.start("4"))
    assert started.names[-1] == "4"


def test_connections_take_turns_within_the_bound_of_all() -> None:
    started, share = Started(), CostlyRequests(2)
    for number in range(3):
        for connection in "abc":
            share.add(connection, started.start(f"{connection}{number}"))
    assert started.names == ["a0", "b0"]
    for connection in "abcabc":
        share.finished(connection)
    assert started.names == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2"]


def test_connection_that_ended_leaves_nothing_that_waits() -> None:
    started, share = Started(), CostlyRequests(1)
    share.add("busy", started.start("busy"))
    for number in range(1000):
        share.add("gone", started.start(f"gone-{number}"))
    share.add("stays", started.start("stays"))
    share.drop("gone")
    assert share.waiting("gone") == 0
    share.finished("busy")
    assert started.names == ["busy", "stays"]


def test_late_requests_leave_their_place_to_others() -> None:
    started, share = Started(), CostlyRequests(2, late_at_most=2)
    for connection in "abcdefg":
        share.add(connection, started.start(connection))
    assert started.names == ["a", "b"]
    share.late("a")
    share.late("b")
    assert started.names == ["a", "b", "c", "d"]
    share.late("c")
    share.late("d")
    assert started.names == ["a", "b", "c", "d"], "two may be late"
    share.finished("a")
    assert started.names == ["a", "b", "c", "d", "e"]
    for connection in "bcd":
        share.finished(connection)
    assert started.names == ["a", "b", "c", "d", "e", "f"], "nobody is late any more"
    share.finished("e")
    assert started.names[-1] == "g"


def test_connection_with_a_late_request_starts_no_other() -> None:
    started, share = Started(), CostlyRequests(1)
    share.add("a", started.start("a0"))
    share.add("a", started.start("a1"))
    share.late("a")
    assert started.names == ["a0"]
    share.finished("a")
    assert started.names == ["a0", "a1"]
    share.add("b", started.start("b0"))
    assert started.names == ["a0", "a1"], "the second request is not late"


def test_withdrawn_request_does_not_start() -> None:
    started, share = Started(), CostlyRequests(1)
    first, second = started.start("first"), started.start("second")
    share.add("a", first)
    share.add("a", second)
    assert not share.withdraw("a", first)
    assert share.withdraw("a", second)
    share.finished("a")
    assert started.names == ["first"]


def test_request_of_a_peer_that_does_not_read_takes_nobodys_turn() -> None:
    started, share = Started(), CostlyRequests(1)
    share.set_writable("slow", False)
    share.add("slow", started.start("slow"))
    share.add("fast", started.start("fast"))
    assert started.names == ["fast"]
    share.finished("fast")
    share.set_writable("slow", True)
    assert started.names == ["fast", "slow"]


def test_turn_measures_the_time_once_per_batch_of_frames() -> None:
    readings: list[float] = []
    times = iter([TURN_S / 2, TURN_S * 2])

    def now() -> float:
        readings.append(next(times))
        return readings[-1]

    turn = Turn(now, 0.0)
    ends = [at for at in range(3 * TURN_FRAMES) if at >= turn.next_check and turn.is_over(at)]
    assert ends[0] == 2 * TURN_FRAMES
    assert len(readings) == 2
