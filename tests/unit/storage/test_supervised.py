"""Tasks that live as long as their owner: begun anew after whatever ends them, and no longer."""

import asyncio
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from config.bounds import RESTART_PAUSE_MAX_S, RESTART_PAUSE_MIN_S
from storage.metadata.store import MetadataError
from storage.supervised import EndsForGood, OwnerStopped, Supervised
from tests.unit.txn.virtual_time import in_virtual_time

DEFECT = RuntimeError("a defect")


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


@in_virtual_time
async def test_supervised_task_is_restarted_whatever_ends_it() -> None:
    cancelled = asyncio.CancelledError("of what it waited for")
    runs, tasks = Runs(DEFECT, None, MetadataError("Down: wait."), cancelled), Supervised()
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
    assert not tasks.running


@in_virtual_time
async def test_pauses_double_up_to_a_bound() -> None:
    runs, tasks = Runs(*[DEFECT] * 12), Supervised()
    tasks.keep("a watcher", runs)
    await asyncio.sleep(60)
    await tasks.stop()
    pauses_s = runs.pauses_s
    assert pauses_s[:3] == [RESTART_PAUSE_MIN_S, 2 * RESTART_PAUSE_MIN_S, 4 * RESTART_PAUSE_MIN_S]
    assert pauses_s[-1] == pauses_s[-2] == max(pauses_s) == RESTART_PAUSE_MAX_S


@in_virtual_time
async def test_a_run_that_lasted_begins_the_pauses_anew() -> None:
    runs, tasks = Runs(*[DEFECT] * 5, lasting_s=RESTART_PAUSE_MAX_S + 1), Supervised()
    tasks.keep("a watcher", runs)
    await asyncio.sleep(60)
    await tasks.stop()
    assert runs.pauses_s == [RESTART_PAUSE_MIN_S] * 5


@in_virtual_time
async def test_see_through_ends_with_the_first_return() -> None:
    runs, tasks = Runs(DEFECT, None, None), Supervised()
    await tasks.see_through("a change", runs)
    assert len(runs.began_s) == 2
    assert not tasks.running


@in_virtual_time
async def test_one_is_cancelled_and_the_others_go_on() -> None:
    one, other, tasks = Runs(), Runs(DEFECT), Supervised()
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

    tasks = Supervised()
    tasks.keep("slow to end", run)
    tasks.keep("pausing", Runs(*[DEFECT] * 9))
    await asyncio.sleep(1)
    await tasks.stop()
    assert ended == [True]
    assert not tasks.running


@pytest.mark.parametrize("end", [None, DEFECT, MetadataError("Down: wait.")], ids=str)
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
        tasks = Supervised()
        tasks.keep("a watcher", run)
        await asyncio.sleep(1)
        async with asyncio.timeout(60):
            await tasks.stop()
        assert not tasks.running

    with capture_logs() as logs:
        stopping()
    assert len(began) == 1
    assert [one["exc_info"] for one in logs] == ([end] if end is DEFECT else [])


@in_virtual_time
async def test_a_stop_is_final() -> None:
    runs, tasks, refused = Runs(), Supervised(), list[bool]()

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
    assert not tasks.running


@in_virtual_time
async def test_an_error_that_stays_true_ends_it_for_good() -> None:
    class Gone(MetadataError, EndsForGood):
        pass

    runs, tasks = Runs(MetadataError("Down: wait."), Gone("Gone: stop."), None), Supervised()
    with capture_logs() as logs:
        await tasks.keep("a session", runs)
    assert len(runs.began_s) == 2
    assert [(one["event"], one["error"]) for one in logs] == [
        ("task_failed", "Down: wait."),
        ("task_ended_for_good", "Gone: stop."),
    ]
    assert not tasks.running
