"""Every interleaving of two drivers of one query: each batch is seen once, whole and in order."""

from dataclasses import replace

import pytest

from magnetar.errors import InvalidTransactionStatus, OperationTimedOut
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.commit import Decision
from magnetar.spark.sink_driver import SinkDriver
from tests.unit.magnetar.spark.sink_world import Coordinator, Group, Plan, World
from tests.unit.txn.schedules import Extent, Found, explore


def explored(plan: Plan) -> Extent:
    return explore(lambda loop: World(loop, plan))


@pytest.mark.parametrize(
    ("plan", "states"),
    [
        pytest.param(Plan(), 500, id="two-drivers"),
        pytest.param(Plan(batches=2), 1500, id="two-batches"),
        pytest.param(Plan(partitions=2, losers=1), 2000, id="tasks-that-are-tried-again"),
        pytest.param(Plan(drivers=1, batches=2, crashes=2), 3000, id="crashes-and-replays"),
        pytest.param(Plan(drivers=1, crashes=2, hint=False), 1000, id="tasks-without-hints"),
        pytest.param(Plan(drivers=1, crashes=1, losses=2), 300, id="lost-answers"),
        pytest.param(Plan(drivers=1, losses=2, gives_up=True), 150, id="silence"),
        pytest.param(Plan(drivers=1, batches=2, timeouts=2), 100, id="time-that-is-up"),
        pytest.param(Plan(timeouts=1), 1000, id="two-drivers-and-time-that-is-up"),
    ],
)
def test_each_batch_is_seen_once_in_every_schedule(plan: Plan, states: int) -> None:
    assert explored(plan).states > states, "less happened than is meant"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(losses=1, gives_up=True), id="two-drivers-and-silence"),
        pytest.param(Plan(batches=2, crashes=1), id="two-batches-and-a-crash"),
        pytest.param(Plan(partitions=2, losers=1, crashes=1), id="losers-and-a-crash"),
        pytest.param(Plan(timeouts=1, crashes=1), id="time-that-is-up-and-a-crash"),
    ],
)
def test_each_batch_is_seen_once_in_longer_schedules(plan: Plan) -> None:
    explored(plan)


# Each rule broken


class TakesAnyRefusalForDone(SinkDriver):
    """D3: as connectors do that count an invalid status as committed before."""

    async def decide(self, decision: Decision, positions: str | None) -> bool:
        try:
            return await super().decide(decision, positions)
        except InvalidTransactionStatus:
            return True


class TakesSilenceForDone(SinkDriver):
    """D2, D3."""

    async def decide(self, decision: Decision, positions: str | None) -> bool:
        try:
            return await super().decide(decision, positions)
        except OperationTimedOut:
            return True


class LosersWinToo(SinkDriver):
    """C3: one transaction for the whole batch, of whoever wrote in it."""

    async def decide(self, decision: Decision, positions: str | None) -> bool:
        last = max((winner.attempt for winner in decision.winners), default=None)
        if last is not None:
            number, group = last.least >> 44, decision.winners[0]
            every = [
                replace(group, attempt=TxnId(0, index << 44 | last.least % (1 << 44)))
                for index in range(1, number + 1)
            ]
            decision = replace(decision, winners=tuple(every))
        return await super().decide(decision, positions)


class ReadsNoPositions(SinkDriver):
    """D4."""

    async def read_positions(self, batch: int) -> str | None:
        return None


class ForgetsBatches(Coordinator):
    """G6."""

    def last_batch(self, query: str) -> int:
        return -1


class AbortsForAnybody(Coordinator):
    """G7: what a fenced driver's abort must not reach."""

    def abort(self, epoch: int) -> bool:
        return self.abort_open()


class CommitsForAnybody(Coordinator):
    """G4, and no fence: a driver that was overtaken commits what it has."""

    def _require(self, epoch: int) -> None:
        """Whoever asks."""

    def open_key(self) -> int:
        self.epoch += 1
        return self.epoch

    def last_batch(self, query: str) -> int:
        return -1

    @property
    def open_group(self) -> Group | None:
        return None


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(timeouts=1, drivers=1, driver=TakesAnyRefusalForDone), id="refusals"),
        pytest.param(
            Plan(losses=1, timeouts=1, gives_up=True, drivers=1, driver=TakesSilenceForDone),
            id="silence",
        ),
        pytest.param(Plan(drivers=1, losers=1, driver=LosersWinToo), id="losers"),
        pytest.param(Plan(drivers=1, driver=ReadsNoPositions), id="positions"),
        pytest.param(Plan(drivers=1, crashes=1, coordinator=ForgetsBatches), id="replays"),
        pytest.param(Plan(coordinator=AbortsForAnybody), id="aborts"),
        pytest.param(Plan(coordinator=CommitsForAnybody), id="fences"),
    ],
)
def test_broken_rule_is_detected(plan: Plan) -> None:
    with pytest.raises(Found):
        explored(plan)
