"""Who owns which topic, segment or scalable topic: one ephemeral record for each that is owned.

Rules:

- A record is `/loadbalance/owners/<level>/<name>`, JSON, put by create-only under this process's
  session.  One of this broker's own id from an earlier process, which has not expired yet, is
  taken over.
- Every broker knows all of them: watches first, then lists; after a resync, or when a watch broke,
  lists are compared.
- What this process holds it knows from its own writes.  An event that says otherwise may be of the
  past, so the record is read before anything is given up.
- With the session everything is lost at once, and whoever listens is told of each name.
- Acquiring and releasing one name wait for each other.
"""

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import structlog

from broker.placement.members import MemberState
from broker.placement.placement import OwnedElsewhere, PlacementCounters, PlacementNotReady
from config.bounds import (
    PLACEMENT_OWNER_LEVELS,
    PLACEMENT_PROMISES,
    PLACEMENT_RETRY_MAX_S,
    RECORD_CHANGE_TRIES,
)
from magnetar.protocol.names import decode_name, encode_name
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import (
    ABSENT,
    Event,
    MetadataError,
    MetadataStore,
    Record,
    Session,
    SessionLost,
    Version,
    VersionConflict,
)
from storage.metadata.watch_follower import WatchFollower
from storage.supervised import Supervised

log = structlog.get_logger(__name__)

