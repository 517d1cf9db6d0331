"""Elections in the metadata store: the process that creates an ephemeral record leads."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from storage.metadata.store import ABSENT, MetadataStore, Record, Session, Version, VersionConflict

K = TypeVar("K")
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one attempt to lead ended.

    `found` is the record of another process that leads; None if this process won, or if the record
    changed meanwhile: then a watch reports the leader.
    """

    won: bool
    found: Record | None = None


WON = Outcome(won=True)
OVERTAKEN = Outcome(won=False)


class Election:
    """Attempts of one process to lead, each for the ephemeral record at one key.

    The record belongs to the winner's session, and leadership ends with that session.  The caller
    decides when to stand for election and how to react to a lost session.
    """

    def __init__(
        self, metadata: MetadataStore, value: bytes, may_replace: Callable[[Record], bool]
    ) -> None:
        """`value` names this process; `may_replace` tells whether it may take over a record."""
        self._metadata = metadata
        self._value = value
        self._may_replace = may_replace

    async def stand(self, key: str, session: Session) -> Outcome:
        """Put first, which is one call where nobody leads.  Raises as `MetadataStore.put`."""
        if await self._put(key, session, ABSENT):
            return WON
        found = await self._metadata.get(key)
        return OVERTAKEN if found is None else await self._replace(found, session)

    async def stand_if_vacant(self, key: str, session: Session) -> Outcome:
        """Read first, which is one call where somebody leads.  Raises as `MetadataStore.put`."""
        found = await self._metadata.get(key)
        if found is not None:
            return await self._replace(found, session)
        return WON if await self._put(key, session, ABSENT) else OVERTAKEN

    async def overwrite(self, key: str, session: Session) -> None:
        """Lead whatever the record says: another agreement has made this process the leader."""
        await self._metadata.put(key, self._value, session=session)

    async def give_up(self, key: str, leave: Callable[[], None]) -> bool:
        """Give up leadership; `leave` is called after the record was read, before its deletion.

        False if another process changed the record in between.
        """
        found = await self._metadata.get(key)
        leave()
        if found is None or not self._may_replace(found):
            return True
        try:
            # At the version that was read, so that a successor's record stays.
            await self._metadata.delete(key, expect=found.version)
        except VersionConflict:
            return False
        return True

    async def _replace(self, found: Record, session: Session) -> Outcome:
        if not self._may_replace(found):
            return Outcome(won=False, found=found)
        # At the version that was read: of two candidates one wins.
        return WON if await self._put(found.key, session, found.version) else OVERTAKEN

    async def _put(self, key: str, session: Session, expect: Version) -> bool:
        try:
            await self._metadata.put(key, self._value, expect=expect, session=session)
        except VersionConflict:
            return False
        return True


class KnownLeaders(Generic[K, L]):
    """The leaders that this process knows of, by what they lead.  Pure."""

    def __init__(self, me: L) -> None:
        self.leaders: Mapping[K, L] = {}
        """Replaced by each change, never changed itself."""
        self._me = me
        self._events: Counter[K] = Counter()
        """Number of events of each key."""

    @property
    def mine(self) -> list[K]:
        """The keys that this process leads, if its session lives."""
        return [key for key, leader in self.leaders.items() if leader == self._me]

    def note_event(self, key: K) -> None:
        """Note an event that does not name the leader."""
        self._events[key] += 1

    def note_leader(self, key: K, leader: L | None) -> None:
        """Note an event: `leader` leads now, or nobody does."""
        self.note_event(key)
        self._set({key: leader})

    def events(self) -> Mapping[K, int]:
        """Number of events so far; take it before a read or a put, and pass it to `learn`."""
        return self._events.copy()

    def learn(self, found: Mapping[K, L | None], since: Mapping[K, int]) -> None:
        """Note leaders that were read or won, except for keys that had an event `since` then."""
        # Such an event is newer than what was read.
        fresh = {k: one for k, one in found.items() if self._events[k] == since.get(k, 0)}
        self._set(fresh)

    def give_up(self, key: K) -> None:
        """Note that this process does not lead the key any more."""
        self._set({key: None})

    def lose(self, keys: Iterable[K], *, all_of_them: bool) -> None:
        """Note that the session was lost, and with it all that was won, or is being won, under it.

        `keys` are those whose elections may still be under way.  With `all_of_them`, forget other
        leaders too.
        """
        self._events.update(keys)
        mine = self.mine
        self._set(dict.fromkeys(self.leaders if all_of_them else mine))

    def _set(self, news: Mapping[K, L | None]) -> None:
        leaders = {**self.leaders, **news}
        self.leaders = {key: one for key, one in leaders.items() if one is not None}
