"""What `magnetar perf` counts and says."""

from magnetar.cli.tally import Tally
from magnetar.errors import MessageTooLarge


def counted(messages: int, size: int, every_s: float) -> Tally:
    tally = Tally(100.0)
    for number in range(1, messages + 1):
        tally.done(size, number * 10, 100.0 + number * every_s)
    return tally


def test_rates_are_from_the_start_to_the_last_message() -> None:
    tally = counted(1000, 2000, 0.002)
    assert tally.as_mapping() == {
        "messages": 1000,
        "failed": 0,
        "bytes": 2_000_000,
        "seconds": 2.0,
        "messages_per_s": 500.0,
        "mb_per_s": 1.0,
        "latency_ms": tally._latencies_ms(),
    }


def test_percentiles_are_named_as_people_name_them() -> None:
    assert list(counted(1000, 1, 1.0)._latencies_ms()) == ["p50", "p95", "p99", "p99.9", "max"]


def test_the_summary_is_two_lines() -> None:
    tally = counted(1000, 2000, 0.002)
    first, second = tally.summary("Sent")
    assert first == "Sent 1,000 messages in 2.00 s: 500 messages/s, 1.00 MB/s"
    assert second.startswith("latency  p50 5.0")
    assert second.endswith("max 10.00 ms")


def test_tally_names_the_first_failure() -> None:
    tally = counted(1000, 2000, 0.002)
    assert tally.why_failed() is None
    for text in ("No\nroom.", "Another."):
        tally.fail(MessageTooLarge(text))
    tally.fail(None)
    assert tally.failed == 3
    assert tally.why_failed() == "3 messages failed; the first: No room."


def test_lately_is_since_it_was_asked_last() -> None:
    tally = counted(10, 1, 0.1)
    assert tally.lately(101.0) == 10.0
    assert tally.lately(102.0) == 0.0
    assert tally.lately(102.0) == 0.0


def test_tally_without_messages_has_a_summary() -> None:
    tally = Tally(5.0)
    tally.started_s = 6.0
    assert tally.summary("Read") == ["Read no messages."]
    assert tally.as_mapping()["seconds"] == 0.0
    assert tally.line(5.0).startswith("0 messages  0/s")
