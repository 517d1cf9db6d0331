"""The placement of one broker among several that share their stores."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TypeVar

import structlog

from broker.placement.balance_election import BalanceElection
from broker.placement.channel_client import ChannelClient
from broker.placement.choice import Candidate, choose, choose_by_name
from broker.placement.dialing import Dialer
from broker.placement.load import LoadMeter, Totals
from broker.placement.members import (
    Load,
    Member,
    Members,
    MemberState,
    Superseded,
    report_of,
)
from broker.placement.ownership import Owner, Ownership
from broker.placement.placement import (
    BrokerAddress,
    LookupResult,
    OwnerListener,
    PeerConnection,
    Placement,
    PlacementNotReady,
    SupersededProcess,
)
from broker.placement.shedding import Shedding, Unload
from broker.placement.typed_request import Request
from config.bounds import (
    LOAD_REPORT_MAX_S,
    LOAD_REPORT_S,
    PEER_TIMEOUT_S,
    PLACEMENT_PROMISE_S,
    PLACEMENT_PROMISES,
    PLACEMENT_RETRY_MAX_S,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.store import MetadataStore, Session

A = TypeVar("A")
H = TypeVar("H")
log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 0.05
_LOAD_CHANGE = 0.1
"""A load that differs by more than this share from the written one is written at once."""


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """The version and start time, in a broker's record beside its addresses."""

    version: str
    started_ms: int


