"""`HeldQuestions`: stops a broker that asks another cluster how far subscriptions have come."""

import asyncio

import pytest

from broker.app.service import Broker
from broker.scalable.local_segments import LocalSegments
from broker.topics.subscription_positions import CopiesAnswered, PositionsTold, SubscriptionsLeft
from magnetar.protocol.names import SegmentName, TopicName
from tests.support.waiting import until


class HeldQuestions:
    """Holds each question of a leader before it is sent, and each answer before it is taken.

    The owners of segments have said how far they have come by then.  `let_go` ends that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
        self._tell = broker.replications.tell_positions
        take = LocalSegments.take_answer
        self._held = ""
        self._go = asyncio.Semaphore(0)
        self._is_free = False
        self._taken = 0
        monkeypatch.setattr(broker.replications, "tell_positions", self._tell_held)

        async def take_counted(
            segments: LocalSegments, segment: SegmentName, answer: CopiesAnswered
        ) -> None:
            await take(segments, segment, answer)
            self._taken += 1

        monkeypatch.setattr(LocalSegments, "take_answer", take_counted)

    async def _tell_held(
        self, cluster: str, topic: TopicName, told: PositionsTold
    ) -> SubscriptionsLeft:
        await self._hold("asked")
        answer = await self._tell(cluster, topic, told)
        await self._hold("answered")
        return answer

    async def _hold(self, at: str) -> None:
        if not self._is_free:
            self._held = at
            await self._go.acquire()

    def _go_on(self) -> None:
        self._held = ""
        self._go.release()

    async def until_asked(self) -> None:
        """Return when a question is held: owners have said how far they have come."""
        await until(lambda: self._held == "asked")

    async def until_answered(self) -> None:
        """Send the question that is held, or comes next; return when its answer is held."""
        await self.until_asked()
        self._go_on()
        await until(lambda: self._held == "answered")

    async def until_taken(self) -> None:
        """Have an owner take the answer that is held, or comes next; return when it has."""
        if self._held != "answered":
            await self.until_answered()
        taken = self._taken
        self._go_on()
        await until(lambda: self._taken > taken)

    def let_go(self) -> None:
        """Hold nothing more."""
        self._is_free = True
        self._go.release()
