"""Who leads which coordinator: elections in the metadata store (PIP-471, leaders of coordinators).

Rules:

- A coordinator is led by whoever made its ephemeral record, in Pulsar's form.  Every process stands
  for every coordinator, at start and whenever a record goes.
- The watch is taken before the records are read.
- Leadership ends with the session.  Then another session is opened, for as long as it takes, and
  every coordinator is stood for anew.
- A record of this broker's own id, of a session that has not expired yet, is taken over.
- Leadership keeps requests of one coordinator together; no rule of transactions rests on it.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from config.bounds import SESSION_TIMEOUT_MS, TXN_CLEANING_RETRY_MAX_S
from protocol.server_error import MagnetarError
from storage.metadata.keys import name_of
from storage.metadata.store import (
    ABSENT,
    Event,
    EventKind,
    MetadataStore,
    Record,
    Session,
    SessionLost,
    VersionConflict,
)
from txn import records
from txn.txn_id import CoordinatorId

log = structlog.get_logger(__name__)

_FIRST_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Leader:
    """A broker as a leader's record names it."""

    broker_id: str
    broker_url: str
    broker_url_tls: str | None = None
    web_url: str | None = None


class Elections:
    """See the module's rules."""

    def __init__(
        self,
        metadata: MetadataStore,
        me: Leader,
        parallelism: int,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called, from the loop, when a coordinator has another leader or none."""
        self._metadata = metadata
        self._me = me
        self._parallelism = parallelism
        self._changed = changed
        self._leaders: dict[CoordinatorId, Leader] = {}
        self._session: Session | None = None
        self._watch = metadata.watch_children(records.LEADERS)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def leaders(self) -> Mapping[CoordinatorId, Leader]:
        """Who leads, as far as it is known here."""
        return self._leaders

    @property
    def led_here(self) -> Sequence[CoordinatorId]:
        """What this process leads, while its session lives."""
        if self._session is None or self._session.lost:
            return ()
        return [number for number, leader in self._leaders.items() if leader == self._me]

    async def start(self) -> None:
        """Stand for every coordinator, and go on doing so.  Raises `MetadataError`."""
        await self._open_session()
        await self._stand_for_all()
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._follow()), loop.create_task(self._keep_session())}

    async def stop(self) -> None:
        """Lead nothing more.  Raises `MetadataError` when the records could not be removed."""
        self._watch.close()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        session, self._session = self._session, None
        self._leaders.clear()
        if session is not None:
            await session.close()

    async def _open_session(self) -> None:
        self._session = await self._metadata.open_session(
            timeout_ms=SESSION_TIMEOUT_MS, identity=self._me.broker_id
        )

    async def _keep_session(self) -> None:
        while True:
            if self._session is not None:
                await self._session.wait_lost()
                log.warning("transaction_coordinators_lost", why="the session was lost")
                self._session = None
                self._set_leaders({})
            pause_s = _FIRST_RETRY_S
            while self._session is None:
                try:
                    await self._open_session()
                    await self._stand_for_all()
                except MagnetarError as error:
                    log.warning("transaction_election_failed", error=str(error))
                    self._session = None
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S)

    async def _follow(self) -> None:
        async for event in self._watch:
            try:
                await self._take(event)
            except MagnetarError as error:
                # A session that was lost stands for everything anew; else the timer below does.
                log.warning("transaction_election_failed", error=str(error))
                await asyncio.sleep(_FIRST_RETRY_S)
                await self._try_all()

    async def _try_all(self) -> None:
        pause_s = _FIRST_RETRY_S
        while self._session is not None:
            try:
                await self._stand_for_all()
            except MagnetarError as error:
                log.warning("transaction_election_failed", error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, TXN_CLEANING_RETRY_MAX_S)
            else:
                return

    async def _take(self, event: Event) -> None:
        if event.kind is EventKind.RESYNC:
            await self._stand_for_all()
            return
        number = _number_of(event.key)
        if number is None or number >= self._parallelism:
            return
        if event.record is None:
            self._set_leaders({n: one for n, one in self._leaders.items() if n != number})
            await self._stand_for(number)
        elif (leader := _decoded(event.record)) is not None:
            self._set_leaders({**self._leaders, number: leader})

    async def _stand_for_all(self) -> None:
        numbers = [CoordinatorId(number) for number in range(self._parallelism)]
        found = await asyncio.gather(*(self._elect(number) for number in numbers))
        self._set_leaders(
            {n: leader for n, leader in zip(numbers, found, strict=True) if leader is not None}
        )

    async def _stand_for(self, number: CoordinatorId) -> None:
        leader = await self._elect(number)
        if leader is not None:
            self._set_leaders({**self._leaders, number: leader})

    async def _elect(self, number: CoordinatorId) -> Leader | None:
        """Who leads it after an attempt to: None if that one has gone, which the watch tells."""
        session = self._session
        if session is None:
            raise SessionLost("There is no session with the metadata store: it is being opened.")
        key, value = records.leader_key(number), _encoded(self._me)
        try:
            await self._metadata.put(key, value, expect=ABSENT, session=session)
        except VersionConflict:
            pass
        else:
            return self._me
        record = await self._metadata.get(key)
        leader = None if record is None else _decoded(record)
        if record is None or leader is None or leader.broker_id != self._me.broker_id:
            return leader
        try:
            await self._metadata.put(key, value, expect=record.version, session=session)
        except VersionConflict:
            return None
        return self._me

    def _set_leaders(self, leaders: dict[CoordinatorId, Leader]) -> None:
        if leaders != self._leaders:
            self._leaders = leaders
            self._changed()


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
