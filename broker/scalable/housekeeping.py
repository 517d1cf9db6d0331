"""Background work on scalable topics: steps that were left unfinished, and pruning."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

import structlog

from broker.placement import Placement
from broker.placement.choice import choose_by_name
from broker.scalable.leftovers import Leftovers
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.pruning import Pruner
from broker.scalable.steps import Step
from broker.scalable.topic_leadership import TopicLeadership
from broker.scalable.topic_store import TopicStore
from magnetar.background_tasks import RESTART_PAUSE_MIN_S, BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.types import Retention

log = structlog.get_logger(__name__)


class Housekeeping:
    """Finishes or undoes steps that a crash interrupted, and prunes sealed segments.

    A single broker recovers the steps of an earlier process in `start`.  Among several brokers a
    topic's leader does, when it takes the lead.  A topic with steps and without a leader is taken
    by the live broker that its name chooses, as soon as its leader or a broker goes, and in each
    round.

    `recover` finishes or undoes one step, under its topic's lock; `is_finishing` returns whether
    one is being finished without the lock; `finish_late` finishes a migration that was published
    after its step was undone; `take_in_sealed` takes in what another process has sealed;
    `interval_s` is the time between rounds.
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        pruner: Pruner,
        leads: TopicLeadership,
        placement: Placement,
        leftovers: Leftovers,
        *,
        recover: Callable[[Step], Awaitable[None]],
        is_finishing: Callable[[Step], bool],
        finish_late: Callable[[LiveTopic], Awaitable[None]],
        take_in_sealed: Callable[[LiveTopic], Awaitable[None]],
        retention_of: Callable[[TopicName], Awaitable[Retention]],
        interval_s: float,
    ) -> None:
        self._topics = topics
        self._store = store
        self._pruner = pruner
        self._leads = leads
        self._placement = placement
        self._leftovers = leftovers
        self._recover = recover
        self._is_finishing = is_finishing
        self._finish_late = finish_late
        self._take_in_sealed = take_in_sealed
        self._retention_of = retention_of
        self._interval_s = interval_s
        self._without_leader: set[TopicName] = set()
        self._round_due = False
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks(log)
        self._forget = (
            placement.on_change(self._owner_changed),
            placement.on_brokers(self._brokers_changed),
        )

    async def start(self) -> None:
        """Recover all steps if this is the only broker; then run a round every `interval_s`."""
        if not self._placement.shared:
            await self._take_up(await self._store.begun())
        self._tasks.keep("housekeeping", self._run_rounds)
        self._tasks.keep("leftovers", self._finish_leftovers)

    async def stop(self) -> None:
        """Run no more rounds.  May be called again."""
        for forget in self._forget:
            forget()
        await self._tasks.stop()

    async def _run_rounds(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()
            self._wake.clear()
            # Leads may change more often than rounds are due, and must not put them off.
            whole = self._round_due or loop.time() >= due_s
            self._round_due = False
            try:
                await (self.prune_all() if whole else self._find_leaders())
            except MagnetarError as error:
                log.warning("housekeeping_failed", error=str(error))
            if whole:
                due_s = loop.time() + self._interval_s

    async def prune_all(self) -> None:
        """Run one round: leftovers first, then every topic with sealed segments."""
        await self._recover_steps(self._leftovers.all())
        # An earlier process, too, may note a step after this one has looked for them at its start.
        steps = await self._store.begun()
        self._without_leader.update(step.topic for step in steps)
        await self._take_up(step for step in steps if self._is_stray(step))
        await self._find_leaders()
        # In memory they may be sealed still: an earlier process, too, may prune after this one has
        # read the record, and a single broker does not watch it.
        known = {live.name for live in self._topics.all() if live.layout.sealed}
        for name in sorted(known.union(await self._store.with_sealed_segments())):
            try:
                if await self._is_ours(name):
                    await self._prune(name)
            except MagnetarError as error:
                log.warning("prune_failed", topic=str(name), error=str(error))

    async def _prune(self, name: TopicName) -> None:
        await self._topics.refresh(name)
        live = await self._topics.find(name)
        if live is not None:
            if live.layout.legacy:
                await self._finish_late(live)
            await self._take_in_sealed(live)
            await self._pruner.prune(live, await self._retention_of(name))

    # Steps

    async def lead_taken(self, name: TopicName) -> None:
        """Recover the steps that an earlier leader left, as this broker leads the topic now."""
        await self._topics.refresh(name)
        await self._take_up(await self._store.begun_for(name))

    def _is_stray(self, step: Step) -> bool:
        """Whether nobody may work on a step: an earlier leader's note was stored late.

        If the topic's lock is held, that may be for this step: see `_recover_step`.
        """
        known = step in self._leftovers.all() or self._is_finishing(step)
        return self._leads.leads(step.topic) and not known

    async def _finish_leftovers(self) -> None:
        while True:
            await self._leftovers.wait()
            # Ordered consumers may wait for these steps, so the first pauses are short.
            backoff = Backoff(RESTART_PAUSE_MIN_S, self._interval_s)
            while self._leftovers.all():
                if await self._leftovers.added_within(backoff.pause_s()):
                    backoff.reset()
                    continue
                await self._recover_steps(self._leftovers.all())

    async def _take_up(self, steps: Iterable[Step]) -> None:
        """Recover steps that others began; one that fails is tried again while the broker runs."""
        found = list(steps)
        for step in found:
            # All are added before the first is tried: an error in one must not lose the others.
            self._leftovers.add(step)
        await self._recover_steps(found)

    async def _recover_steps(self, steps: Iterable[Step]) -> None:
        for step in sorted(steps, key=lambda step: (step.topic, step.epoch)):
            try:
                await self._recover_step(step)
            except MagnetarError as error:
                log.warning("layout_step_not_recovered", step=step.key, error=str(error))
            except Exception:
                log.exception("layout_step_not_recovered", step=step.key)

    async def _recover_step(self, step: Step) -> None:
        async with self._topics.lock(step.topic):
            ours = self._leads.leads(step.topic) and not self._is_finishing(step)
            if not ours or await self._store.noted(step) != step:
                self._leftovers.discard(step)
                return
            await self._recover(step)
            if not self._leads.leads(step.topic):
                return  # the next leader recovers it
        log.info("layout_step_recovered", step=step.key)

    # Leaders

    async def _find_leaders(self) -> None:
        """Lead topics that have steps and no leader, and whose names choose this broker."""
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
        """Whether this is the live broker that all brokers choose for a name."""
        chosen = choose_by_name(str(name), self._placement.candidates)
        return chosen == self._placement.broker_id

    def _owner_changed(self, name: TopicName) -> None:
        if name.domain is TopicDomain.TOPIC:
            self._without_leader.add(name)
            self._wake.set()

    def _brokers_changed(self) -> None:
        self._round_due = True
        self._wake.set()
