"""Elections in the metadata store: whoever makes an ephemeral record leads what it stands for.

Rules:

- A record is made only where there is none (`ABSENT`), or over one of those that `may_replace`
  accepts, at the version that was read: of two candidates one wins.
- The record hangs on the winner's session, and leadership ends with that.
- A record that is given up is deleted at the version that was read, so a successor's stays.
- What was read, or won, says nothing of a leader that an event told of since (`KnownLeaders`): the
  event is newer.
- Who stands, what is read before, and what a lost session means, is the user's to decide.
"""

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

    `found` is the record of somebody else who leads; None if this process won, or if the record
    changed meanwhile: then a watch tells who leads.
    """

    won: bool
    found: Record | None = None


WON = Outcome(won=True)
OVERTAKEN = Outcome(won=False)


class Election:
    """Attempts of one process to lead, each for the record at one key."""

    def __init__(
        self, metadata: MetadataStore, value: bytes, may_replace: Callable[[Record], bool]
    ) -> None:
        """`value` names this process; `may_replace`: whether it may take over that record."""
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
        """Lead whatever stands there, where it was decided elsewhere who does."""
        await self._metadata.put(key, self._value, session=session)

    async def give_up(self, key: str, leave: Callable[[], None]) -> bool:
        """Lead no more: `leave` is called once the record was read, and before it is deleted.

        False if somebody else changed the record in between.
        """
        found = await self._metadata.get(key)
        leave()
        if found is None or not self._may_replace(found):
            return True
        try:
            await self._metadata.delete(key, expect=found.version)
        except VersionConflict:
            return False
        return True

    async def _replace(self, found: Record, session: Session) -> Outcome:
        if not self._may_replace(found):
            return Outcome(won=False, found=found)
        return WON if await self._put(found.key, session, found.version) else OVERTAKEN

    async def _put(self, key: str, session: Session, expect: Version) -> bool:
        try:
            await self._metadata.put(key, self._value, expect=expect, session=session)
        except VersionConflict:
            return False
        return True


class KnownLeaders(Generic[K, L]):
    """Pure: who leads what, as far as it is known here."""

    def __init__(self, me: L) -> None:
        self.leaders: Mapping[K, L] = {}
        """Replaced by each change, never changed itself."""
        self._me = me
        self._events: Counter[K] = Counter()
        """How many events there were of each."""

    @property
    def mine(self) -> list[K]:
        """What this process leads, if its session lives."""
        return [key for key, leader in self.leaders.items() if leader == self._me]

    def hear(self, key: K) -> None:
        """Take note of an event that does not tell who leads."""
        self._events[key] += 1

    def hear_of(self, key: K, leader: L | None) -> None:
        """Take in an event: that one leads now, or nobody does."""
        self.hear(key)
        self._set({key: leader})

    def events(self) -> Mapping[K, int]:
        """What was heard by now; asked for before a read or a put, for `learn`."""
        return self._events.copy()

    def learn(self, found: Mapping[K, L | None], since: Mapping[K, int]) -> None:
        """Take in what was read or won, but for those that there was an event of `since`."""
        fresh = {k: one for k, one in found.items() if self._events[k] == since.get(k, 0)}
        self._set(fresh)

    def give_up(self, key: K) -> None:
        """This process leads it no more."""
        self._set({key: None})

    def lose(self, keys: Iterable[K], *, all_of_them: bool) -> None:
        """Take in that the session was lost: what was won under it, or is being won, is not led.

        `all_of_them`: nothing is known of any leader any more.
        """
        self._events.update(keys)
        mine = self.mine
        self._set(dict.fromkeys(self.leaders if all_of_them else mine))

    def _set(self, news: Mapping[K, L | None]) -> None:
        leaders = {**self.leaders, **news}
        self.leaders = {key: one for key, one in leaders.items() if one is not None}
