"""When a replicator runs: woken, after a wait, and never once it is stopped."""

import asyncio

import pytest

from broker.replication.send_turns import SendTurns
from broker.replication.sent_counts import SentCounts
from tests.support.bounds import set_bound
from tests.support.waiting import until


class NothingUnsent:
    """`Unsent` without entries."""

    expired_total = 0
    backlog = 0


async def test_a_replicator_that_is_woken_often_runs_once() -> None:
    runs = list[int]()
    turns = SendTurns(lambda: runs.append(1))
    turns.wake()
    turns.wake()
    assert runs == []
    await asyncio.sleep(0)
    assert runs == [1]


async def test_a_replicator_runs_again_once_its_wait_is_over() -> None:
    runs, errors = list[int](), list[BaseException]()
    turns = SendTurns(lambda: runs.append(1))
    over = asyncio.Event()

    async def until_over() -> None:
        await over.wait()

    turns.wait_for(until_over(), errors.append)
    assert not turns.may_send
    over.set()
    await until(lambda: turns.may_send)
    assert (runs, errors) == ([1], [])


async def test_a_replicator_hears_of_a_wait_that_failed_if_it_asks_else_it_runs() -> None:
    async def fail() -> None:
        raise ValueError("failed")

    runs, errors = list[int](), list[BaseException]()
    turns = SendTurns(lambda: runs.append(1))
    for failed in (errors.append, None):
        turns.wait_for(fail(), failed)
        await until(lambda: turns.may_send)
    assert (runs, [str(error) for error in errors]) == ([1], ["failed"])


async def test_a_stopped_replicator_neither_runs_nor_waits() -> None:
    runs = list[int]()
    turns = SendTurns(lambda: runs.append(1))
    turns.wait_for(asyncio.sleep(3600))
    turns.wake()
    turns.stop()
    await turns.ended()
    turns.wait_for(asyncio.sleep(0))
    turns.wake()
    await asyncio.sleep(0)
    assert (runs, turns.may_send) == ([], False)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_turn_ends_at_its_bounds_and_another_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "REPLICATED_AT_ONCE", 3)
    set_bound(monkeypatch, "REPLICATED_BYTES_AT_ONCE", 100)
    counts, sizes, sent = SentCounts(NothingUnsent()), [1, 1, 1, 1, 100, 1], list[list[int]]()

    def send_next() -> bool:
        if not sizes:
            return False
        sent[-1].append(sizes[0])
        counts.bytes += sizes.pop(0)
        return True

    def run() -> None:
        sent.append([])
        more = turns.send(send_next, counts)
        assert more is bool(len(sent[-1]) == 3 or sum(sent[-1]) >= 100)

    turns = SendTurns(run)
    run()
    await until(lambda: not sizes)
    assert sent == [[1, 1, 1], [1, 100], [1]]
