"""Bounds that peers run into: bytes in flight, log lines, output."""

import asyncio
from collections.abc import Iterable

import pytest

from broker.topics.publish_limits import PublishLimits
from broker.wire.outbox import REPORTED_OUTPUT_BYTES, Outbox
from broker.wire.topic_pattern import TopicPattern, UnsupportedPattern
from config.log_limit import LogLimit


class Peer:
    def __init__(self) -> None:
        self.inflight_bytes = 0
        self.paused: set[str] = set()

    def pause_reading(self, why: str) -> None:
        assert why not in self.paused
        self.paused.add(why)

    def resume_reading(self, why: str) -> None:
        self.paused.remove(why)


def test_a_publisher_is_held_until_half_of_its_bytes_are_durable() -> None:
    limits = PublishLimits(connection_bytes=100, total_bytes=10_000)
    one, other = Peer(), Peer()
    for _ in range(12):
        limits.started(one, 10)
    limits.started(other, 10)
    assert one.paused
    assert not other.paused
    for _ in range(6):
        limits.finished(one, 10)
        assert one.paused
    limits.finished(one, 10)
    assert not one.paused


def test_above_the_total_bound_publishing_stops_until_half_is_durable() -> None:
    limits = PublishLimits(connection_bytes=1000, total_bytes=100)
    one, other = Peer(), Peer()
    limits.started(one, 90)
    limits.started(other, 20)
    assert other.paused
    assert not one.paused
    limits.started(one, 1)
    assert one.paused
    limits.finished(other, 20)
    assert other.paused
    limits.finished(one, 90)
    assert not one.paused
    assert not other.paused
    assert limits.inflight_bytes == 1


def test_suppressed_log_lines_are_counted() -> None:
    now = [0.0]
    limit = LogLimit(2, lambda: now[0])
    assert [limit.take() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 1.5
    assert [limit.take() for _ in range(3)] == [3, 0, None]


class Transport(asyncio.WriteTransport):
    """Takes everything; says how much is in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.buffered = 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))


class Watched:
    def __init__(self, limit: int = 1000) -> None:
        self.transport = Transport()
        self.changes: list[bool] = []
        self.given_up = 0
        self.reports = 0
        self.outbox = Outbox(
            self.transport,
            high_water=100,
            limit=limit,
            on_change=self.changes.append,
            on_queued=self.note_queued,
            give_up=self.give_up,
        )

    def note_queued(self) -> None:
        self.reports += 1

    def give_up(self) -> None:
        self.given_up += 1


async def test_one_turn_of_the_loop_is_one_write() -> None:
    watched = Watched()
    for number in range(5):
        watched.outbox.put(b"%d" % number)
    assert watched.transport.writes == []
    await asyncio.sleep(0)
    assert watched.transport.writes == [b"01234"]
    assert watched.outbox.drained_bytes == 5


async def test_outbox_is_writable_again_when_the_transport_drains() -> None:
    watched = Watched()
    called: list[int] = []
    watched.outbox.put(b"x" * 101)
    assert watched.changes == [False]
    watched.outbox.when_writable(lambda: called.append(1))
    watched.outbox.transport_full(True)
    watched.outbox.flush()
    assert watched.changes == [False]
    watched.outbox.transport_full(False)
    assert watched.changes == [False, True]
    await asyncio.sleep(0)
    assert called == [1]
    watched.outbox.when_writable(lambda: called.append(2))
    await asyncio.sleep(0)
    assert called == [1, 2]


async def test_a_peer_that_never_reads_is_given_up() -> None:
    watched = Watched(limit=500)
    watched.transport.buffered = 450
    watched.outbox.transport_full(True)
    watched.outbox.put(b"x" * 50)
    assert not watched.given_up
    watched.outbox.put(b"x")
    assert watched.given_up


async def test_output_is_reported_when_much_of_it_is_left() -> None:
    watched = Watched()
    watched.outbox.put(b"x")
    watched.outbox.flush()
    assert watched.reports == 0
    watched.transport.buffered = REPORTED_OUTPUT_BYTES + 1
    watched.outbox.put(b"x")
    watched.outbox.flush()
    assert watched.reports > 0
    assert watched.outbox.queued_bytes == REPORTED_OUTPUT_BYTES + 1


async def test_an_outbox_that_is_closed_queues_nothing_more() -> None:
    watched = Watched()
    called: list[int] = []
    watched.outbox.put(b"x" * 101)
    watched.outbox.when_writable(lambda: called.append(1))
    watched.outbox.close()
    watched.outbox.put(b"x" * 2000)
    watched.outbox.when_writable(lambda: called.append(2))
    await asyncio.sleep(0)
    assert watched.outbox.queued_bytes == 0
    assert watched.transport.writes == []
    assert watched.changes == [False]
    assert not watched.given_up
    assert called == []


MATCHES = [
    ("public/default/.*", "public/default/a-b", True),
    ("public/default/a", "public/default/ab", False),
    ("a|b|cd", "cd", True),
    ("(a|b)+c", "ababc", True),
    ("(?:ab){2,3}", "abab", True),
    ("(?:ab){2,3}", "abababab", False),
    ("a{2}", "aa", True),
    ("a{2,}", "aaaaa", True),
    ("a{2,}", "a", False),
    ("x?y*?z+", "zz", True),
    (r"[a-c_]+\d\.[^x]", "ab_7.y", True),
    (r"[a-c_]+\d\.[^x]", "ab_7.x", False),
    (r"[\w-]+", "ab-7", True),
    (r"\Qa.b\E.*", "a.bc", True),
    (r"\Qa.b\E.*", "axbc", False),
    ("^abc$", "abc", True),
    ("[]a]+", "]a", True),
    ("", "", True),
    ("", "a", False),
    ("()*a", "a", True),
    ("(a*)*b", "aaab", True),
    ("(a*)*b", "a" * 4000, False),
    ("(.*.*.*.*.*x)+", "y" * 4000, False),
]


@pytest.mark.parametrize(("pattern", "name", "expected"), MATCHES)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert TopicPattern(pattern).matches(name) is expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "*a",
        "[a",
        "a\\",
        "(?=a)",
        "(?i)a",
        r"(a)\1",
        "a{3,2}",
        "a{x}",
        "((((a{99}){99}){99}){99})",
        "(" * 60,
        "a" * 101,
        "a$b",
        "[a&&b]",
        "a**",
    ],
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        TopicPattern(pattern)
