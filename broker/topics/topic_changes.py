"""The last changes of the topic names of namespaces, shared by all who follow them.

A follower keeps its place in the changes and no copies of them, so that any number of followers
that fall behind take no memory.  One that falls behind the oldest kept change lists the topics
anew.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from broker.topics.topic_lists import TopicListener
from config.bounds import (
    TOPIC_CHANGES_KEPT,
    TOPIC_CHANGES_WAKES,
    TOPIC_LIST_PAUSE_S,
    TOPIC_LISTING_PATTERNS,
)
from magnetar.protocol.names import NamespaceName, TopicName

Select = Callable[[Iterable[str]], Awaitable[list[str]]]
"""Returns those of some names that match a pattern, in parts: it may wait in between."""
Follow = Callable[[NamespaceName, TopicListener], Awaitable[Callable[[], None]]]


class _Change(NamedTuple):
    """A topic that was created or deleted."""

    name: str
    exists: bool


class _Namespace:
    """The last changes of one namespace, and the followers to be woken."""

    def __init__(self, name: NamespaceName) -> None:
        self.name = name
        self.changes: deque[_Change] = deque()
        self.end = 0
        """The number of the next change."""
        self.wakes: dict[object, Callable[[], None]] = {}
        self.selected: dict[tuple[int, int, str], Mapping[str, bool]] = {}
        """What `take` found last, by the range of changes and the pattern."""
        self.following: asyncio.Task[Callable[[], None]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def begin(self) -> int:
        """The number of the oldest change that is kept."""
        return self.end - len(self.changes)

    def add(self, name: TopicName, exists: bool) -> None:
        """Note a change; the followers are woken soon."""
        if name.namespace_name != self.name:
            return
        self.changes.append(_Change(str(name), exists))
        self.end += 1
        if len(self.changes) > TOPIC_CHANGES_KEPT:
            self.changes.popleft()
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOPIC_LIST_PAUSE_S, self._wake_all)

    def between(self, begin: int, end: int) -> Mapping[str, bool]:
        """The newest state of the names that changed in a range of changes."""
        first = self.begin
        return dict(islice(self.changes, begin - first, end - first))

    def remember(self, key: tuple[int, int, str], found: Mapping[str, bool]) -> None:
        """Keep a selection for followers with the same pattern and place."""
        if len(self.selected) >= TOPIC_LISTING_PATTERNS:
            del self.selected[next(iter(self.selected))]
        self.selected[key] = found

    def close(self) -> None:
        """Wake nobody any more, and follow no changes."""
        if self._timer is not None:
            self._timer.cancel()
        following = self.following
        if following is None:
            return
        if not following.done():
            following.cancel()
        elif not following.cancelled() and following.exception() is None:
            following.result()()

    def _wake_all(self) -> None:
        self._timer = None
        self._wake_some(iter(tuple(self.wakes.items())))

    def _wake_some(self, waiting: Iterator[tuple[object, Callable[[], None]]]) -> None:
        """Wake TOPIC_CHANGES_WAKES followers in this turn of the loop, and the rest later."""
        count = 0
        for token, wake in islice(waiting, TOPIC_CHANGES_WAKES):
            count += 1
            if token in self.wakes:
                wake()
        if count == TOPIC_CHANGES_WAKES:
            asyncio.get_running_loop().call_soon(self._wake_some, waiting)


class FollowedChanges:
    """One follower's place in the changes of a namespace."""

    def __init__(self, namespace: _Namespace, close: Callable[[], None]) -> None:
        self._namespace = namespace
        self._next = namespace.end
        self.close = close
        """Follow no more.  May be called again."""

    @property
    def behind(self) -> bool:
        """Whether there are changes that were not taken yet."""
        return self._next < self._namespace.end

    def skip(self) -> None:
        """Take the changes unseen: the topics are listed anew."""
        self._next = self._namespace.end

    async def take(self, pattern: str, select: Select) -> Mapping[str, bool] | None:
        """Take the changes since the last call: whether each name that matches exists now.

        `select` is called once for all followers with that pattern and place.  None: the topics
        are to be listed anew, because too many changed.
        """
        namespace, begin, end = self._namespace, self._next, self._namespace.end
        self._next = end
        if begin < namespace.begin:
            return None
        key = (begin, end, pattern)
        found = namespace.selected.get(key)
        if found is None:
            newest = namespace.between(begin, end)
            found = {name: newest[name] for name in await select(newest)}
            namespace.remember(key, found)
        return found


class TopicChanges:
    """Follows namespaces, each once for all its followers."""

    def __init__(self, follow: Follow) -> None:
        """`follow` is `TopicRegistry.follow`."""
        self._follow = follow
        self._namespaces: dict[NamespaceName, _Namespace] = {}

    async def follow(self, name: NamespaceName, wake: Callable[[], None]) -> FollowedChanges:
        """Call `wake` soon after changes, those from now on, until it is closed."""
        namespace = self._namespaces.get(name)
        if namespace is None:
            namespace = self._namespaces[name] = _Namespace(name)
        if namespace.following is None:
            following = self._follow(name, namespace.add)
            namespace.following = asyncio.ensure_future(following)
        token = object()
        namespace.wakes[token] = wake
        try:
            await asyncio.shield(namespace.following)
        except BaseException:
            self._leave(namespace, token)
            raise
        return FollowedChanges(namespace, lambda: self._leave(namespace, token))

    def _leave(self, namespace: _Namespace, token: object) -> None:
        if namespace.wakes.pop(token, None) is None or namespace.wakes:
            return
        if self._namespaces.get(namespace.name) is namespace:
            del self._namespaces[namespace.name]
        namespace.close()
