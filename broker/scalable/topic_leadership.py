"""The topics that this broker leads: only the leader of a topic changes it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar

import structlog

from broker.placement import BrokerAddress, OwnedElsewhere, Placement
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

log = structlog.get_logger(__name__)


class NotController(PeerError):
    """Another broker leads the topic."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class TopicLeadership:
    """Takes, gives up and keeps track of the lead of topics.

    The lead of a topic is the placement's ownership of the topic's own name, so every broker knows
    all leaders.  It is taken by the first broker that needs it.  A single broker leads everything.

    `recover` finishes or undoes the steps that an earlier leader left, each time the lead is taken.
    `ended` is called when a lead is given up or lost, in the same turn of the loop.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        recover: Callable[[TopicName], Awaitable[None]],
        ended: Callable[[TopicName], None],
    ) -> None:
        self._placement = placement
        self._recover = recover
        self._ended = ended
        self._led: set[TopicName] = set()
        self._recovering: dict[TopicName, asyncio.Task[None]] = {}
        self._forget = placement.on_change(self._owner_changed)

    def leads(self, name: TopicName) -> bool:
        """Whether this broker may change the topic."""
        return not self._placement.shared or (name in self._led and self._placement.owns(name))

    def leader_of(self, name: TopicName) -> BrokerAddress:
        """The address of the topic's leader, or of the broker that would be chosen."""
        return self._placement.controller_of(name)

    async def take(self, name: TopicName) -> None:
        """Lead the topic.  Raises `NotController`, `PlacementNotReady`, `MetadataError`."""
        if self.leads(name):
            return
        try:
            await self._placement.acquire(name)
        except OwnedElsewhere as error:
            raise NotController(
                f"{name} is led by {self.leader_of(name).broker_id}: look its layout up again and "
                "ask the controller named there."
            ) from error
        if name not in self._led and self._placement.owns(name):
            self._led.add(name)
            log.info("topic_lead_taken", topic=str(name))
            self._begin_recovery(name)

    async def take_to_change(self, name: TopicName) -> None:
        """Lead the topic, after a first try to recover the steps of an earlier leader.

        Raises as `take`.
        """
        await self.take(name)
        recovering = self._recovering.get(name)
        if recovering is not None:
            await asyncio.shield(recovering)

    async def try_to_take(self, name: TopicName) -> bool:
        """Lead the topic unless another broker does; whether this one leads it.

        Raises `PlacementNotReady`, `MetadataError`.
        """
        try:
            await self.take(name)
        except NotController:
            return False
        return True

    async def give_up(self, name: TopicName) -> None:
        """Give up the lead of a topic, if this broker has it."""
        if self._placement.shared:
            if name in self._led:
                self._end(name)
            await self._placement.release(name)

    async def stop(self) -> None:
        """Give up all leads."""
        self._forget()
        recovering = list(self._recovering.values())
        for task in recovering:
            task.cancel()
        await asyncio.gather(*recovering, return_exceptions=True)
        led = list(self._led)
        for name in led:
            self._end(name)
        await asyncio.gather(*(self._placement.release(name) for name in led))

    def _owner_changed(self, name: TopicName) -> None:
        if name in self._led and not self._placement.owns(name):
            log.info("topic_lead_lost", topic=str(name))
            self._end(name)

    def _end(self, name: TopicName) -> None:
        self._led.discard(name)
        self._ended(name)

    def _begin_recovery(self, name: TopicName) -> None:
        former = self._recovering.pop(name, None)
        self._recovering[name] = asyncio.create_task(self._recover_once(name, former))

    async def _recover_once(self, name: TopicName, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait((former,))
        try:
            await self._recover(name)
        except MagnetarError as error:
            log.warning("lead_recovery_failed", topic=str(name), error=str(error))
        finally:
            if self._recovering.get(name) is asyncio.current_task():
                del self._recovering[name]


def not_led(name: TopicName) -> NotController:
    """The error for a lead that ended meanwhile."""
    return NotController(
        f"{name} is not led by this broker any more: look its layout up again and ask the "
        "controller named there."
    )
