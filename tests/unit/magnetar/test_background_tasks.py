"""Background tasks: run once whatever becomes of their callers, or run again whatever ends them."""

import asyncio
import gc
import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from magnetar.background_tasks import (
    RESTART_PAUSE_MAX_S,
    RESTART_PAUSE_MIN_S,
    BackgroundTasks,
    EndsForGood,
    OwnerStopped,
)
from magnetar.protocol.server_error import InternalError, PeerError
from tests.unit.txn.virtual_time import in_virtual_time

DEFECT = RuntimeError("a defect")
LOG = structlog.get_logger(__name__)


class StoreDown(InternalError):
    """An error that a sentence is enough for."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not drawn for a terminal, which takes long."""
    with capture_logs():
        yield


class Runs:
    """Ends each run in a given way, and the last one not at all."""

    def __init__(self, *ends: BaseException | None, lasting_s: float = 0.0) -> None:
        self.began_s: list[float] = []
        self._ends = list(ends)
        self._lasting_s = lasting_s

    async def __call__(self) -> None:
        self.began_s.append(asyncio.get_running_loop().time())
        if not self._ends:
            await asyncio.Event().wait()
        await asyncio.sleep(self._lasting_s)
        end = self._ends.pop(0)
        if end is not None:
            raise end

    @property
    def pauses_s(self) -> list[float]:
        """Between the beginnings, without the time that runs took."""
        pairs = zip(self.began_s, self.began_s[1:], strict=False)
        return [round(later - earlier - self._lasting_s, 3) for earlier, later in pairs]


# Tasks that run once


async def fail(error: Exception) -> None:
    raise error


async def sleep_for_ever() -> None:
    await asyncio.Event().wait()


async def test_work_goes_on_when_its_caller_is_cancelled() -> None:
    tasks, go = BackgroundTasks(), asyncio.Event()
    done: list[int] = []

    async def work() -> int:
        await go.wait()
        done.append(1)
        return 7

    caller = asyncio.create_task(tasks.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    go.set()
    assert tasks.busy
    await tasks.wait()
    assert done == [1]
    assert await tasks.finish(work()) == 7
    assert not tasks.busy


async def test_finish_raises_the_failure_of_the_work() -> None:
    with pytest.raises(KeyError):
        await BackgroundTasks().finish(fail(KeyError("ours")))


async def test_unexpected_failures_are_logged_with_the_owners_event() -> None:
    tasks = BackgroundTasks(LOG, failure_event="it_failed", expected=(PeerError,), segment="s")
    error = KeyError("ours")
    with capture_logs() as logs:
        tasks.start(fail(PeerError("Theirs.")))
        tasks.start(fail(error))
        tasks.start(sleep_for_ever()).cancel()
        await tasks.wait()
        await asyncio.sleep(0)
    assert logs == [
        {"event": "it_failed", "log_level": "error", "segment": "s", "exc_info": error},
    ]


async def test_a_failure_without_an_event_is_left_to_asyncio() -> None:
    """It calls the handler of the loop when nobody has awaited the task."""
    unseen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unseen.append(told["message"]))
    for tasks in (BackgroundTasks(LOG), BackgroundTasks(LOG, expected=(Exception,))):
        with capture_logs() as logs:
            tasks.start(fail(KeyError("ours")))
            await tasks.wait()
            await asyncio.sleep(0)
            gc.collect()
        assert logs == []
        assert unseen == ["Task exception was never retrieved"], "expected ones are nobody's matter"


async def test_wait_waits_for_tasks_that_are_started_meanwhile() -> None:
    tasks, ended = BackgroundTasks(), list[str]()

    async def second() -> None:
        await asyncio.sleep(0)
        ended.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.start(second())
        ended.append("first")

    tasks.start(first())
    await tasks.wait()
    assert ended == ["first", "second"]


async def test_end_waits_for_the_tasks_that_it_cancels_and_takes_others_afterwards() -> None:
    tasks, ended = BackgroundTasks(), list[bool]()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    task = tasks.start(slow_to_end(), name="slow")
    assert (task.get_name(), list(tasks.running), tasks.count) == ("slow", [task], 1)
    await asyncio.sleep(0)
    await tasks.end()
    assert (ended, task.cancelled(), tasks.running, tasks.count) == ([True], True, frozenset(), 0)
    assert await tasks.finish(asyncio.sleep(0, 7)) == 7


async def test_cancel_does_not_wait() -> None:
    tasks = BackgroundTasks()
    task = tasks.start(sleep_for_ever())
    tasks.cancel()
    assert tasks.busy
    await tasks.wait()
    assert task.cancelled()


async def test_nothing_is_started_after_a_stop() -> None:
    tasks = BackgroundTasks()
    await tasks.stop()
    with pytest.raises(OwnerStopped):
        tasks.start(sleep_for_ever())
    with pytest.raises(OwnerStopped):
        await tasks.finish(sleep_for_ever())
    assert not tasks.busy


