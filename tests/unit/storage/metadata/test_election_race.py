"""An election against a store whose record changes between a read and the write after it."""

from storage.clock import SystemClock
from storage.metadata.election import OVERTAKEN
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import Record
from tests.contract.metadata.test_election import KEY, Candidate, value_of


class ChangingStore(MemoryMetadataStore):
    """Another process puts its own record right after a read."""

    async def get(self, key: str, **given: object) -> Record | None:
        found = await super().get(key, **given)  # type: ignore[arg-type]
        await super().put(key, b"successor")
        return found


async def test_record_that_changed_since_it_was_read_stays() -> None:
    store = ChangingStore(SystemClock())
    candidate = Candidate(store, "one")
    session = await candidate.session()
    assert await candidate.election.stand_if_vacant(KEY, session) is OVERTAKEN
    await store.put(KEY, b"one", session=session)
    assert await candidate.election.stand(KEY, session) is OVERTAKEN
    await store.put(KEY, b"one", session=session)
    assert not await candidate.election.give_up(KEY, lambda: None)
    assert await value_of(store) == b"successor"
    await store.close()
