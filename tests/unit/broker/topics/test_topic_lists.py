"""Names of a namespace: what is told is what is there, however late a list of them comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from broker.topics.partitions import partitioned_level
from broker.topics.topic_lists import TopicLists
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from storage.managed_ledger.records import ledger_key
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataError
from tests.support.clocks import FakeClock
from tests.support.waiting import until

NAMESPACE = NamespaceName("public", "default")
TOPIC = parse_topic_name("persistent://public/default/t")


class Listing:
    """Lists of names, each taken when it is asked for and handed out when it is let go."""

    def __init__(self, store: MemoryMetadataStore) -> None:
        self._store = store
        self.held = False
        self.waiting: list[asyncio.Future[None]] = []

    async def names(self, namespace: NamespaceName) -> list[str]:
        children = await self._store.children(ledger_key(f"{namespace}/persistent"))
        if self.held:
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
        return [f"persistent://{namespace}/{child}" for child in children]

    def let_go(self) -> None:
        self.held = False
        for each in self.waiting:
            if not each.done():
                each.set_result(None)


class Followed:
    """One namespace that is followed, and what was told of it."""

    def __init__(self) -> None:
        self.store = MemoryMetadataStore(FakeClock())
        self.listing = Listing(self.store)
        self.lists = TopicLists(self.store, ledger_key)
        self.heard: list[tuple[str, bool]] = []

    async def follow(self) -> None:
        await self.lists.follow(NAMESPACE, self.listing.names, self.note)

    def note(self, name: TopicName, exists: bool) -> None:
        self.heard.append((name.local_name, exists))

    async def make(self, name: TopicName) -> None:
        await self.store.put(ledger_key(name.ledger_path), b"")

    async def delete(self, name: TopicName) -> None:
        await self.store.delete(ledger_key(name.ledger_path))

    async def hold_a_read(self) -> None:
        """Have names read again, by a partitioned topic, and keep the list back."""
        self.listing.held = True
        await self.store.put(f"{partitioned_level(NAMESPACE)}/p", b"")
        await until(lambda: bool(self.listing.waiting))

    async def settle(self) -> None:
        """Let the list go, and end the read it belongs to."""
        self.listing.let_go()
        (space,) = self.lists._followed.values()
        await space.read(self.listing.names)


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    made = Followed()
    yield made
    made.lists.close()
    await made.store.close()


async def test_topic_created_during_a_listing_is_not_reported_as_deleted(
    followed: Followed,
) -> None:
    await followed.follow()
    await followed.hold_a_read()
    await followed.make(TOPIC)
    await until(lambda: bool(followed.heard))
    await followed.settle()
    assert followed.heard == [("t", True)]


async def test_topic_deleted_during_a_listing_is_reported_as_deleted(
    followed: Followed,
) -> None:
    await followed.make(TOPIC)
    await followed.follow()
    await followed.hold_a_read()
    await followed.delete(TOPIC)
    await until(lambda: ("t", False) in followed.heard)
    await followed.settle()
    assert followed.heard == [("t", True), ("t", False)]


async def test_a_later_list_counts_for_every_name_again(followed: Followed) -> None:
    async def nothing(_: NamespaceName) -> list[str]:
        return []

    await followed.follow()
    await followed.hold_a_read()
    await followed.make(TOPIC)
    await until(lambda: bool(followed.heard))
    await followed.settle()
    (space,) = followed.lists._followed.values()
    await space.read(nothing)
    assert followed.heard == [("t", True), ("t", False)]


async def test_reads_go_one_after_another(followed: Followed) -> None:
    await followed.follow()
    (space,) = followed.lists._followed.values()
    await followed.hold_a_read()
    second = asyncio.create_task(space.read(followed.listing.names))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(followed.listing.waiting) == 1, "an older list must not come after a newer one"
    followed.listing.let_go()
    await second


async def test_follower_cancelled_before_the_first_list_leaves_nothing(followed: Followed) -> None:
    followed.listing.held = True
    asking = asyncio.create_task(followed.follow())
    await until(lambda: bool(followed.listing.waiting))
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    assert asking.cancelled()
    assert not followed.lists._followed


async def test_cancelled_follower_does_not_stop_the_others(followed: Followed) -> None:
    followed.listing.held = True
    gives_up, stays = (asyncio.create_task(followed.follow()) for _ in range(2))
    await until(lambda: bool(followed.listing.waiting))
    gives_up.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gives_up
    followed.listing.let_go()
    await stays
    await followed.make(TOPIC)
    await until(lambda: bool(followed.heard))
    assert followed.heard == [("t", True)], "by the one who stayed"


async def test_a_list_that_cannot_be_had_is_asked_for_again(followed: Followed) -> None:
    names, failures = followed.listing.names, [MetadataError("the test says no: try again.")]

    async def fails_once(namespace: NamespaceName) -> list[str]:
        if failures:
            raise failures.pop()
        return await names(namespace)

    await followed.make(TOPIC)
    await followed.lists.follow(NAMESPACE, fails_once, followed.note)
    assert not failures
    assert followed.heard == [("t", True)]
