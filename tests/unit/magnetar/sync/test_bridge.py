"""The thread with a loop: calls from other threads, interruptions, the end, forks."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from magnetar.errors import AlreadyClosed, ClientError
from magnetar.sync.bridge import Bridge

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge()
    yield made
    made.close()


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def failing() -> None:
    raise LookupError("not there")


async def in_this_thread() -> int:
    return threading.get_ident()


def test_a_result_and_an_error_come_back(bridge: Bridge) -> None:
    assert bridge.run(doubled, 21) == 42
    with pytest.raises(LookupError, match="not there"):
        bridge.run(failing)


def test_all_calls_run_on_one_other_thread(bridge: Bridge) -> None:
    with ThreadPoolExecutor(8) as threads:
        seen = set(threads.map(lambda _: bridge.run(in_this_thread), range(200)))
        doubles = list(threads.map(lambda n: bridge.run(doubled, n), range(200)))
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    assert doubles == [2 * n for n in range(200)]


def test_callbacks_keep_their_order(bridge: Bridge) -> None:
    seen: list[int] = []
    for number in range(1000):
        bridge.soon(lambda number=number: seen.append(number))  # type: ignore[misc]
    bridge.call(lambda: None)
    assert seen == list(range(1000))


class Stuck:
    """Waits for ever; knows whether it was cancelled, and interrupts the main thread."""

    def __init__(self, brings: int | None = None) -> None:
        self.brings = brings
        self.cancelled = False

    async def wait(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            if self.brings is None:
                raise
        assert self.brings is not None
        return self.brings


def test_an_interrupted_caller_takes_its_task_with_it(bridge: Bridge) -> None:
    stuck = Stuck()
    with pytest.raises(KeyboardInterrupt):
        bridge.run(stuck.wait)
    assert stuck.cancelled
    assert bridge.run(doubled, 1) == 2


def test_result_arriving_during_an_interrupt_is_handed_over(bridge: Bridge) -> None:
    kept: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        bridge.run_or_hand(kept.append, Stuck(brings=7).wait)
    assert kept == [7]


def test_a_call_that_waits_ends_when_the_bridge_is_closed(bridge: Bridge) -> None:
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(bridge.run, forever)
        assert begun.wait(10)
        bridge.close()
        with pytest.raises(AlreadyClosed):
            call.result(10)


def test_after_closing_calls_are_refused(bridge: Bridge) -> None:
    bridge.close()
    bridge.close()
    with pytest.raises(AlreadyClosed, match="connect a new one"):
        bridge.run(doubled, 1)


def test_closing_while_many_threads_call_leaves_none_waiting() -> None:
    for _ in range(20):
        bridge = Bridge()
        barrier = threading.Barrier(5)

        def call(bridge: Bridge = bridge, barrier: threading.Barrier = barrier) -> int:
            barrier.wait(10)
            done = 0
            try:
                while True:
                    bridge.run(doubled, 1)
                    done += 1
            except AlreadyClosed:
                return done

        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(call) for _ in range(4)]
            barrier.wait(10)
            bridge.close()
            for each in calls:
                each.result(10)


def test_the_loops_own_thread_may_not_wait_for_itself(bridge: Bridge) -> None:
    with pytest.raises(ClientError, match="another thread"):
        bridge.call(lambda: bridge.run(doubled, 1))


def test_bridge_refuses_calls_in_a_forked_child(bridge: Bridge) -> None:
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for call in (lambda: bridge.run(doubled, 1), lambda: bridge.soon(lambda: None)):
                try:
                    call()
                except ClientError as error:
                    os.write(sending, f"{error}\n".encode())
        finally:
            bridge.close()
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as told:
        assert [line.split(": ")[1] for line in told] == ["connect a client in each process.\n"] * 2
    assert os.waitpid(child, 0)[1] == 0
    assert bridge.run(doubled, 2) == 4


UNCLOSED = """
import asyncio, os
from magnetar.sync.bridge import Bridge

async def end():
    await asyncio.sleep(0.01)
    print("ended in", os.getpid() == own, flush=True)

own = os.getpid()
bridge = Bridge()
bridge.at_end(end)
bridge.call(lambda: print("made", flush=True))
"""


def outcome(script: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout, done.stderr


def test_an_open_bridge_ends_with_the_interpreter() -> None:
    assert outcome(UNCLOSED) == ("made\nended in True\n", "")


def test_a_child_that_ends_leaves_the_parents_bridge_alone() -> None:
    forked = "child = os.fork()\nif child:\n    assert os.waitpid(child, 0)[1] == 0\n"
    assert outcome(UNCLOSED + forked) == ("made\nended in True\n", "")


def test_an_unreferenced_bridge_ends() -> None:
    forgotten = "del bridge\nprint('forgotten', flush=True)\n"
    assert outcome(UNCLOSED + forgotten) == ("made\nended in True\nforgotten\n", "")


def test_exit_callbacks_are_awaited_while_the_loop_runs(bridge: Bridge) -> None:
    ended: list[int] = []

    async def end() -> None:
        await asyncio.sleep(0)
        ended.append(threading.get_ident())

    bridge.at_end(end)
    thread = bridge.run(in_this_thread)
    bridge.close()
    bridge.close()
    assert ended == [thread]
