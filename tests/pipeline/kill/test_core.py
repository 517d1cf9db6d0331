"""The core of the kill matrix: what every change is tried on.

Each case says at which point what dies; the hook must have acted, and readers of the sink must see
each copy once.  The rest of the matrix is in `test_matrix.py`.
"""

import pytest

from tests.pipeline.driver import FAILED
from tests.pipeline.hooks import Action, Point
from tests.pipeline.kill.conftest import IN_A_BATCH, ROWS, Copying


async def test_a_driver_killed_before_and_after_its_decision(copying: Copying) -> None:
    """K5: the batch is written again.  K7: it is decided, so what is written again is not seen."""
    first = copying.driver("first")
    before = first.hooks.at(Point.COMMIT_BEGINS, Action.WAIT, batch=1)
    first.spawn()
    await first.until(before)
    first.kill()

    second = copying.driver("second")
    after = second.hooks.at(Point.COMMIT_RETURNED, Action.WAIT, batch=1)
    second.spawn()
    await second.until(after)
    seen = await copying.audit(whole=False)
    second.kill()
    assert seen > IN_A_BATCH, "the batch is seen before Spark knows"

    third = copying.driver("third")
    again = third.hooks.at(Point.COMMIT_RETURNED, batch=1)
    await third.run_to_end()
    assert third.hooks.reached(again)
    assert await copying.audit(whole=True) == ROWS


async def test_a_commit_whose_answer_is_lost_is_not_aborted(copying: Copying) -> None:
    """K6 and K15: the process that commits dies when it has; Spark aborts, fails, and repeats."""
    first = copying.driver("first")
    lost = first.hooks.at(Point.COMMIT_RETURNED, Action.DIE, batch=1)
    aborted = first.hooks.at(Point.ABORT_RETURNED, batch=1)
    first.spawn()
    assert await first.finished() == FAILED
    assert first.hooks.reached(lost)
    assert first.hooks.reached(aborted)
    assert await copying.audit(whole=False) > IN_A_BATCH

    second = copying.driver("second")
    again = second.hooks.at(Point.COMMIT_RETURNED, batch=1)
    await second.run_to_end()
    assert second.hooks.reached(again)
    assert await copying.audit(whole=True) == ROWS


@pytest.mark.parametrize(
    "point", [Point.COMMIT_BEGINS, pytest.param(Point.WRITE_UNDER_WAY, marks=pytest.mark.nightly)]
)
async def test_a_driver_that_was_believed_dead_changes_nothing(
    copying: Copying, point: Point
) -> None:
    """K8: it sleeps before its decision, or in a write, and wakes when another one has done all."""
    zombie = copying.driver("zombie")
    asleep = zombie.hooks.at(point, Action.WAIT, batch=1)
    zombie.spawn()
    await zombie.until(asleep)
    zombie.pause()

    successor = copying.driver("successor")
    await successor.run_to_end()
    assert await copying.audit(whole=True) == ROWS

    zombie.hooks.release(asleep)
    zombie.resume()
    assert await zombie.finished() == FAILED
    assert "TransactionKeyFenced" in zombie.logs()
    assert await copying.audit(whole=True) == ROWS
