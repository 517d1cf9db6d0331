"""What the driver asks about a batch of which a task was told that it is done: rule D6."""

import pytest

from magnetar.errors import InvalidTransactionStatus
from magnetar.spark.commit import Decision
from magnetar.spark.errors import CommitRefused, PositionsUnreadable
from magnetar.spark.sink_driver import BatchOutcome, SinkDriver
from magnetar.spark.task_report import TaskReport
from tests.unit.magnetar.spark.sink_world import Coordinator

BATCH = 5
DONE = [TaskReport("second try", 0, "q", BATCH, done=True)]


class AtCoordinator:
    """`Groups` of the newest epoch."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.asked: list[str] = []

    async def commit(self, decision: Decision, positions: str | None) -> bool:
        self.asked.append("commit")
        return self._coordinator.commit(self._coordinator.epoch, decision, positions)

    async def abort(self) -> bool:
        self.asked.append("abort")
        return self._coordinator.abort(self._coordinator.epoch)


class Checkpoint:
    def __init__(self, text: str | None) -> None:
        self._text = text

    async def positions(self, batch: int) -> str:
        if self._text is None:
            raise PositionsUnreadable("offsets/5 is gone.")
        return self._text

    async def query(self) -> str:
        return "q"


def committed_before() -> AtCoordinator:
    coordinator = Coordinator()
    coordinator.open_key()
    coordinator.commit(0, Decision("first try", None, (), "q", BATCH), "as planned")
    coordinator.open_key()
    assert coordinator.begin(1, "second try", "q", BATCH) is None
    return AtCoordinator(coordinator)


async def test_repeated_batch_with_equal_positions_is_done() -> None:
    groups = committed_before()
    driver = SinkDriver(groups, Checkpoint("as planned"), track_positions=True)
    assert await driver.commit(DONE, BATCH) is BatchOutcome.DONE_BEFORE


async def test_repeated_batch_with_other_positions_is_refused() -> None:
    """Its tasks dropped their rows when they were told that the batch is done."""
    driver = SinkDriver(committed_before(), Checkpoint("planned anew"), track_positions=True)
    with pytest.raises(InvalidTransactionStatus, match="other positions"):
        await driver.commit(DONE, BATCH)


async def test_repeated_batch_without_positions_is_done_unless_tracked() -> None:
    groups = committed_before()
    assert await SinkDriver(groups, Checkpoint(None)).commit(DONE, BATCH) is (
        BatchOutcome.DONE_BEFORE
    )
    assert groups.asked == ["abort"]
    driver = SinkDriver(groups, Checkpoint(None), track_positions=True)
    with pytest.raises(PositionsUnreadable):
        await driver.commit(DONE, BATCH)


async def test_commit_of_a_forgotten_batch_is_refused() -> None:
    """Too many other queries of the key committed between the answer to the task and this one."""
    coordinator = Coordinator()
    coordinator.open_key()
    driver = SinkDriver(AtCoordinator(coordinator), Checkpoint("as planned"), track_positions=True)
    with pytest.raises(CommitRefused, match="is not known any more"):
        await driver.commit(DONE, BATCH)