class SeveralBrokers(Placement):
    """`Placement` over shared stores: members, ownership and the leader's shedding.

    All records of this broker belong to one session.  When it is lost the broker owns nothing, at
    once; another session is opened, for as long as it takes, and the member record is put again.

    A draining broker acquires nothing and sends lookups to others.  So does a superseded process,
    whose broker id a later process has; it never gets a session again.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        advertised_host: str,
        metadata: MetadataStore,
        rng: random.Random,
        info: BrokerInfo,
        *,
        session_timeout_ms: int,
        totals: Callable[[], Totals],
        unload: Unload,
        dialer: Dialer | None = None,
    ) -> None:
        """`totals` reads this broker's counters; `unload` asks any owner to unload a topic."""
        super().__init__(advertised_host)
        self.dialer = dialer or self.dialer
        self.shedding = Shedding(self, unload)
        self._metadata = metadata
        self._info = info
        self._session_timeout_ms = session_timeout_ms
        self._totals = totals
        self._incarnation = f"{rng.getrandbits(64):016x}"
        self._loop = asyncio.get_running_loop()
        self._members: Members
        self._ownership: Ownership
        self._leader: BalanceElection
        self._channels = ChannelClient(lambda: self.broker_id, self.dialer)
        self._session: Session | None = None
        self._opened = asyncio.Event()
        self._superseded = False
        self._draining = False
        self._promises: dict[str, tuple[str, float]] = {}
        self._promised: Counter[str] = Counter()
        self._candidates: tuple[str, ...] = ()
        self._owner_listeners: dict[object, OwnerListener] = {}
        self._broker_listeners: dict[object, Callable[[], None]] = {}
        self._tasks = BackgroundTasks(log)

    # Start, session and stop

    async def start(self) -> None:
        """Join the cluster, as a broker that acquires nothing yet.  Raises `MetadataError`."""
        me = Member(
            self.me,
            self._incarnation,
            version=self._info.version,
            started_ms=self._info.started_ms,
        )
        self._members = Members(
            self._metadata,
            me,
            self._brokers_changed,
            self._supersede_soon,
        )
        self._ownership = Ownership(
            self._metadata,
            Owner(self.broker_id, self._incarnation),
            self.counters,
            self._owner_changed,
            self._members.state_of,
        )
        self._leader = BalanceElection(self._metadata, self.me)
        await self._members.start()
        await self._ownership.start()
        await self._open_session()
        self._leader.start()
        self._tasks.see_through("broker_session", self._keep_session)

    async def announce(self) -> None:
        """Acquire topics without an owner from now on.  Raises `MetadataError`."""
        await self._members.update(state=MemberState.SERVING)
        self._tasks.keep("load_report", self._report_load)
        self.shedding.start()

    async def begin_drain(self) -> None:
        """Acquire nothing more, and tell the other brokers."""
        self._draining = True
        try:
            await self._members.update(state=MemberState.DRAINING)
        except MagnetarError as error:
            log.warning("draining_not_told", error=str(error))

    async def stop(self) -> None:
        """Leave the cluster.  May be called when starting failed.  Raises `MetadataError`."""
        await self.shedding.stop()
        if hasattr(self, "_members"):
            await self._members.stop()  # before the tasks, as it may start one of them
        await self._tasks.stop()
        if hasattr(self, "_members"):
            await self._ownership.stop()
            await self._leader.stop()
        await self._channels.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def connect(self, address: BrokerAddress) -> PeerConnection:
        """See `Placement`."""
        return await self._channels.connect(address)

    async def ask(
        self, address: BrokerAddress, request: Request[H, A], *, timeout_s: float = PEER_TIMEOUT_S
    ) -> A:
        """See `Placement`."""
        return await self._channels.ask(address, request, timeout_s=timeout_s)

    @property
    def session(self) -> Session:
        """The session of all records.  Raises `PlacementNotReady` while there is none."""
        if self._superseded:
            raise _superseded()
        if self._session is None:
            raise PlacementNotReady(
                "This broker has no session with the metadata store now: try again."
            )
        return self._session

    async def live_session(self) -> Session:
        """See `Placement`."""
        while not self._superseded:
            if self._session is not None and not self._session.lost:
                return self._session
            self._opened.clear()
            await self._opened.wait()
        raise _superseded()

    async def _open_session(self) -> None:
        session = await self._metadata.open_session(
            timeout_ms=self._session_timeout_ms, identity=self.broker_id
        )
        try:
            await self._members.enter(session)
        except BaseException:
            await session.close()
            raise
        self._session = session
        self._opened.set()
        self._ownership.use(session)
        self._leader.stand(session)

    async def _keep_session(self) -> None:
        """Open another session whenever one is lost, until this process is superseded."""
        if self._session is None:
            # This task was started again after an error, perhaps in the middle of `_session_lost`.
            self._session_lost()
        while not self._superseded:
            if self._session is not None:
                await self._session.wait_lost()
                log.warning("broker_session_lost", owned=len(self._ownership.held))
                self.counters.sessions_lost += 1
                self._session_lost()
            backoff = Backoff(_FIRST_RETRY_S, PLACEMENT_RETRY_MAX_S)
            while self._session is None and not self._superseded:
                try:
                    await self._open_session()
                    log.info("broker_session_opened")
                except Superseded as error:
                    self._set_superseded(error)
                    return
                except MagnetarError as error:
                    log.warning("broker_session_not_opened", error=str(error))
                    await asyncio.sleep(backoff.pause_s())

    def _session_lost(self) -> None:
        self._session = None
        self._members.session_lost()
        self._leader.session_lost()
        self._ownership.session_lost()

    def _supersede_soon(self) -> None:
        if not self._superseded:
            self._tasks.see_through("giving_way", self._supersede)

    async def _supersede(self) -> None:
        """Give up everything: another process has this broker's id."""
        session = self._session
        self._set_superseded("its record is another process's")
        self._session_lost()
        if session is not None:
            await session.close()

    def _set_superseded(self, why: object) -> None:
        self._superseded = True
        self._opened.set()
        log.error("broker_superseded", broker=self.broker_id, why=str(why))

    # Brokers

    @property
    def brokers(self) -> Mapping[str, BrokerAddress]:
        """See `Placement`."""
        return {broker_id: one.address for broker_id, one in self._members.live.items()}

    @property
    def candidates(self) -> Sequence[str]:
        """See `Placement`."""
        return self._candidates

    @property
    def members(self) -> Mapping[str, Member]:
        """The live brokers with their loads."""
        return self._members.live

    @property
    def leader(self) -> BrokerAddress | None:
        """See `Placement`."""
        return self._leader.known

    @property
    def is_leader(self) -> bool:
        """Whether this broker is the leader that balances load."""
        return self._leader.is_me

    @property
    def draining(self) -> bool:
        """See `Placement`."""
        return self._draining or self._superseded

    def on_brokers(self, listener: Callable[[], None]) -> Callable[[], None]:
        """See `Placement`."""
        token = object()
        self._broker_listeners[token] = listener
        return lambda: (self._broker_listeners.pop(token, None), None)[1]

    def _brokers_changed(self) -> None:
        self._channels.forget_gone(self._members.live)
        candidates = tuple(
            sorted(
                broker_id
                for broker_id, one in self._members.live.items()
                if one.state is MemberState.SERVING
            )
        )
        if candidates != self._candidates:
            self._candidates = candidates
            for listener in list(self._broker_listeners.values()):
                _call_listener(listener)

    async def _report_load(self) -> None:
        meter, written, written_s = LoadMeter(), Load(), self._loop.time()
        while True:
            load = meter.sample(self._totals(), self._loop.time())
            due = self._loop.time() - written_s >= LOAD_REPORT_MAX_S
            if due or load.differs(written, _LOAD_CHANGE):
                try:
                    await self._members.update(load=load)
                    written, written_s = load, self._loop.time()
                except MagnetarError as error:
                    log.warning("load_not_written", error=str(error))
            await asyncio.sleep(LOAD_REPORT_S)

    # Owners

    @property
    def owned(self) -> Sequence[str]:
        """See `Placement`."""
        return tuple(self._ownership.held)

    def owners(self) -> Mapping[str, str]:
        """See `Placement`."""
        return {name: owner.broker_id for name, owner in self._ownership.owners.items()}

    @property
    def cpu_percent(self) -> float:
        """See `Placement`."""
        return self._members.me.load.cpu * 100

    def load_report(self) -> Mapping[str, object]:
        """See `Placement`."""
        return report_of(self._members.me)

    def count_of(self, broker_id: str) -> int:
        """How many names a broker owns, as far as is known."""
        return self._ownership.count(broker_id)

    def known_owner(self, name: TopicName) -> BrokerAddress | None:
        """See `Placement`."""
        owner = self._ownership.owners.get(str(name))
        return None if owner is None else self._members.address_of(owner.broker_id)

    def owner_of(self, name: TopicName) -> BrokerAddress:
        """See `Placement`."""
        return self.known_owner(name) or self._chosen(str(name))

    def owns(self, name: TopicName) -> bool:
        """See `Placement`."""
        return self._ownership.holds(str(name))

    def place(self, name: TopicName, *, authoritative: bool) -> LookupResult:
        """See `Placement`."""
        mine = self.broker_id
        owner = self.known_owner(name)
        if owner is not None and (owner.broker_id != mine or not self.draining or self.owns(name)):
            # It may be an earlier process's of this broker: serving it takes that over.
            return LookupResult(owner, connect=True, here=owner.broker_id == mine)
        if authoritative and not self.draining:
            if self._session is None:
                # Brokers lose their sessions together: another one would send the client back.
                raise PlacementNotReady(
                    f"{name} was to be taken here, and this broker has no session with the "
                    "metadata store now: ask again."
                )
            return LookupResult(self.me, connect=True, here=True)
        chosen = self.me if owner is not None else self._chosen(str(name))
        if chosen.broker_id != mine:
            self.counters.redirects += 1
            return LookupResult(chosen, connect=False, here=False)
        if self.draining:
            raise PlacementNotReady(
                f"{name} has no owner, and this broker stops: look it up again when another one "
                "is there."
            )
        return LookupResult(self.me, connect=True, here=True)

    async def acquire(self, name: TopicName) -> None:
        """See `Placement`."""
        if self.draining and not self.owns(name):
            raise PlacementNotReady(
                f"{name} is not taken, because this broker stops: look it up again."
            )
        await self._ownership.acquire(str(name))

    async def release(self, name: TopicName) -> None:
        """See `Placement`."""
        await self._ownership.release(str(name))

    def on_change(self, listener: OwnerListener) -> Callable[[], None]:
        """See `Placement`."""
        token = object()
        self._owner_listeners[token] = listener
        return lambda: (self._owner_listeners.pop(token, None), None)[1]

    def _owner_changed(self, text: str) -> None:
        if text in self._ownership.owners:
            self._forget_promise(text)
        try:
            name = parse_topic_name(text)
        except MagnetarError as error:
            log.error("owned_name_unreadable", name=text, error=str(error))
            return
        for listener in list(self._owner_listeners.values()):
            _call_listener(partial(listener, name))

    # Choosing

    def _chosen(self, name: str) -> BrokerAddress:
        """The broker for a name that nobody owns.

        It is the one of a recent choice, else the one with the lowest cost.  Leads of scalable
        topics go by name alone.
        """
        if name.startswith(f"{TopicDomain.TOPIC.value}://"):
            by_name = choose_by_name(name, self._candidates)
            return self.me if by_name is None else self._members.address_of(by_name) or self.me
        now_s = self._loop.time()
        promise = self._promises.get(name)
        if promise is not None:
            broker_id, until_s = promise
            if now_s < until_s and broker_id in self._candidates:
                return self._members.address_of(broker_id) or self.me
            self._forget_promise(name)
        chosen = choose(name, self._choice_of())
        if chosen is None:
            return self.me
        # The choice is a promise: it is repeated for a while and counts as owned, so that many
        # names asked for together do not all go to the same broker.
        self._promises[name] = (chosen, now_s + PLACEMENT_PROMISE_S)
        self._promised[chosen] += 1
        self._forget_old_promises(now_s)
        return self._members.address_of(chosen) or self.me

    def candidates_with_load(self) -> list[Candidate]:
        """The brokers that may get a topic, with what they own; promises are not counted."""
        live = self._members.live
        return [
            Candidate(one, self._ownership.count(one), _load_of(live[one].load))
            for one in self._candidates
            if one in live
        ]

    def _choice_of(self) -> list[Candidate]:
        return [
            replace(one, owned=one.owned + self._promised[one.broker_id])
            for one in self.candidates_with_load()
        ]

    def _forget_promise(self, name: str) -> None:
        promise = self._promises.pop(name, None)
        if promise is not None:
            self._promised[promise[0]] -= 1

    def _forget_old_promises(self, now_s: float) -> None:
        """Forget promises that are over, or too many: they are in the order of their time."""
        while self._promises:
            name, (_, until_s) = next(iter(self._promises.items()))
            if until_s > now_s and len(self._promises) <= PLACEMENT_PROMISES:
                return
            self._forget_promise(name)


def _superseded() -> SupersededProcess:
    return SupersededProcess(
        "This broker serves nothing any more, because another process has its id: look it up "
        "again; stop this process, and give each broker its own advertised_host and http_port."
    )


def _load_of(load: Load) -> float:
    """`Candidate.load` in tenths, so that brokers with about the same load are equals."""
    return round(min(load.cpu, 1.0), 1)


def _call_listener(listener: Callable[[], None]) -> None:
    """Call one listener; its error is logged, so that the others are called too."""
    try:
        listener()
    except Exception:
        log.exception("placement_listener_failed")
