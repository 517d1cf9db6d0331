"""The elections of the coordinators' leaders in the metadata store (PIP-473)."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from config.bounds import COORDINATOR_LEFT_ALONE_S, COORDINATOR_NO_CANDIDATE_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.election import Election, KnownLeaders
from storage.metadata.keys import name_of
from storage.metadata.store import Event, MetadataStore, Record, Session, SessionLost
from storage.metadata.watch_follower import WatchFollower
from txn import records
from txn.coordinator_spread import RetainedCoordinators, choose_candidacies, choose_surplus

log = structlog.get_logger(__name__)

Candidates = Callable[[], Sequence[str]]


@dataclass(frozen=True, slots=True)
class CoordinatorBrokers:
    """The brokers that share coordinators.

    `candidates` returns the ids of the live brokers that take coordinators.  `session` waits for
    the one session of this broker; if there will never be one it raises an `EndsForGood`.
    """

    candidates: Candidates
    session: Callable[[], Awaitable[Session]]


@dataclass(frozen=True, slots=True)
class Leader:
    """A broker, as the record of a coordinator's leader describes it."""

    broker_id: str
    broker_url: str
    broker_url_tls: str | None = None
    web_url: str | None = None
    web_url_tls: str | None = None


class CoordinatorElections:
    """This broker's part in the elections of all coordinators.

    The leader of a coordinator is the broker that put its ephemeral record, in Pulsar's form.  No
    rule of transactions depends on there being one leader: elections only bring the requests of a
    coordinator together.

    A single broker stands for every coordinator, at start and whenever a record goes.  Several
    brokers share them evenly (`txn.coordinator_spread`): a broker with too many gives some up, and
    the broker that is chosen for one without a leader stands for it.  If it does not (it is dead,
    but its session alive), all others do after COORDINATOR_LEFT_ALONE_S, and the winner keeps the
    coordinator for a while.  Without any candidate all do after COORDINATOR_NO_CANDIDATE_S.

    Leadership ends with the session.  Then another session is opened, and the broker stands anew.
    """

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
        """Call `changed`, on the loop, when a coordinator has another leader or none.

        `electorate` is None for a single broker, which then opens a session here, with
        `session_timeout_ms`.
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
        """The loop's time since which each coordinator has had no leader."""
        self._kept = RetainedCoordinators(me.broker_id)
        self._balance_timer: asyncio.TimerHandle | None = None
        self._election = Election(metadata, _encoded(me), self._is_mine)
        self._known = KnownLeaders[CoordinatorId, Leader](me)
        self._reported: tuple[Mapping[CoordinatorId, Leader], Sequence[CoordinatorId]] | None = (
            {},
            (),
        )
        """The leaders, and the coordinators led here, at the last call of `changed`.

        A new session may change the second alone.  None: the call failed, and is to be repeated.
        """
        self._standing = asyncio.Lock()
        """Held while records are read, or this broker stands for coordinators."""
        self._session: Session | None = None
        self._stood = False
        """Whether this broker stood for all coordinators under this session."""
        self._following = WatchFollower(
            lambda: metadata.watch_children(records.LEADERS), self._stand_anew, self._take
        )
        self._tasks = BackgroundTasks(log)

    @property
    def leaders(self) -> Mapping[CoordinatorId, Leader]:
        """The leaders of coordinators, as far as they are known here."""
        return self._known.leaders

    @property
    def led_here(self) -> Sequence[CoordinatorId]:
        """The coordinators that this process leads, while its session is alive."""
        if self._session is None or self._session.lost:
            return ()
        return self._known.mine

    async def start(self) -> None:
        """Stand in the elections from now on.  Raises `MetadataError`."""
        await self._open_session()
        await self._following.begin()
        self._stood = True
        self._tasks.keep("transaction_leaders", self._following.run)
        self._tasks.keep("transaction_session", self._keep_session)
        if self._electorate is not None:
            balance = partial(self._keep_balance, self._electorate.candidates)
            self._tasks.keep("transaction_balance", balance)

    async def stop(self) -> None:
        """Give up all coordinators.  Raises `MetadataError` if the session cannot be closed."""
        await self._tasks.stop()
        self._following.close()
        if self._balance_timer is not None:
            self._balance_timer.cancel()
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
            # The one session of this process: a second one could be lost as well.
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
        """Stand after events were missed; without a session `_keep_session` does it later."""
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
            # Also for a leader that came: brokers get events in different orders, and once all have
            # got all of them the chosen broker knows that it is chosen.
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
        """Share coordinators anew: brokers came or went, or coordinators have other leaders."""
        self._to_balance.set()

    async def _read_all(self) -> None:
        """Read all leaders; take over records that an earlier process with this id has left."""
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
        """Stand for coordinators and give up others, one step at a time, until nothing is left."""
        if self._session is None or self._session.lost:
            return
        tried = set[CoordinatorId]()
        while True:
            # Standing comes first, as nobody serves these coordinators.
            if standing := self._candidacies(candidates(), tried):
                tried.update(standing)
                await self._elect_side_by_side(standing)
            elif above := self._surplus(candidates()):
                await self._give_up(above[0])
            else:
                break
        self._balance_later()

    def _candidacies(
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
        """Give up a coordinator: stop serving it, then delete its record."""
        if not await self._election.give_up(
            records.leader_key(number), partial(self._leave, number)
        ):
            self.balance()

    def _leave(self, number: CoordinatorId) -> None:
        log.info("transaction_coordinator_released", coordinator=number)
        self._known.give_up(number)
        self._leaders_known()

    def _balance_later(self) -> None:
        """Balance again when the next coordinator has been left alone, or kept, long enough."""
        if self._balance_timer is not None:
            self._balance_timer.cancel()
            self._balance_timer = None
        now_s = self._loop.time()
        due_s = [since_s + COORDINATOR_LEFT_ALONE_S for since_s in self._unled_since.values()]
        due_s += self._kept.due_s
        if due_s:
            # One that was due and could not be won is tried again after a while.
            at_s = min(due if due > now_s else now_s + COORDINATOR_LEFT_ALONE_S for due in due_s)
            self._balance_timer = self._loop.call_at(at_s, self.balance)

    async def _elect(self, number: CoordinatorId) -> Leader | None:
        """Stand for a coordinator; return its leader then, None if the watch will tell."""
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
        """Take in leaders that were read or won, but for those with an event `since`."""
        self._known.learn(found, since)
        self._leaders_known()

    def _leaders_known(self) -> None:
        """Note since when coordinators have no leader, and call `changed` after a change."""
        since_s, now_s, leaders = self._unled_since, self._loop.time(), self._known.leaders
        self._unled_since = {n: since_s.get(n, now_s) for n in self._numbers if n not in leaders}
        now = leaders, tuple(self.led_here)
        if now != self._reported:
            self._reported = None
            self._changed()
            self._reported = now


def _number_of(key: str) -> CoordinatorId | None:
    name = name_of(key)
    return CoordinatorId(int(name)) if name.isascii() and name.isdigit() else None


def _encoded(leader: Leader) -> bytes:
    members = {
        "brokerId": leader.broker_id,
        "brokerServiceUrl": leader.broker_url,
        "brokerServiceUrlTls": leader.broker_url_tls,
        "webServiceUrl": leader.web_url,
        "webServiceUrlTls": leader.web_url_tls,
    }
    present = {name: value for name, value in members.items() if value}
    return json.dumps(present, separators=(",", ":")).encode()


def _decoded(record: Record) -> Leader | None:
    """The leader in a record; None if it is unreadable, which is logged.

    Its coordinator then counts as one without a leader.
    """
    try:
        members = json.loads(record.value)
        names = ("brokerServiceUrlTls", "webServiceUrl", "webServiceUrlTls")
        texts = [members.get(name) for name in names]
        tls, web, web_tls = (text if isinstance(text, str) else None for text in texts)
        # A broker without plain ports has the address with TLS alone.
        plain = members["brokerServiceUrl"] if tls is None else members.get("brokerServiceUrl", "")
        return Leader(str(members["brokerId"]), str(plain), tls, web, web_tls)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        log.error("transaction_leader_unreadable", key=record.key, error=repr(error))
        return None
