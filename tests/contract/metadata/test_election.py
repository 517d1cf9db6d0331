"""Elections on every backend: one wins, leadership hangs on a session, and what it costs."""

import asyncio
from collections.abc import Sequence

import pytest

from storage.metadata.counted_metadata import CountedMetadata
from storage.metadata.election import WON, Election
from storage.metadata.store import (
    EventKind,
    MetadataStore,
    Session,
    SessionLost,
)
from tests.contract.metadata.backends import next_event

KEY = "/e/leader"
LONG_MS = 120_000


class Candidate:
    """One process that stands, by its name."""

    def __init__(self, store: MetadataStore, name: str) -> None:
        self.name = name.encode()
        self.election = Election(store, self.name, lambda record: record.value == self.name)
        self._store = store

    async def session(self) -> Session:
        return await self._store.open_session(timeout_ms=LONG_MS, identity=self.name.decode())


async def value_of(store: MetadataStore) -> bytes | None:
    record = await store.get(KEY)
    return None if record is None else record.value


async def test_one_of_several_candidates_wins(clients: Sequence[MetadataStore]) -> None:
    candidates = [Candidate(store, f"c{number}") for number, store in enumerate(clients)]
    sessions = [await candidate.session() for candidate in candidates]
    for how in ("stand", "stand_if_vacant"):
        outcomes = await asyncio.gather(
            *(
                getattr(candidate.election, how)(f"/e/{how}", session)
                for candidate, session in zip(candidates, sessions, strict=True)
            )
        )
        winners = [c for c, outcome in zip(candidates, outcomes, strict=True) if outcome.won]
        assert len(winners) == 1
        record = await clients[0].get(f"/e/{how}", fresh=True)
        assert record is not None
        assert record.value == winners[0].name
        assert record.ephemeral
    for session in sessions:
        await session.close()


async def test_loser_learns_who_leads(store: MetadataStore) -> None:
    first, second = Candidate(store, "first"), Candidate(store, "second")
    session, other = await first.session(), await second.session()
    assert await first.election.stand(KEY, session) is WON
    for outcome in (
        await second.election.stand(KEY, other),
        await second.election.stand_if_vacant(KEY, other),
    ):
        assert not outcome.won
        assert outcome.found is not None
        assert outcome.found.value == b"first"
    assert await value_of(store) == b"first"


async def test_leadership_ends_with_its_session(store: MetadataStore) -> None:
    first, second = Candidate(store, "first"), Candidate(store, "second")
    session, other = await first.session(), await second.session()
    await first.election.stand(KEY, session)
    watch = store.watch_key(KEY)
    await session.close()
    event = await next_event(watch)
    assert (event.kind, event.key) == (EventKind.REMOVED, KEY)
    watch.close()
    assert await second.election.stand(KEY, other) is WON
    with pytest.raises(SessionLost):
        await first.election.stand_if_vacant("/e/other", session)


@pytest.mark.parametrize("how", ["stand", "stand_if_vacant", "overwrite"])
async def test_later_session_of_the_same_process_takes_its_record_over(
    store: MetadataStore, how: str
) -> None:
    candidate = Candidate(store, "one")
    earlier, later = await candidate.session(), await candidate.session()
    await candidate.election.stand(KEY, earlier)
    await getattr(candidate.election, how)(KEY, later)
    await earlier.close()
    assert await value_of(store) == b"one"
    await later.close()
    assert await value_of(store) is None


async def test_leader_that_gives_up_makes_room_for_another(store: MetadataStore) -> None:
    first, second = Candidate(store, "first"), Candidate(store, "second")
    session, other = await first.session(), await second.session()
    await first.election.stand(KEY, session)
    left = list[bytes | None]()
    assert await first.election.give_up(KEY, lambda: left.append(b""))
    assert left == [b""]
    assert await second.election.stand(KEY, other) is WON
    assert await first.election.give_up(KEY, lambda: None)
    assert await value_of(store) == b"second"


async def test_first_call_is_enough_where_nobody_leads_or_somebody_does(
    store: MetadataStore,
) -> None:
    counted = CountedMetadata(store, asyncio.get_running_loop().time)
    first, second = Candidate(counted, "first"), Candidate(counted, "second")
    session, other = await first.session(), await second.session()
    await first.election.stand(KEY, session)
    assert (counted.puts.asked, counted.reads.gets) == (1, 0)
    await second.election.stand_if_vacant(KEY, other)
    assert (counted.puts.asked, counted.reads.gets) == (1, 1)
