"""Changes of topic names: kept once for all followers, and bounded."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

from broker.topics.topic_changes import TopicChanges
from broker.topics.topic_lists import TopicListener
from magnetar.protocol.names import NamespaceName, parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until

SPACE = NamespaceName("public", "default")


class Registry:
    """Reports changes to its listeners; `selected` has the calls of `select`."""

    def __init__(self) -> None:
        self.listeners: list[TopicListener] = []
        self.selected: list[list[str]] = []

    async def follow(self, name: NamespaceName, listener: TopicListener) -> Callable[[], None]:
        await asyncio.sleep(0)
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def change(self, name: str, *, exists: bool) -> None:
        for listener in self.listeners:
            listener(parse_topic_name(f"persistent://{name}"), exists)

    async def select(self, names: Iterable[str]) -> list[str]:
        self.selected.append(list(names))
        return [name for name in names if "/t" in name]


async def test_followers_of_one_pattern_share_the_changes() -> None:
    registry = Registry()
    changes = TopicChanges(registry.follow)
    woken: list[int] = []
    first, second = await asyncio.gather(
        changes.follow(SPACE, lambda: woken.append(1)),
        changes.follow(SPACE, lambda: woken.append(2)),
    )
    assert len(registry.listeners) == 1
    registry.change("public/default/t1", exists=True)
    registry.change("public/default/t2", exists=True)
    registry.change("public/default/t1", exists=False)
    registry.change("public/default/u", exists=True)
    registry.change("public/other/t", exists=True)
    await until(lambda: woken == [1, 2])
    expected = {"persistent://public/default/t1": False, "persistent://public/default/t2": True}
    for follower in (first, second):
        assert follower.behind
        assert await follower.take("t.*", registry.select) == expected
        assert not follower.behind
    assert len(registry.selected) == 1
    third = await changes.follow(SPACE, lambda: None)
    assert not third.behind, "earlier changes are in the list that it makes"
    for follower in (first, second, third):
        follower.close()
    assert registry.listeners == []


async def test_follower_that_missed_changes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "TOPIC_CHANGES_KEPT", 10)
    registry = Registry()
    follower = await TopicChanges(registry.follow).follow(SPACE, lambda: None)
    for number in range(11):
        registry.change(f"public/default/t{number}", exists=True)
    assert await follower.take("t.*", registry.select) is None
    assert not follower.behind
    registry.change("public/default/t", exists=True)
    assert await follower.take("t.*", registry.select) == {"persistent://public/default/t": True}
    follower.close()


async def test_all_followers_are_woken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "TOPIC_CHANGES_WAKES", 2)
    registry, woken = Registry(), list[int]()
    changes = TopicChanges(registry.follow)
    followers = [
        await changes.follow(SPACE, lambda number=number: woken.append(number))  # type: ignore[misc]
        for number in range(5)
    ]
    registry.change("public/default/t", exists=True)
    await until(lambda: woken == [0, 1, 2, 3, 4])
    for follower in followers:
        follower.close()
