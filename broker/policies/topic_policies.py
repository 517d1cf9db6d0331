"""The policies of topics: records of the metadata store, followed by namespace.

The record of a topic is `/admin/topic-policies/<tenant>/<namespace>/<encoded local name>`, JSON:
`{"local": {...}, "global": {...}}`, with members as in `policy_kinds.OF_TOPICS`.  Local values come
before global ones, which would hold in all clusters of a replicated topic.  A partitioned topic has
one record for all of its partitions, a scalable one for all of its segments.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import structlog

from config.bounds import RECORD_CHANGE_TRIES, RECORDS_PER_TURN
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import (
    NamespaceName,
    TopicDomain,
    TopicName,
    decode_name,
    encode_name,
    segment_name,
)
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import ABSENT, Event, MetadataStore, Record, VersionConflict
from storage.metadata.watch_follower import WatchFollower

log = structlog.get_logger(__name__)

ROOT = "/admin/topic-policies"
LOCAL, GLOBAL = "local", "global"
_NONE: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PoliciesOfTopic:
    """The policies that a topic sets itself."""

    local: Mapping[str, object] = field(default_factory=dict)
    global_: Mapping[str, object] = field(default_factory=dict)

    def get(self, path: str) -> object:
        """The local value, or else the global one; None if neither is set."""
        value = self.local.get(path)
        return self.global_.get(path) if value is None else value

    def of_level(self, *, is_global: bool) -> Mapping[str, object]:
        """The policies of one level."""
        return self.global_ if is_global else self.local

    def changed(self, path: str, value: object, *, is_global: bool) -> "PoliciesOfTopic":
        """The same with another value of a policy; None: without it."""
        level = dict(self.of_level(is_global=is_global))
        level.pop(path, None)
        if value is not None:
            level[path] = value
        return replace(self, **{"global_" if is_global else "local": level})


UNSET = PoliciesOfTopic(_NONE, _NONE)


class _Namespace:
    """The followed records of one namespace."""

    def __init__(self) -> None:
        self.policies: dict[str, PoliciesOfTopic] = {}
        """By local name."""
        self.changed_while_reading: set[str] = set()
        """Local names that were written, or had an event, since the last scan began."""
        self.opening = asyncio.Lock()
        self.is_followed = False


class TopicPolicies:
    """Reads and changes the policies of topics, and follows those of namespaces in use."""

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata
        self._tasks = BackgroundTasks(log)
        self._namespaces: dict[NamespaceName, _Namespace] = {}
        self._listeners: list[Callable[[NamespaceName, str], None]] = []

    async def stop(self) -> None:
        """Stop following changes."""
        await self._tasks.stop()

    def on_change(self, listener: Callable[[NamespaceName, str], None]) -> None:
        """Call `listener` with namespace and local name of each topic whose policies changed."""
        self._listeners.append(listener)

    async def follow(self, namespace: NamespaceName) -> None:
        """Return when the records of a namespace are known; they are kept current from then on.

        Raises `MetadataError`.
        """
        space = self._namespaces.setdefault(namespace, _Namespace())
        if space.is_followed:
            return
        async with space.opening:
            if space.is_followed:
                return
            follower = self._follower(namespace, space)
            try:
                await follower.begin()
            except BaseException:
                follower.close()
                raise
            space.is_followed = True
            self._tasks.keep("topic_policies", follower.run)

    def known(self, name: TopicName) -> PoliciesOfTopic:
        """The policies of a topic of a followed namespace, without a read of the store."""
        space = self._namespaces.get(name.namespace_name)
        return UNSET if space is None else space.policies.get(policy_name(name), UNSET)

    async def get(self, name: TopicName) -> PoliciesOfTopic:
        """The policies of a topic, read anew.  Raises `MetadataError`."""
        record = await self._metadata.get(_key(name))
        return UNSET if record is None else _decode(record)

    async def find(
        self, namespace: NamespaceName, wanted: Callable[[PoliciesOfTopic], bool]
    ) -> str | None:
        """The local name of a topic with such policies, read anew.  Raises `MetadataError`."""
        records = await self._metadata.scan(*children_range(_parent_key(namespace)))
        for number, record in enumerate(records):
            if wanted(_decode(record)):
                return decode_name(name_of(record.key))
            if number % RECORDS_PER_TURN == 0:
                await asyncio.sleep(0)
        return None

    async def update(
        self, name: TopicName, change: Callable[[PoliciesOfTopic], PoliciesOfTopic]
    ) -> None:
        """Write what `change` makes of the policies of a topic.

        `change` may be called up to RECORD_CHANGE_TRIES times, each time with policies that were
        read anew, and may raise.  Raises `MetadataError`, and `VersionConflict` after the last
        conflict.
        """
        for tries_left in reversed(range(RECORD_CHANGE_TRIES)):
            record = await self._metadata.get(_key(name))
            changed = change(UNSET if record is None else _decode(record))
            expect = ABSENT if record is None else record.version
            try:
                await self._metadata.put(_key(name), _encode(changed), expect=expect)
            except VersionConflict:
                if not tries_left:
                    raise
                continue
            self._put(name, changed)
            return

    async def forget(self, name: TopicName) -> None:
        """Delete the record of a topic that is deleted.  Raises `MetadataError`."""
        if await self._metadata.delete(_key(name)):
            self._put(name, UNSET)

    def _put(self, name: TopicName, policies: PoliciesOfTopic) -> None:
        """Use the policies that this process has written at once, before the watch reports them."""
        space = self._namespaces.get(name.namespace_name)
        if space is not None:
            space.changed_while_reading.add(policy_name(name))
            self._take(name.namespace_name, space, policy_name(name), policies)

    def _follower(self, namespace: NamespaceName, space: _Namespace) -> WatchFollower:
        parent_key = _parent_key(namespace)

        async def read() -> None:
            space.changed_while_reading.clear()
            found = {
                decode_name(name_of(record.key)): _decode(record)
                for record in await self._metadata.scan(*children_range(parent_key))
            }
            # An event that came during the scan may be newer than its result.
            for local_name in found.keys() | space.policies.keys():
                if local_name not in space.changed_while_reading:
                    self._take(namespace, space, local_name, found.get(local_name, UNSET))

        async def take(event: Event) -> None:
            local_name = decode_name(name_of(event.key))
            space.changed_while_reading.add(local_name)
            policies = UNSET if event.record is None else _decode(event.record)
            self._take(namespace, space, local_name, policies)

        return WatchFollower(lambda: self._metadata.watch_children(parent_key), read, take)

    def _take(
        self, namespace: NamespaceName, space: _Namespace, local_name: str, new: PoliciesOfTopic
    ) -> None:
        if space.policies.get(local_name, UNSET) == new:
            return
        if new == UNSET:
            del space.policies[local_name]
        else:
            space.policies[local_name] = new
        for listener in self._listeners:
            listener(namespace, local_name)


def policy_name(name: TopicName) -> str:
    """The local name under which the policies of a topic, partition or segment are kept."""
    if name.domain is TopicDomain.SEGMENT:
        return segment_name(name).parent.local_name
    return name.partitioned.local_name


def _parent_key(namespace: NamespaceName) -> str:
    return f"{ROOT}/{namespace}"


def _key(name: TopicName) -> str:
    return f"{_parent_key(name.namespace_name)}/{encode_name(policy_name(name))}"


def _encode(policies: PoliciesOfTopic) -> bytes:
    value = {LOCAL: dict(policies.local), GLOBAL: dict(policies.global_)}
    return json.dumps(value, separators=(",", ":")).encode()


def _decode(record: Record) -> PoliciesOfTopic:
    try:
        value = json.loads(record.value)
    except ValueError as error:
        log.error("topic_policies_unreadable", key=record.key, error=str(error))
        return UNSET
    parts = value if isinstance(value, dict) else {}
    local, global_ = (
        part if isinstance(part, dict) else {} for part in (parts.get(LOCAL), parts.get(GLOBAL))
    )
    return PoliciesOfTopic(local, global_)
