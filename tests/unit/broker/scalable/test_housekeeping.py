"""Rounds of housekeeping, and steps that were left over: when they come."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

from broker.scalable.housekeeping import Housekeeping
from broker.scalable.leftovers import Leftovers
from broker.scalable.steps import Step, StepKind
from magnetar.protocol.names import TopicName, parse_topic_name
from storage.metadata.store import MetadataError
from tests.unit.txn.virtual_time import in_virtual_time

INTERVAL_S = 60


class Parts:
    """Housekeeping of one of several brokers, which leads all topics; no step is noted."""

    def __init__(self, recover: Callable[[Step], Awaitable[None]] | None = None) -> None:
        self.leftovers = Leftovers()
        self.rounds = AsyncMock(return_value=[])
        """The look for topics with sealed segments, of each round."""
        self.owner_changed: Callable[[TopicName], None] = Mock()
        topics = SimpleNamespace(all=list, lock=lambda _: asyncio.Lock())

        async def noted(step: Step) -> Step:
            return step

        store = SimpleNamespace(
            noted=noted,
            begun=AsyncMock(return_value=[]),
            begun_for=AsyncMock(return_value=[]),
            with_sealed_segments=self.rounds,
        )
        placement = SimpleNamespace(
            shared=True,
            broker_id="b",
            candidates=["b"],
            on_change=self._listen,
            on_brokers=lambda _: lambda: None,
        )
        self.housekeeping = Housekeeping(
            topics,  # type: ignore[arg-type]
            store,  # type: ignore[arg-type]
            Mock(),
            SimpleNamespace(leads=lambda _: True),  # type: ignore[arg-type]
            placement,  # type: ignore[arg-type]
            self.leftovers,
            recover=recover or AsyncMock(),
            is_finishing=lambda _: False,
            finish_late=AsyncMock(),
            take_in_sealed=AsyncMock(),
            retention_of=AsyncMock(),
            interval_s=INTERVAL_S,
        )

    def _listen(self, listener: Callable[[TopicName], None]) -> Callable[[], None]:
        self.owner_changed = listener
        return lambda: None


@in_virtual_time
async def test_leads_that_change_all_the_time_do_not_put_off_rounds() -> None:
    parts = Parts()
    await parts.housekeeping.start()
    for number in range(10 * INTERVAL_S):
        parts.owner_changed(parse_topic_name(f"topic://public/default/t{number}"))
        await asyncio.sleep(1)
    assert 9 <= parts.rounds.await_count <= 10
    await parts.housekeeping.stop()


@in_virtual_time
async def test_a_step_that_is_left_over_while_another_is_tried_is_tried_soon() -> None:
    old, new = (
        Step(parse_topic_name(f"topic://public/default/{name}"), StepKind.SPLIT, 1)
        for name in ("old", "new")
    )
    tried: dict[Step, list[float]] = {old: [], new: []}
    time_s = asyncio.get_running_loop().time

    async def recover(step: Step) -> None:
        tried[step].append(time_s())
        await asyncio.sleep(1)
        raise MetadataError("the store is away: try again.")

    parts = Parts(recover)
    await parts.housekeeping.start()
    parts.leftovers.add(old)
    while len(tried[old]) < 9:
        await asyncio.sleep(0.5)
    # The next pause is long, and has not begun.
    added_s = time_s()
    parts.leftovers.add(new)
    while not tried[new]:
        await asyncio.sleep(0.5)
    assert tried[new][0] - added_s < 3
    await parts.housekeeping.stop()