def test_without_a_log_tasks_are_reported_by_logging(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def failing() -> None:
        tasks = BackgroundTasks(failure_event="it_failed", segment="s")
        tasks.start(fail(DEFECT))
        tasks.keep("a watcher", Runs(StoreDown("Down: wait."), None))
        await asyncio.sleep(1)
        await tasks.stop()

    failing()
    assert [(each.levelno, each.message) for each in caplog.records] == [
        (logging.ERROR, "it_failed segment=s"),
        (logging.WARNING, "task_failed task=a watcher error=Down: wait. begins_again_in_s=0.05"),
        (logging.WARNING, "task_ended task=a watcher begins_again_in_s=0.1"),
    ]
    assert [each.exc_info[1] for each in caplog.records if each.exc_info] == [DEFECT]


# Tasks that are kept running


@in_virtual_time
async def test_kept_task_is_restarted_whatever_ends_it() -> None:
    cancelled = asyncio.CancelledError("of what it waited for")
    runs, tasks = Runs(DEFECT, None, StoreDown("Down: wait."), cancelled), BackgroundTasks(LOG)
    with capture_logs() as logs:
        tasks.keep("a watcher", runs)
        await asyncio.sleep(60)
    assert len(runs.began_s) == 5
    assert [(one["event"], one["log_level"], one["task"]) for one in logs] == [
        ("task_failed", "error", "a watcher"),
        ("task_ended", "warning", "a watcher"),
        ("task_failed", "warning", "a watcher"),
        ("task_failed", "error", "a watcher"),
    ]
    assert logs[0]["exc_info"] is DEFECT, "with its traceback"
    assert logs[2]["error"] == "Down: wait.", "a sentence is enough"
    await tasks.stop()
    assert not tasks.busy


@in_virtual_time
async def test_pauses_double_up_to_a_bound() -> None:
    runs, tasks = Runs(*[DEFECT] * 12), BackgroundTasks(LOG)
    tasks.keep("a watcher", runs)
    await asyncio.sleep(60)
    await tasks.stop()
    pauses_s = runs.pauses_s
    assert pauses_s[:3] == [RESTART_PAUSE_MIN_S, 2 * RESTART_PAUSE_MIN_S, 4 * RESTART_PAUSE_MIN_S]
    assert pauses_s[-1] == pauses_s[-2] == max(pauses_s) == RESTART_PAUSE_MAX_S


@in_virtual_time
async def test_a_run_that_lasted_begins_the_pauses_anew() -> None:
    runs, tasks = Runs(*[DEFECT] * 5, lasting_s=RESTART_PAUSE_MAX_S + 1), BackgroundTasks(LOG)
    tasks.keep("a watcher", runs)
    await asyncio.sleep(60)
    await tasks.stop()
    assert runs.pauses_s == [RESTART_PAUSE_MIN_S] * 5


@in_virtual_time
async def test_see_through_ends_with_the_first_return() -> None:
    runs, tasks = Runs(DEFECT, None, None), BackgroundTasks(LOG)
    await tasks.see_through("a change", runs)
    assert len(runs.began_s) == 2
    assert not tasks.busy


@in_virtual_time
async def test_one_is_cancelled_and_the_others_go_on() -> None:
    one, other, tasks = Runs(), Runs(DEFECT), BackgroundTasks(LOG)
    task = tasks.keep("one", one)
    tasks.keep("other", other)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(1)
    assert (len(one.began_s), len(other.began_s)) == (1, 2)
    await tasks.stop()
    await tasks.stop()


@in_virtual_time
async def test_stopping_ends_a_pause_too_and_waits_for_the_end() -> None:
    ended: list[bool] = []

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    tasks = BackgroundTasks(LOG)
    tasks.keep("slow to end", run)
    tasks.keep("pausing", Runs(*[DEFECT] * 9))
    await asyncio.sleep(1)
    await tasks.stop()
    assert ended == [True]
    assert not tasks.busy


@pytest.mark.parametrize("end", [None, DEFECT, StoreDown("Down: wait.")], ids=str)
def test_a_cancellation_that_a_run_makes_something_else_of_ends_it(end: Exception | None) -> None:
    began: list[None] = []

    async def run() -> None:
        began.append(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if end is not None:
                raise end from None

    @in_virtual_time
    async def stopping() -> None:
        tasks = BackgroundTasks(LOG)
        tasks.keep("a watcher", run)
        await asyncio.sleep(1)
        async with asyncio.timeout(60):
            await tasks.stop()
        assert not tasks.busy

    with capture_logs() as logs:
        stopping()
    assert len(began) == 1
    assert [one["exc_info"] for one in logs] == ([end] if end is DEFECT else [])


@in_virtual_time
async def test_a_stop_is_final() -> None:
    runs, tasks, refused = Runs(), BackgroundTasks(LOG), list[bool]()

    async def begins_another() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(OwnerStopped):
                tasks.keep("another", runs)
            refused.append(True)

    tasks.keep("a watcher", begins_another)
    await asyncio.sleep(1)
    await tasks.stop()
    for begin in (tasks.keep, tasks.see_through):
        with pytest.raises(OwnerStopped):
            begin("another", runs)
    await asyncio.sleep(1)
    assert refused == [True]
    assert runs.began_s == []
    assert not tasks.busy


@in_virtual_time
async def test_an_error_that_stays_true_ends_it_for_good() -> None:
    class Gone(StoreDown, EndsForGood):
        pass

    runs, tasks = Runs(StoreDown("Down: wait."), Gone("Gone: stop."), None), BackgroundTasks(LOG)
    with capture_logs() as logs:
        await tasks.keep("a session", runs)
    assert len(runs.began_s) == 2
    assert [(one["event"], one["error"]) for one in logs] == [
        ("task_failed", "Down: wait."),
        ("task_ended_for_good", "Gone: stop."),
    ]
    assert not tasks.busy
