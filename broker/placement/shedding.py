"""The leader's rounds: which owner is asked to let go of what, and for whom.

Rules:

- Only the leader moves anything, a few topics or segments in a round; what was moved stays where it
  is for a while.  What moves is planned by `choice.plan_moves`.
- The owner is asked to close it, and has the target load it.  What fails is left for a later round.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from broker.placement.choice import Candidate, Move, plan_moves
from broker.placement.placement import PlacementCounters
from config.bounds import SHEDDING_MOVES, SHEDDING_REST_S, SHEDDING_ROUND_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

Unload = Callable[[TopicName, str], Awaitable[None]]
"""Has a name's owner close it, for the broker with that id to take."""


class PlacementView(Protocol):
    """The placement as the leader's rounds know it."""

    @property
    def is_leader(self) -> bool:
        """Whether this broker moves anything."""

    @property
    def draining(self) -> bool:
        """Whether it is about to stop."""

    @property
    def counters(self) -> PlacementCounters:
        """Where moves are counted."""

    def owners(self) -> Mapping[str, str]:
        """Broker ids by full name, as far as known."""

    def candidates_with_load(self) -> Sequence[Candidate]:
        """Who may get something, without what is only promised to them."""


class Shedding:
    """Runs on the leader: compares loads and asks overloaded owners to unload topics."""

    def __init__(self, placement: PlacementView, unload: Unload) -> None:
        self._placement = placement
        self._unload = unload
        self._loop = asyncio.get_running_loop()
        self._moved: dict[str, float] = {}
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """A round now and then."""
        self._tasks.keep("shedding", self._run)

    async def stop(self) -> None:
        """No more rounds.  May be called again."""
        await self._tasks.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(SHEDDING_ROUND_S)
            await self.round()

    async def round(self) -> int:
        """Move what is to move, if this broker leads; how much was moved."""
        if not self._placement.is_leader or self._placement.draining:
            self._moved.clear()
            return 0
        now_s = self._loop.time()
        self._moved = {one: at_s for one, at_s in self._moved.items() if now_s < at_s}
        done = 0
        for move in self._plan():
            self._moved[move.name] = now_s + SHEDDING_REST_S
            try:
                await self._unload(parse_topic_name(move.name), move.target)
            except MagnetarError as error:
                log.warning("topic_not_moved", topic=move.name, error=str(error))
                continue
            log.info("topic_moved", topic=move.name, source=move.source, target=move.target)
            self._placement.counters.moves += 1
            done += 1
        return done

    def _plan(self) -> list[Move]:
        owned: dict[str, list[str]] = {}
        for name, broker_id in self._placement.owners().items():
            if not name.startswith(f"{TopicDomain.TOPIC.value}://"):
                owned.setdefault(broker_id, []).append(name)
        return plan_moves(
            owned,
            self._placement.candidates_with_load(),
            limit=SHEDDING_MOVES,
            keep=self._moved,
        )
