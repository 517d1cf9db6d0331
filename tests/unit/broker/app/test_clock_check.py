"""The broker's clock beside the metadata store's."""

import pytest
from structlog.testing import capture_logs

from broker.app.clock_check import ClockCheck, ClockSkew
from config import bounds
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataError
from tests.support.clocks import TickingClock
from tests.support.waiting import until

BOUND_MS = bounds.CLOCK_SKEW_MAX_MS


class TimedStore(MemoryMetadataStore):
    """A store whose servers have a clock of their own; None: none."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__(clock)
        self.clock = clock
        self.behind_ms: int | None = 0
        self.asked = 0
        self.fails = False

    async def server_time_ms(self) -> int | None:
        self.asked += 1
        if self.fails:
            raise MetadataError("away")
        return None if self.behind_ms is None else self.clock.now_ms() - self.behind_ms


@pytest.fixture
async def store() -> TimedStore:
    return TimedStore(TickingClock())


@pytest.mark.parametrize(
    ("behind_ms", "skew_ms"),
    [(0, 0), (10, 0), (-10, 0), (1_010, 1_000), (-1_010, -1_000), (None, 0)],
)
async def test_the_skew_is_what_the_time_of_the_question_does_not_explain(
    store: TimedStore, behind_ms: int | None, skew_ms: int
) -> None:
    store.behind_ms = behind_ms
    check = ClockCheck(store, store.clock)
    await check.start()
    assert check.skew_ms == skew_ms
    await check.stop()


@pytest.mark.parametrize(("behind_ms", "text"), [(1, "ahead of"), (-1, "behind")])
async def test_a_broker_does_not_start_with_a_clock_that_differs_too_much(
    store: TimedStore, behind_ms: int, text: str
) -> None:
    store.behind_ms = behind_ms * (BOUND_MS + 1_000)
    with pytest.raises(ClockSkew, match=text):
        await ClockCheck(store, store.clock).start()


async def test_clock_skew_that_begins_later_is_logged(store: TimedStore) -> None:
    check = ClockCheck(store, store.clock, check_s=0.001)
    await check.start()
    with capture_logs() as logs:
        store.fails = True
        asked = store.asked
        await until_asked(store, asked + 2)
        store.fails, store.behind_ms = False, BOUND_MS + 1_000
        await until(lambda: any(one["event"] == "clock_skew" for one in logs))
    assert check.skew_ms > BOUND_MS
    await check.stop()


async def until_asked(store: TimedStore, times: int) -> None:
    await until(lambda: store.asked >= times)
