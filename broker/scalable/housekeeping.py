"""Work on topics that nobody asked for: what was left half done, and what may be pruned.

Rules:

- One broker finishes at its start what an earlier process left, before anybody is let in.
- With several brokers that is done by who leads the topic, when he takes the lead.  A topic with
  something left and no leader is taken by the live broker that its name chooses: as soon as its
  leader or a broker is seen to go, and in each round.
- What fails is tried again in the next round, and a round that breaks off is followed by the next.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

import structlog

from broker.placement.choice import choose_by_name
from broker.scalable.leads import Leads
from broker.scalable.live_topics import LiveTopics
from broker.scalable.pruning import Pruner
from broker.scalable.steps import Step
from broker.scalable.topic_store import TopicStore
from protocol.names import NamespaceName, TopicDomain, TopicName
from protocol.server_error import MagnetarError
from storage.managed_ledger_types import Retention
from storage.supervised import Supervised

if TYPE_CHECKING:
    from broker.placement import Placement

log = structlog.get_logger(__name__)


class Housekeeping:
    """See the module's rules.  `recover` finishes or undoes one step, under its topic's lock."""

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        pruner: Pruner,
        leads: Leads,
        placement: "Placement",
        *,
        recover: Callable[[Step], Awaitable[None]],
        leftovers: Sequence[Callable[[], Awaitable[None]]],
        retention_of: Callable[[NamespaceName], Awaitable[Retention]],
        interval_s: float,
    ) -> None:
        """`leftovers` try again what those who made it could not finish."""
        self._topics = topics
        self._store = store
        self._pruner = pruner
        self._leads = leads
        self._placement = placement
        self._recover = recover
        self._leftovers = leftovers
        self._retention_of = retention_of
        self._interval_s = interval_s
        self._unrecovered: set[str] = set()
        """Keys of steps that could neither be finished nor undone."""
        self._without_leader: set[TopicName] = set()
        self._round_due = False
        self._wake = asyncio.Event()
        self._tasks = Supervised()
        self._forget = (
            placement.on_change(self._owner_changed),
            placement.on_brokers(self._brokers_changed),
        )

    async def start(self) -> None:
        """Recover, where that is nobody else's business; then look from time to time."""
        if not self._placement.shared:
            await self._recover_all({step.key for step in await self._store.begun()})
        self._tasks.keep("housekeeping", self._keep_house)

    async def stop(self) -> None:
        """No more looks.  May be called again."""
        for forget in self._forget:
            forget()
        await self._tasks.stop()

    async def _keep_house(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            names_only = self._wake.is_set() and not self._round_due
            self._wake.clear()
            self._round_due = False
            try:
                await (self._find_leaders() if names_only else self.prune_all())
            except MagnetarError as error:
                log.warning("housekeeping_failed", error=str(error))

    async def prune_all(self) -> None:
        """One round: leftovers first, then every topic with sealed segments."""
        await self._recover_all(set(self._unrecovered))
        for finish in self._leftovers:
            await finish()
        if self._placement.shared:
            steps = await self._store.begun()
            self._without_leader.update(step.topic for step in steps)
            await self._recover_steps({step.key for step in steps if self._is_stray(step)}, steps)
            await self._find_leaders()
        for name in await self._store.with_sealed_segments():
            try:
                if await self._is_ours(name):
                    await self._prune(name)
            except MagnetarError as error:
                log.warning("prune_failed", topic=str(name), error=str(error))

    async def _prune(self, name: TopicName) -> None:
        live = await self._topics.find(name)
        if live is not None:
            await self._pruner.prune(live, await self._retention_of(name.namespace_name))

    # Steps

    async def lead_taken(self, name: TopicName) -> None:
        """This broker leads the topic now: take up what an earlier leader left."""
        await self._topics.refresh(name)
        steps = await self._store.begun_for(name)
        await self._recover_steps({step.key for step in steps}, steps)

    def _is_stray(self, step: Step) -> bool:
        """Whether nobody is at it: an earlier leader's note that came late."""
        live = self._topics.known(step.topic)
        busy = self._topics.is_changing(step.topic) or (live is not None and bool(live.work))
        return self._leads.leads(step.topic) and not busy

    async def _recover_all(self, keys: Set[str]) -> None:
        """Recover those of the noted steps; what fails is tried again while the broker runs."""
        if keys:
            await self._recover_steps(keys, await self._store.begun())

    async def _recover_steps(self, keys: Set[str], noted: Iterable[Step]) -> None:
        self._unrecovered -= keys
        wanted = (step for step in noted if step.key in keys)
        steps = sorted(wanted, key=lambda step: (step.topic, step.epoch))
        left = {step.key for step in steps}
        try:
            for step in steps:
                if not self._leads.leads(step.topic) or await self._is_recovered(step):
                    left.discard(step.key)
        finally:
            # A defect at one of them must not make those behind it forgotten.
            self._unrecovered |= left

    async def _is_recovered(self, step: Step) -> bool:
        try:
            if await self._store.noted(step) is not None:
                await self._recover(step)
                log.info("step_recovered", step=step.key)
        except MagnetarError as error:
            log.error("step_not_recovered", step=step.key, error=str(error))
            return False
        return True

    # Leaders

    async def _find_leaders(self) -> None:
        """Lead topics that have something left, nobody who leads them, and this broker's name."""
        for name in sorted(self._without_leader):
            self._without_leader.discard(name)
            if not self._leads.leads(name) and self._chosen(name):
                try:
                    if await self._store.begun_for(name):
                        await self._leads.try_to_take(name)
                except MagnetarError as error:
                    log.warning("lead_not_taken", topic=str(name), error=str(error))

    async def _is_ours(self, name: TopicName) -> bool:
        if self._leads.leads(name):
            return True
        return self._chosen(name) and await self._leads.try_to_take(name)

    def _chosen(self, name: TopicName) -> bool:
        """Whether this is the live broker that everybody chooses for a name."""
        chosen = choose_by_name(str(name), self._placement.candidates)
        return chosen == self._placement.broker_id

    def _owner_changed(self, name: TopicName) -> None:
        if name.domain is TopicDomain.TOPIC:
            self._without_leader.add(name)
            self._wake.set()

    def _brokers_changed(self) -> None:
        self._round_due = True
        self._wake.set()
