"""Who leads which coordinator: elections in the metadata store (PIP-473, leaders of coordinators).

Rules:

- A coordinator is led by whoever made its ephemeral record, in Pulsar's form.  Where there is one
  broker it stands for every coordinator, at start and whenever a record goes.
- Where there are several they share them evenly (`txn.coordinator_spread`): one that has too many
  gives some up, and who is chosen for one without a leader stands for it.  Each hears the news in
  another order, so whatever is heard, of a leader that came as of one that went, has everybody look
  again: once all have heard all, the chosen one knows it.
- If the chosen one does not stand (it is dead, and its session is not), everybody does after
  COORDINATOR_LEFT_ALONE_S, and whoever wins keeps it for a while, or until the candidates change.
  Where none is a candidate (all start, or stop) everybody does after COORDINATOR_NO_CANDIDATE_S.
- The watch is taken before the records are read, also when a watch broke.
- What is read, or won, says nothing once the session is lost.
- Leadership ends with the session.  Then another session is opened, for as long as it takes, and
  every coordinator is stood for anew.  Where there are several brokers it is the one session of
  this process: each session more is one more that can be lost; when it can have none any more
  (`EndsForGood`), it leads nothing for good.
- A record of this broker's own id, of a session that has not expired yet, is taken over.
- Leadership keeps requests of one coordinator together; no rule of transactions rests on it.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from config.bounds import COORDINATOR_LEFT_ALONE_S, COORDINATOR_NO_CANDIDATE_S
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.election import Election, KnownLeaders
from storage.metadata.keys import name_of
from storage.metadata.store import Event, MetadataStore, Record, Session, SessionLost
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised
from txn import records
from txn.coordinator_spread import RetainedCoordinators, choose_candidacies, choose_surplus

log = structlog.get_logger(__name__)

Candidates = Callable[[], Sequence[str]]


@dataclass(frozen=True, slots=True)
class CoordinatorBrokers:
    """The brokers that share coordinators.

    `candidates` gives the ids of the live ones that take some; `session` waits for the session that
    everything of this broker hangs on; it raises what `EndsForGood` if there never will be one.
    """

    candidates: Candidates
    session: Callable[[], Awaitable[Session]]


@dataclass(frozen=True, slots=True)
class Leader:
    """A broker as a leader's record names it."""

    broker_id: str
    broker_url: str
    broker_url_tls: str | None = None
    web_url: str | None = None


