"""Every interleaving of two drivers whose key is in a state topic: each batch is seen once."""

from dataclasses import replace

import pytest

from magnetar.spark.key_log import Entry, EntryKind, KeyState, MessageRef, Verdict
from magnetar.spark.plain_groups import PlainGroups
from magnetar.spark.state_topic import KeyLog
from tests.unit.magnetar.spark.state_world import Plan, World
from tests.unit.txn.schedules import Extent, Found, explore


def explored(plan: Plan) -> Extent:
    return explore(lambda loop: World(loop, plan))


@pytest.mark.parametrize(
    ("plan", "states"),
    [
        pytest.param(Plan(), 500, id="two-drivers"),
        pytest.param(Plan(drivers=1, batches=2, crashes=2), 500, id="crashes-and-replays"),
        pytest.param(Plan(drivers=1, batches=2, losses=2), 200, id="lost-answers"),
        pytest.param(Plan(drivers=1, losses=2, forgets=True), 100, id="ends-that-are-forgotten"),
        pytest.param(Plan(drivers=1, batches=2, timeouts=2), 100, id="time-that-is-up"),
        pytest.param(Plan(copies=1), 500, id="states-that-are-stored-twice"),
        pytest.param(Plan(forgets=True), 500, id="two-drivers-and-ends-that-are-forgotten"),
    ],
)
def test_each_batch_is_seen_once_in_every_schedule(plan: Plan, states: int) -> None:
    assert explored(plan).states > states, "less happened than is meant"


# Each rule broken


def test_opener_that_ignores_intents_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def settles_nothing(log: KeyLog, own: object) -> None:
        """L2 is left out."""

    monkeypatch.setattr(KeyLog, "_settle", settles_nothing)
    with pytest.raises(Found, match="seen twice"):
        explored(Plan())


def test_opener_that_ignores_records_of_intents_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def reads_once(log: KeyLog, written: MessageRef, own: object = None) -> KeyState:
        state = await log._read(written.place, own)  # type: ignore[arg-type]
        await log._settle(own)  # type: ignore[arg-type]
        return state

    monkeypatch.setattr(KeyLog, "read_up_to", reads_once)
    with pytest.raises(Found, match="seen twice"):
        explored(Plan(crashes=1))


def test_state_applied_twice_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KeyState.after

    def forgetful(state: KeyState, entry: Entry) -> KeyState:
        again = entry.kind is EntryKind.STATE and entry.nonce == state.opener and state.begun
        return replace(state, pending=()) if again else right(state, entry)

    monkeypatch.setattr(KeyState, "after", forgetful)
    with pytest.raises(Found, match="seen twice"):
        explored(Plan(copies=1))


def test_driver_that_ignores_the_owner_of_the_key_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = KeyState.verdict

    def never_fenced(
        state: KeyState, epoch: int, query: str, batch: int, positions: str | None
    ) -> Verdict:
        return right(state, state.epoch, query, batch, positions)

    monkeypatch.setattr(KeyState, "verdict", never_fenced)
    with pytest.raises(Found):
        explored(Plan())


def test_driver_that_takes_any_refusal_for_done_is_detected() -> None:
    class Hopeful(PlainGroups):
        async def commit(self, decision: object, positions: str | None) -> bool:
            try:
                return await super().commit(decision, positions)  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - that is what it does
                return True

    with pytest.raises(Found):
        explored(Plan(drivers=1, timeouts=1, groups=Hopeful))
