"""A cache of the tree's records and directories: most writes need no read before them.  Pure."""

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from config import bounds
from storage.metadata.keys import level_of
from storage.metadata.store import Version
from storage.metadata.zookeeper.layout import Directory, Layout, Node
from storage.metadata.zookeeper.plan import Plan

V = TypeVar("V")


class _Recent(Generic[V]):
    """A mapping of bounded size."""

    __slots__ = ("_items", "_max")

    def __init__(self, max_items: int) -> None:
        self._items: OrderedDict[str, V] = OrderedDict()
        self._max = max_items

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def get(self, key: str) -> V | None:
        return self._items.get(key)

    def put(self, key: str, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._max:
            self._items.popitem(last=False)

    def forget(self, key: str) -> None:
        self._items.pop(key, None)


class Undo(NamedTuple):
    """The state that was known before a plan was sent."""

    knew_record: bool
    record: Node | None
    directory: Directory | None


class Knowledge:
    """The records and directories that this process knows, so that most writes need no read.

    It is the state after all writes in flight.  It may be old, as other processes write too: a
    write names the versions that it builds on, and after a failure they are forgotten and read.
    Bounded: the entries that were put longest ago go first.
    """

    def __init__(self, layout: Layout, max_items: int = bounds.ZOOKEEPER_KNOWN) -> None:
        self._layout = layout
        self._records: _Recent[Node | None] = _Recent(max_items)
        self._directories: _Recent[Directory] = _Recent(max_items)
        self._nodes: _Recent[bool] = _Recent(max_items)

    def knows(self, key: str) -> bool:
        """Whether it is known if there is such a record, and at which version."""
        return key in self._records

    def record(self, key: str) -> Node | None:
        """The record, None if there is none, or nothing is known."""
        return self._records.get(key)

    def directory(self, level: str) -> Directory | None:
        """The directory, None if nothing is known of it."""
        return self._directories.get(level)

    def learn_record(self, key: str, node: Node | None) -> None:
        """Put a record as it was read."""
        self._records.put(key, node)

    def learn_directory(self, level: str, directory: Directory | None) -> None:
        """Put a directory as it was read; None if there is none."""
        if directory is None:
            self.forget_directory(level)
            return
        self._directories.put(level, directory)
        self._nodes.put(self._layout.directory(level), True)

    def missing_nodes(self, plan: Plan) -> list[str]:
        """The nodes above those of a plan that are not known to exist, from the top.

        They count as existing afterwards.
        """
        after = plan.after
        if after is None:
            return []
        paths = self._layout.directories(level_of(plan.key))
        for entry in after.stored.indexes:
            paths += (self._layout.index(entry.index), self._layout.bucket(entry))
        missing = [path for path in dict.fromkeys(paths) if path not in self._nodes]
        for path in missing:
            self._nodes.put(path, True)
        return missing

    def expect(self, plan: Plan) -> Undo:
        """Take in that a plan was sent; returns the state before, for `undo`."""
        level = level_of(plan.key)
        before = Undo(
            plan.key in self._records,
            self._records.get(plan.key),
            self._directories.get(level),
        )
        self._records.put(plan.key, plan.after)
        if plan.directory is not None:
            self._directories.put(level, plan.directory)
        return before

    def undo(self, plan: Plan, before: Undo) -> None:
        """Take back a plan that had no effect, as had none that was sent after it."""
        if before.knew_record:
            self._records.put(plan.key, before.record)
        else:
            self._records.forget(plan.key)
        if plan.directory is not None:
            self.learn_directory(level_of(plan.key), before.directory)

    def confirm(self, plan: Plan, version: Version) -> None:
        """Take in that a plan took effect."""
        after = plan.after
        if after is not None and self._records.get(plan.key) is after:
            stored = after.stored._replace(version=version)
            self._records.put(plan.key, Node(stored, after.life, after.node_version))

    def forget(self, plan: Plan) -> None:
        """Forget the state that a failed plan was made of: it has changed."""
        level = level_of(plan.key)
        self._records.forget(plan.key)
        self.forget_directory(level)
        for path in self._layout.directories(level):
            self._nodes.forget(path)
        if plan.after is not None:
            for entry in plan.after.stored.indexes:
                self._nodes.forget(self._layout.index(entry.index))
                self._nodes.forget(self._layout.bucket(entry))

    def forget_level(self, level: str, key: str) -> None:
        """Forget the state that a write of the key is made of."""
        self._records.forget(key)
        self.forget_directory(level)

    def forget_directory(self, level: str) -> None:
        """Forget a directory that is gone, or may be."""
        self._directories.forget(level)
        self._nodes.forget(self._layout.directory(level))