class CoordinatorElections:
    """This broker's part in the elections of all coordinators; see the module's rules."""

    def __init__(
        self,
        metadata: MetadataStore,
        me: Leader,
        parallelism: int,
        changed: Callable[[], None],
        *,
        session_timeout_ms: int,
        electorate: CoordinatorBrokers | None = None,
    ) -> None:
        """`changed` is called, from the loop, when a coordinator has another leader or none.

        `electorate` is None while there is only this broker; then the session is made here.
        """
        self._metadata = metadata
        self._me = me
        self._parallelism = parallelism
        self._numbers = [CoordinatorId(number) for number in range(parallelism)]
        self._changed = changed
        self._session_timeout_ms = session_timeout_ms
        self._electorate = electorate
        self._loop = asyncio.get_running_loop()
        self._to_balance = asyncio.Event()
        self._unled_since: dict[CoordinatorId, float] = {}
        """Since when each has had no leader, in the loop's time."""
        self._kept = RetainedCoordinators(me.broker_id)
        self._look_later: asyncio.TimerHandle | None = None
        self._election = Election(metadata, _encoded(me), self._is_mine)
        self._known = KnownLeaders[CoordinatorId, Leader](me)
        self._told: tuple[Mapping[CoordinatorId, Leader], Sequence[CoordinatorId]] | None = ({}, ())
        """Who led, and what was led here, when `changed` was called: a session that comes makes the
        second more, though the first is as before.  None: it failed, and is to be called again."""
        self._standing = asyncio.Lock()
        """Held by whoever reads records or stands for anything."""
        self._session: Session | None = None
        self._stood = False
        """Whether every coordinator was stood for under this session."""
        self._following = WatchFollower(
            lambda: metadata.watch_children(records.LEADERS), self._stand_anew, self._take
        )
        self._tasks = Supervised()

    @property
    def leaders(self) -> Mapping[CoordinatorId, Leader]:
        """Who leads, as far as it is known here."""
        return self._known.leaders

    @property
    def led_here(self) -> Sequence[CoordinatorId]:
        """What this process leads, while its session lives."""
        if self._session is None or self._session.lost:
            return ()
        return self._known.mine

    async def start(self) -> None:
        """Stand for every coordinator, and go on doing so.  Raises `MetadataError`."""
        await self._open_session()
        await self._following.begin()
        self._stood = True
        self._tasks.keep("transaction_leaders", self._following.run)
        self._tasks.keep("transaction_session", self._keep_session)
        if self._electorate is not None:
            balance = partial(self._keep_balance, self._electorate.candidates)
            self._tasks.keep("transaction_balance", balance)

    async def stop(self) -> None:
        """Lead nothing more.  Raises `MetadataError` when the records could not be removed."""
        await self._tasks.stop()
        self._following.close()
        if self._look_later is not None:
            self._look_later.cancel()
        session = self._session
        if self._electorate is not None and session is not None and not session.lost:
            await asyncio.gather(*(self._give_up_at_end(number) for number in self.led_here))
        self._session = None
        self._known.lose(self._numbers, all_of_them=True)
        if self._electorate is None and session is not None:
            await session.close()

    async def _give_up_at_end(self, number: CoordinatorId) -> None:
        try:
            await self._give_up(number)
        except MagnetarError as error:
            log.warning("transaction_leader_not_removed", coordinator=number, error=str(error))

    async def _open_session(self) -> None:
        if self._electorate is not None:
            self._session = await self._electorate.session()
            return
        self._session = await self._metadata.open_session(
            timeout_ms=self._session_timeout_ms, identity=self._me.broker_id
        )

    async def _keep_session(self) -> None:
        while True:
            session = self._session
            if session is None:
                await self._open_session()
            elif session.lost:
                self._session_lost()
            elif not self._stood:
                await self._stand_for_all()
                self._stood = True
            else:
                await session.wait_lost()

    def _session_lost(self) -> None:
        log.warning("transaction_coordinators_lost", why="the session was lost")
        self._session, self._stood = None, False
        self._known.lose(self._numbers, all_of_them=self._electorate is None)
        self._leaders_known()

    async def _stand_anew(self) -> None:
        """After whatever was missed.  While there is no session, whoever opens one does it."""
        if self._session is not None and not self._session.lost:
            await self._stand_for_all()

    async def _take(self, event: Event) -> None:
        number = _number_of(event.key)
        if number is None or number >= self._parallelism:
            return
        leader = None if event.record is None else _decoded(event.record)
        if event.record is None or leader is not None:
            self._known.note_leader(number, leader)
            self._leaders_known()
        else:
            self._known.note_event(number)
        if self._electorate is not None:
            self.balance()
        elif event.record is None:
            async with self._standing:
                await self._elect_and_learn(number)

    async def _stand_for_all(self) -> None:
        if self._electorate is not None:
            await self._read_all()
            return
        async with self._standing:
            since = self._known.events()
            found = await asyncio.gather(*map(self._elect, self._numbers))
            self._learn(dict(zip(self._numbers, found, strict=True)), since)

    # Several brokers

    def balance(self) -> None:
        """Brokers came or went, or coordinators have other leaders: look who should lead what."""
        self._to_balance.set()

    async def _read_all(self) -> None:
        """Who leads by now; what an earlier process of this broker's id led is led on."""
        async with self._standing:
            since = self._known.events()
            found = await self._metadata.get_many([*map(records.leader_key, self._numbers)])
            leaders: dict[CoordinatorId, Leader | None] = {}
            for number, record in zip(self._numbers, found, strict=True):
                leader = None if record is None else _decoded(record)
                if leader is not None and leader.broker_id == self._me.broker_id:
                    leader = await self._elect(number)
                leaders[number] = leader
            self._learn(leaders, since)
        self.balance()

    async def _keep_balance(self, candidates: Candidates) -> None:
        self.balance()
        while True:
            await self._to_balance.wait()
            self._to_balance.clear()
            async with self._standing:
                await self._balance(candidates)

    async def _balance(self, candidates: Candidates) -> None:
        """Stand first, as nobody serves those; look again after whatever took time."""
        if self._session is None or self._session.lost:
            return
        tried = set[CoordinatorId]()
        while True:
            if standing := self._stands_for(candidates(), tried):
                tried.update(standing)
                await self._elect_side_by_side(standing)
            elif above := self._surplus(candidates()):
                await self._give_up(above[0])
            else:
                break
        self._look_in_time()

    def _stands_for(
        self, candidates: Sequence[str], tried: Collection[CoordinatorId]
    ) -> Sequence[CoordinatorId]:
        now_s = self._loop.time()
        unled, mine = self._unled_since, self._me.broker_id
        wait_s = COORDINATOR_LEFT_ALONE_S if candidates else COORDINATOR_NO_CANDIDATE_S
        alone = [number for number, since_s in unled.items() if since_s + wait_s <= now_s]
        chosen, taken = choose_candidacies(mine, unled, alone, self._ids(), candidates, tried)
        self._kept.note(taken, candidates, now_s)
        return chosen or taken

    def _surplus(self, candidates: Sequence[str]) -> Sequence[CoordinatorId]:
        leaders = self._ids()
        kept = self._kept.numbers(leaders, candidates, self._loop.time())
        return choose_surplus(self._me.broker_id, leaders, candidates, self._parallelism, kept)

    def _ids(self) -> dict[CoordinatorId, str]:
        return {number: leader.broker_id for number, leader in self._known.leaders.items()}

    async def _elect_side_by_side(self, numbers: Sequence[CoordinatorId]) -> None:
        outcomes = await asyncio.gather(
            *map(self._elect_and_learn, numbers), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _give_up(self, number: CoordinatorId) -> None:
        """Lead it no more, and then have others know."""
        if not await self._election.give_up(
            records.leader_key(number), partial(self._leave, number)
        ):
            self.balance()

    def _leave(self, number: CoordinatorId) -> None:
        log.info("transaction_coordinator_given_up", coordinator=number)
        self._known.give_up(number)
        self._leaders_known()

    def _look_in_time(self) -> None:
        """Look again when the next has been left alone for long enough, or kept."""
        if self._look_later is not None:
            self._look_later.cancel()
            self._look_later = None
        now_s = self._loop.time()
        due_s = [since_s + COORDINATOR_LEFT_ALONE_S for since_s in self._unled_since.values()]
        due_s += self._kept.due_s
        if due_s:
            # What was due and had no success is tried again after a while.
            at_s = min(due if due > now_s else now_s + COORDINATOR_LEFT_ALONE_S for due in due_s)
            self._look_later = self._loop.call_at(at_s, self.balance)

    async def _elect(self, number: CoordinatorId) -> Leader | None:
        """Who leads it after an attempt to: None if that one has gone, which the watch tells."""
        session = self._session
        if session is None:
            raise SessionLost("There is no session with the metadata store: it is being opened.")
        outcome = await self._election.stand(records.leader_key(number), session)
        if outcome.won:
            return self._me
        return None if outcome.found is None else _decoded(outcome.found)

    def _is_mine(self, record: Record) -> bool:
        leader = _decoded(record)
        return leader is not None and leader.broker_id == self._me.broker_id

    async def _elect_and_learn(self, number: CoordinatorId) -> None:
        since = self._known.events()
        self._learn({number: await self._elect(number)}, since)

    def _learn(
        self, found: Mapping[CoordinatorId, Leader | None], since: Mapping[CoordinatorId, int]
    ) -> None:
        """What was read or won, but for those that there was news of `since`."""
        self._known.learn(found, since)
        self._leaders_known()

    def _leaders_known(self) -> None:
        """Note since when the others have no leader, and call `changed` if anything did."""
        since_s, now_s, leaders = self._unled_since, self._loop.time(), self._known.leaders
        self._unled_since = {n: since_s.get(n, now_s) for n in self._numbers if n not in leaders}
        to_tell = leaders, tuple(self.led_here)
        if to_tell != self._told:
            self._told = None
            self._changed()
            self._told = to_tell


def _number_of(key: str) -> CoordinatorId | None:
    name = name_of(key)
    return CoordinatorId(int(name)) if name.isascii() and name.isdigit() else None


def _encoded(leader: Leader) -> bytes:
    members = {
        "brokerId": leader.broker_id,
        "brokerServiceUrl": leader.broker_url,
        "brokerServiceUrlTls": leader.broker_url_tls,
        "webServiceUrl": leader.web_url,
    }
    held = {name: value for name, value in members.items() if value is not None}
    return json.dumps(held, separators=(",", ":")).encode()


def _decoded(record: Record) -> Leader | None:
    """None if it cannot be read, which is logged: its coordinator then has no leader."""
    try:
        members = json.loads(record.value)
        texts = [members.get(name) for name in ("brokerServiceUrlTls", "webServiceUrl")]
        tls, web = (text if isinstance(text, str) else None for text in texts)
        return Leader(str(members["brokerId"]), str(members["brokerServiceUrl"]), tls, web)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        log.error("transaction_leader_unreadable", key=record.key, error=repr(error))
        return None
