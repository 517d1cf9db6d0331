"""The owners of topics, segments and scalable topics: one ephemeral record for each owned name.

A record is `/loadbalance/owners/<level>/<name>`, JSON.
"""

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
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
from magnetar.background_tasks import BackgroundTasks
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

log = structlog.get_logger(__name__)

OWNERS = "/loadbalance/owners"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns a name: its broker's id, and its incarnation."""

    broker_id: str
    incarnation: str


class Ownership:
    """Acquires, releases and follows the ephemeral records that name the owner of a topic.

    A record is created under this process's session, and lost with it.  Every broker follows the
    records of all.  A record with this broker's id by an earlier process, which has not expired
    yet, is taken over.
    """

    def __init__(
        self,
        metadata: MetadataStore,
        me: Owner,
        counters: PlacementCounters,
        changed: Callable[[str], None],
        state_of: Callable[[str], MemberState | None],
    ) -> None:
        """Call `changed`, on the loop, with each name that has another owner now, or none.

        `state_of` returns the state of a broker, None if it is not alive.
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
        self._events_while_reading: dict[str, int] = {}
        """Names whose record is being read, and the number of events of them since that began."""
        self._former: dict[str, str] = {}
        """Ids of the last owners of names without an owner, to tell a take-over from a move."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._following = [
            WatchFollower(
                partial(metadata.watch_children, f"{OWNERS}/{level}"),
                partial(self._list, f"{OWNERS}/{level}"),
                self._take_event,
            )
            for level in range(PLACEMENT_OWNER_LEVELS)
        ]
        self._followers = BackgroundTasks(log)
        self._tasks = BackgroundTasks(log, failure_event="ownership_work_failed")

    @property
    def held(self) -> Mapping[str, Version]:
        """The names that this process owns, with the versions of their records."""
        return self._held

    @property
    def owners(self) -> Mapping[str, Owner]:
        """The owner of each name, as far as it is known here."""
        return self._owners

    def count(self, broker_id: str) -> int:
        """How many names a broker owns, as far as it is known here."""
        return self._counts[broker_id]

    def holds(self, name: str) -> bool:
        """Whether this process owns a name, and its session is alive."""
        return name in self._held and self._session is not None and not self._session.lost

    async def start(self) -> None:
        """Read the records of all owners and follow them.  Raises `MetadataError`."""
        await asyncio.gather(*(one.begin() for one in self._following))
        for one in self._following:
            self._followers.keep("owners", one.run)

    async def stop(self) -> None:
        """Stop following.  Records that are still held go with the session."""
        await self._followers.stop()
        for one in self._following:
            one.close()
        await self._tasks.end()

    def use(self, session: Session) -> None:
        """Acquire names under this session from now on."""
        self._session = session

    def session_lost(self) -> None:
        """Take in that the session was lost; `changed` is called for each name that was held."""
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
        """Own a name.  Raises `OwnedElsewhere`, `PlacementNotReady`, `MetadataError`."""
        async with self._lock(name):  # acquiring and releasing one name wait for each other
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
            # Most likely that owner still has it: then one read is enough to refuse.
            expect = await self._vacant_version(name)
        for _ in range(RECORD_CHANGE_TRIES):
            try:
                put = await self._metadata.put(
                    key, _encode(self._me), expect=expect, session=session
                )
            except VersionConflict:
                expect = await self._vacant_version(name)
            else:
                return put.version
        raise MetadataError(
            f"The owner of {name} changed {RECORD_CHANGE_TRIES} times in a row: look it up again."
        )

    async def _vacant_version(self, name: str) -> Version:
        """The version at which a name may be taken.  Raises `OwnedElsewhere`.

        It is that of no record, or of one by an earlier process of this broker.
        """
        record = await self._metadata.get(owner_key(name))
        owner = None if record is None else _decode(record)
        if record is None:
            return ABSENT
        if owner is None or owner.broker_id != self._me.broker_id:
            # The owner known here stays as it is: a newer event may have come before this read.
            raise OwnedElsewhere(
                f"{name} is served by {'another broker' if owner is None else owner.broker_id}: "
                "look it up again."
            )
        return record.version

    async def release(self, name: str) -> None:
        """Give up a name; a record that could not be deleted stays until the session ends."""
        async with self._lock(name):
            version = self._held.pop(name, None)
            if version is None:
                return
            self._counters.released += 1
            try:
                await self._metadata.delete(owner_key(name), expect=version)
            except VersionConflict:
                log.debug("owner_was_another", topic=name)
                self._tasks.start(self._check_held(name))
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
            self._apply(name, owner)
        for name in gone:
            self._apply(name, None)

    async def _take_event(self, event: Event) -> None:
        name = _name_in(event.key)
        if name is not None:
            self._apply(name, None if event.record is None else _decode(event.record))

    def _apply(self, name: str, owner: Owner | None) -> None:
        """Take in the owner of a name that a list or an event shows."""
        if name in self._events_while_reading:
            self._events_while_reading[name] += 1
        if name in self._held:
            # Our own write says that we own it.  An event that says otherwise may be older, so the
            # record is read before the name is given up.
            if owner != self._me:
                self._tasks.start(self._check_held(name))
            return
        before = self._owners.get(name)
        if before != owner:
            self._set_owner(name, owner)
            self._changed(name)

    async def _check_held(self, name: str) -> None:
        """Read the record of a name, and take in that another process owns it, if so."""
        async with self._lock(name):
            version = self._held.get(name)
            self._events_while_reading[name] = 0
            try:
                record = await self._metadata.get(owner_key(name))
            except MagnetarError as error:
                log.warning("owner_not_read", topic=name, error=str(error))
                self._tasks.start(self._check_held_later(name))
                return
            finally:
                events = self._events_while_reading.pop(name)
            owner = None if record is None else _decode(record)
            if events or self._held.get(name) != version:
                return  # the events that came meanwhile are newer, and were taken in
            if version is not None and owner == self._me:
                return
            if version is not None:
                del self._held[name]
                self._counters.lost += 1
                log.warning("owner_is_another", topic=name, owner=owner and owner.broker_id)
            self._set_owner(name, owner)
        self._changed(name)

    async def _check_held_later(self, name: str) -> None:
        await asyncio.sleep(PLACEMENT_RETRY_MAX_S)
        await self._check_held(name)

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


def level_of(name: str) -> int:
    """The level that a name's record is on."""
    return zlib.crc32(name.encode()) % PLACEMENT_OWNER_LEVELS


def owner_key(name: str) -> str:
    """The key of the record of a full name's owner."""
    return f"{OWNERS}/{level_of(name)}/{encode_name(name)}"


def _name_in(key: str) -> str | None:
    """The full name in the key of a record; None if it is unreadable, which is logged."""
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
    """The owner in a record; None if it is unreadable, which is logged.

    Nobody can take such a name before its record is gone.
    """
    try:
        value = json.loads(record.value)
        return Owner(str(value["brokerId"]), str(value["incarnation"]))
    except (ValueError, KeyError, TypeError) as error:
        log.error("owner_record_unreadable", key=record.key, error=repr(error))
        return None