OWNERS = "/loadbalance/owners"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns something."""

    broker_id: str
    incarnation: str


class Ownership:
    """Acquires, releases and follows the ephemeral records that name the owner of a topic."""

    def __init__(
        self,
        metadata: MetadataStore,
        me: Owner,
        counters: PlacementCounters,
        changed: Callable[[str], None],
        state_of: Callable[[str], MemberState | None],
    ) -> None:
        """`changed` is told a name that has another owner now, or none; from the loop.

        `state_of` a broker that is not there is None.
        """
        self._metadata = metadata
        self._me = me
        self._counters = counters
        self._changed = changed
        self._state_of = state_of
        self._session: Session | None = None
        self._held: dict[str, Version] = {}
        self._owners: dict[str, Owner] = {}
        self._counts: Counter[str] = Counter()
        self._looking: dict[str, int] = {}
        """Names whose record is being read, and how often they were heard of since that began."""
        self._former: dict[str, str] = {}
        """Ids of the last owners of what nobody owns now, to tell a take-over from a move."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._following = [
            WatchFollower(
                partial(metadata.watch_children, f"{OWNERS}/{level}"),
                partial(self._list, f"{OWNERS}/{level}"),
                self._take_event,
            )
            for level in range(PLACEMENT_OWNER_LEVELS)
        ]
        self._followers = Supervised()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> Mapping[str, Version]:
        """What this process holds."""
        return self._held

    @property
    def owners(self) -> Mapping[str, Owner]:
        """Who owns what, as far as it is known here."""
        return self._owners

    def count(self, broker_id: str) -> int:
        """How much a broker owns, as far as it is known here."""
        return self._counts[broker_id]

    def holds(self, name: str) -> bool:
        """Whether this process holds it, and its session lives."""
        return name in self._held and self._session is not None and not self._session.lost

    async def start(self) -> None:
        """Read who owns what and follow it.  Raises `MetadataError`."""
        await asyncio.gather(*(one.begin() for one in self._following))
        for one in self._following:
            self._followers.keep("owners", one.run)

    async def stop(self) -> None:
        """Follow nothing more.  What is still held goes with the session."""
        await self._followers.stop()
        for one in self._following:
            one.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def use(self, session: Session) -> None:
        """What is acquired from now on hangs on this session."""
        self._session = session

    def session_lost(self) -> None:
        """Everything that was held is lost."""
        self._session = None
        held, self._held = self._held, {}
        self._counters.lost += len(held)
        for name in held:
            if self._owners.get(name) == self._me:
                self._set_owner(name, None)
        for name in held:
            self._changed(name)

    # Taking and giving up

    async def acquire(self, name: str) -> None:
        """Hold it.  Raises `OwnedElsewhere`, `PlacementNotReady`, `MetadataError`."""
        async with self._lock(name):
            if self.holds(name):
                return
            session = self._session
            if session is None or session.lost:
                raise _no_session(name)
            known, former = self._owners.get(name), self._former.get(name)
            try:
                version = await self._take(name, session)
            except SessionLost as error:
                raise _no_session(name) from error
            if session is not self._session or session.lost:
                raise _no_session(name)
            self._held[name] = version
            self._counters.acquired += 1
            if former is not None and self._state_of(former) is None:
                self._counters.taken_over += 1
            self._set_owner(name, self._me)
        if known != self._me:
            self._changed(name)

    async def _take(self, name: str, session: Session) -> Version:
        key, expect = owner_key(name), ABSENT
        known = self._owners.get(name)
        if known is not None and known != self._me:
            # Most likely it is still so, and then a read is all it takes.
            expect = await self._free(name)
        for _ in range(RECORD_CHANGE_TRIES):
            try:
                put = await self._metadata.put(
                    key, _encode(self._me), expect=expect, session=session
                )
            except VersionConflict:
                expect = await self._free(name)
            else:
                return put.version
        raise MetadataError(f"The owner of {name} changes all the time: look who takes it.")

    async def _free(self, name: str) -> Version:
        """The version at which it may be taken.  Raises `OwnedElsewhere`."""
        record = await self._metadata.get(owner_key(name))
        owner = None if record is None else _decode(record)
        if record is None:
            return ABSENT
        if owner is None or owner.broker_id != self._me.broker_id:
            # The watch tells who it is: what was read may be older than what it has told already.
            raise OwnedElsewhere(
                f"{name} is served by {'another broker' if owner is None else owner.broker_id}: "
                "look it up again."
            )
        return record.version

    async def release(self, name: str) -> None:
        """Let go of it; a record that could not be removed stays until the session ends."""
        async with self._lock(name):
            version = self._held.pop(name, None)
            if version is None:
                return
            self._counters.released += 1
            try:
                await self._metadata.delete(owner_key(name), expect=version)
            except VersionConflict:
                log.debug("owner_was_another", topic=name)
                self._spawn(self._look_at_held(name))
            except MagnetarError as error:
                log.warning("owner_not_removed", topic=name, error=str(error))
                return
            if self._owners.get(name) == self._me:
                self._set_owner(name, None)
            self._changed(name)

    # What the others do

    async def _list(self, level: str) -> None:
        records = await self._metadata.scan(*children_range(level))
        found = {
            name: owner
            for record in records
            if (owner := _decode(record)) is not None and (name := _name_in(record.key)) is not None
        }
        number = int(name_of(level))
        gone = [name for name in self._owners if name not in found and level_of(name) == number]
        for name, owner in found.items():
            self._heard(name, owner)
        for name in gone:
            self._heard(name, None)

    async def _take_event(self, event: Event) -> None:
        name = _name_in(event.key)
        if name is not None:
            self._heard(name, None if event.record is None else _decode(event.record))

    def _heard(self, name: str, owner: Owner | None) -> None:
        """What a list or an event says about a name."""
        if name in self._looking:
            self._looking[name] += 1
        if name in self._held:
            if owner != self._me:
                self._spawn(self._look_at_held(name))
            return
        before = self._owners.get(name)
        if before != owner:
            self._set_owner(name, owner)
            self._changed(name)

    async def _look_at_held(self, name: str) -> None:
        """Who owns it really; events may be of the time before it was ours."""
        async with self._lock(name):
            version = self._held.get(name)
            self._looking[name] = 0
            try:
                record = await self._metadata.get(owner_key(name))
            except MagnetarError as error:
                log.warning("owner_not_read", topic=name, error=str(error))
                self._spawn(self._look_again_at_held(name))
                return
            finally:
                heard = self._looking.pop(name)
            owner = None if record is None else _decode(record)
            if heard or self._held.get(name) != version:
                return  # what was heard meanwhile is newer, and was acted upon
            if version is not None and owner == self._me:
                return
            if version is not None:
                del self._held[name]
                self._counters.lost += 1
                log.warning("owner_is_another", topic=name, owner=owner and owner.broker_id)
            self._set_owner(name, owner)
        self._changed(name)

    async def _look_again_at_held(self, name: str) -> None:
        await asyncio.sleep(PLACEMENT_RETRY_MAX_S)
        await self._look_at_held(name)

    def _set_owner(self, name: str, owner: Owner | None) -> None:
        before = self._owners.pop(name, None)
        if before is not None:
            self._counts[before.broker_id] -= 1
            if not self._counts[before.broker_id]:
                del self._counts[before.broker_id]
            if self._state_of(before.broker_id) is not MemberState.DRAINING:
                self._former[name] = before.broker_id
            if len(self._former) > PLACEMENT_PROMISES:
                del self._former[next(iter(self._former))]
        if owner is not None:
            self._owners[name] = owner
            self._counts[owner.broker_id] += 1
            self._former.pop(name, None)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("ownership_work_failed", exc_info=error)


def level_of(name: str) -> int:
    """The level that a name's record is on."""
    return zlib.crc32(name.encode()) % PLACEMENT_OWNER_LEVELS


def owner_key(name: str) -> str:
    """Where the owner of a full name is recorded."""
    return f"{OWNERS}/{level_of(name)}/{encode_name(name)}"


def _name_in(key: str) -> str | None:
    """The full name that a record is about; None, which is logged, if it is none of ours."""
    try:
        return decode_name(name_of(key))
    except MagnetarError as error:
        log.error("owner_record_unreadable", key=key, error=str(error))
        return None


def _no_session(name: str) -> PlacementNotReady:
    return PlacementNotReady(
        f"{name} is not taken, because this broker has no session with the metadata store just "
        "now: look it up again."
    )


def _encode(owner: Owner) -> bytes:
    value = {"brokerId": owner.broker_id, "incarnation": owner.incarnation}
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(record: Record) -> Owner | None:
    """None if it cannot be read, which is logged: then nobody can take it before it is gone."""
    try:
        value = json.loads(record.value)
        return Owner(str(value["brokerId"]), str(value["incarnation"]))
    except (ValueError, KeyError, TypeError) as error:
        log.error("owner_record_unreadable", key=record.key, error=repr(error))
        return None
