"""The records of scalable topics in the metadata store."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import ClassVar

import structlog

from broker.policies.namespaces import confirm_creation
from broker.scalable import history, steps
from broker.scalable.assignment_record import StoredAssignment
from broker.scalable.history import HistoryEntry
from broker.scalable.layout import CorruptLayout
from broker.scalable.load_report import (
    EarlierReport,
    Load,
    LoadReport,
    decode_report,
    encode_report,
)
from broker.scalable.records import (
    SEALED,
    ScalableTopicRecord,
    SubscriptionKind,
    consumer_path,
    consumers_path,
    controller_path,
    decode_assignment,
    decode_part,
    decode_subscription,
    decode_topic,
    encode_subscription,
    encode_topic,
    indexes_of,
    is_indexed,
    load_path,
    namespace_path,
    subscription_path,
    subscriptions_path,
    topic_at,
    topic_in,
    topic_path,
    with_assignment,
)
from broker.scalable.steps import RESHAPES, Step
from config.bounds import METADATA_BATCH_OPERATIONS
from magnetar.protocol.names import InvalidTopicName, NamespaceName, TopicName
from magnetar.protocol.server_error import PeerError, ServerError
from storage.metadata.keys import children_range, exact_range
from storage.metadata.store import (
    ABSENT,
    MetadataError,
    MetadataStore,
    Record,
    Version,
    VersionConflict,
    Watch,
)

log = structlog.get_logger(__name__)


class ScalableTopicNotFound(PeerError):
    """There is no scalable topic of that name."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND
    http_status: ClassVar[HTTPStatus] = HTTPStatus.NOT_FOUND


class ScalableTopicExists(PeerError):
    """There is a scalable topic of that name already."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class ConcurrentChange(PeerError):
    """Another change of the topic came first."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


@dataclass(frozen=True, slots=True)
class StoredTopic:
    """A topic's record and the version it was read at."""

    name: TopicName
    record: ScalableTopicRecord
    version: Version
    modifications: int = 0
    """How often the record was overwritten; a topic created anew under the name starts at 0."""


@dataclass(frozen=True, slots=True)
class StoredSubscription:
    """A subscription's record and the version it was read at."""

    value: bytes
    version: Version

    @property
    def assignment(self) -> StoredAssignment | None:
        """The segments of its ordered consumers; None if they were never stored."""
        return decode_assignment(self.value)


class TopicStore:
    """Reads and writes the records of scalable topics.

    A topic's record only changes by compare-and-set on the version that was read.  All names are of
    the `topic` domain.  All methods raise `MetadataError` when the store fails.
    """

    def __init__(self, metadata: MetadataStore) -> None:
        self._metadata = metadata

    # Topics

    async def create(self, name: TopicName, record: ScalableTopicRecord) -> StoredTopic:
        """Store a new topic.  Raises `ScalableTopicExists`, `NamespaceNotFound`."""
        value = encode_topic(record)
        indexes = indexes_of(record)
        try:
            put = await self._metadata.put(topic_path(name), value, expect=ABSENT, indexes=indexes)
        except VersionConflict:
            raise ScalableTopicExists(
                f"{name} exists already: use it, or choose another name."
            ) from None

        async def undo() -> None:
            with contextlib.suppress(VersionConflict):
                await self._metadata.delete(topic_path(name), expect=put.version)

        await confirm_creation(self._metadata, name.namespace_name, undo)
        return StoredTopic(name, record, put.version, put.modifications)

    async def load(self, name: TopicName, known: StoredTopic | None = None) -> StoredTopic | None:
        """Read a topic; None if there is none.  Raises `CorruptLayout`.

        If the record is still that of `known`, it is not decoded again: the cost of that grows with
        the segments, and the record is read for each segment that is loaded.
        """
        found = await self._metadata.get(topic_path(name))
        if (
            found is not None
            and known is not None
            and (found.version, found.modifications) == (known.version, known.modifications)
        ):
            return known
        return _stored(name, found)

    async def load_fresh(self, name: TopicName) -> StoredTopic | None:
        """Read a topic, with every write that any process knows to be stored."""
        path = topic_path(name)
        found = await self._metadata.scan(path, f"{path}!", fresh=True)
        return _stored(name, found[0] if found else None)

    def watch(self, name: TopicName) -> Watch:
        """Watch a topic's record."""
        return self._metadata.watch_key(topic_path(name))

    async def change(self, stored: StoredTopic, record: ScalableTopicRecord) -> StoredTopic:
        """Replace the record that was read.  Raises `ConcurrentChange`."""
        value = encode_topic(record)
        indexes = indexes_of(record)
        path = topic_path(stored.name)
        try:
            put = await self._metadata.put(path, value, expect=stored.version, indexes=indexes)
        except VersionConflict:
            raise _changed(stored.name) from None
        except MetadataError:
            # The store may have written the record all the same.
            after = await self._metadata.get(path)
            if after is None or after.value != value:
                raise
            return StoredTopic(stored.name, record, after.version, after.modifications)
        return StoredTopic(stored.name, record, put.version, put.modifications)

    async def refresh(self, stored: StoredTopic) -> None:
        """Write the record back as it was read, so that changes on that version fail from then on.

        A record that has changed meanwhile is left as it is: such changes fail already.
        """
        record = stored.record
        value, indexes = encode_topic(record), indexes_of(record)
        with contextlib.suppress(VersionConflict):
            await self._metadata.put(
                topic_path(stored.name), value, expect=stored.version, indexes=indexes
            )

    async def remove(self, stored: StoredTopic) -> None:
        """Delete the record that was read.  Raises `ConcurrentChange`."""
        try:
            await self._metadata.delete(topic_path(stored.name), expect=stored.version)
        except VersionConflict:
            raise _changed(stored.name) from None

    async def remove_dependents(self, name: TopicName) -> None:
        """Delete subscriptions, registrations, history and controller of a topic that is gone."""
        for subscription in await self.subscriptions(name):
            for consumer in await self.consumers(name, subscription):
                await self.remove_consumer(name, subscription, consumer)
            await self.remove_subscription(name, subscription)
        partition = _history_partition(name)
        for record in await self._metadata.scan(*_history_range(name), partition=partition):
            await self._metadata.delete(record.key, partition=partition)
        await self._metadata.delete(controller_path(name))

    async def find(
        self, namespace: NamespaceName, filters: Sequence[tuple[str, str]] = ()
    ) -> list[TopicName]:
        """The topics of a namespace, in order, that have all the properties in `filters`."""
        # An index only narrows the search: the record itself decides.
        by_index = next((pair for pair in filters if is_indexed(*pair)), None)
        if by_index is not None:
            records = await self._found_by_index(namespace, *by_index)
        else:
            records = await self._found_by_name(namespace)
        names: list[TopicName] = []
        for part, value in sorted(records.items()):
            try:
                if matches(decode_topic(value).properties, filters):
                    names.append(topic_in(namespace, part))
            except (InvalidTopicName, CorruptLayout) as error:
                log.warning("topic_record_ignored", part=part, error=str(error))
        return sorted(names)

    async def with_sealed_segments(self) -> list[TopicName]:
        """The topics of all namespaces that have sealed segments."""
        hits = await self._metadata.scan_index(SEALED.index, *exact_range(SEALED.key))
        names = [topic_at(hit.record.key) for hit in hits]
        return [name for name in names if name is not None]

    async def _found_by_index(
        self, namespace: NamespaceName, key: str, value: str
    ) -> dict[str, bytes]:
        level = f"{namespace_path(namespace)}/"
        hits = await self._metadata.scan_index(key, *exact_range(value))
        return {
            hit.record.key.removeprefix(level): hit.record.value
            for hit in hits
            if hit.record.key.startswith(level) and "/" not in hit.record.key.removeprefix(level)
        }

    async def _found_by_name(self, namespace: NamespaceName) -> dict[str, bytes]:
        level = namespace_path(namespace)
        parts = await self._metadata.children(level)
        found: dict[str, bytes] = {}
        for first in range(0, len(parts), METADATA_BATCH_OPERATIONS):
            some = parts[first : first + METADATA_BATCH_OPERATIONS]
            records = await self._metadata.get_many([f"{level}/{part}" for part in some])
            pairs = zip(some, records, strict=True)
            found.update((part, record.value) for part, record in pairs if record is not None)
        return found

    # Subscriptions and their consumers

    async def subscriptions(self, name: TopicName) -> dict[str, SubscriptionKind | None]:
        """The subscriptions that have a record, with their types."""
        parts = await self._metadata.children(subscriptions_path(name))
        paths = [f"{subscriptions_path(name)}/{part}" for part in parts]
        records = await self._metadata.get_many(paths) if paths else []
        return {
            decode_part(part): None if record is None else decode_subscription(record.value)
            for part, record in zip(parts, records, strict=True)
        }

    async def subscription(self, name: TopicName, subscription: str) -> SubscriptionKind | None:
        """The type of a subscription; None if it has no record or no type."""
        record = await self._metadata.get(subscription_path(name, subscription))
        return None if record is None else decode_subscription(record.value)

    async def subscription_record(
        self, name: TopicName, subscription: str
    ) -> StoredSubscription | None:
        """Read a subscription's record, with every write that is known to be stored.

        None if there is none.
        """
        path = subscription_path(name, subscription)
        found = await self._metadata.scan(path, f"{path}!", fresh=True)
        return StoredSubscription(found[0].value, found[0].version) if found else None

    async def put_assignment(
        self,
        name: TopicName,
        subscription: str,
        stored: StoredSubscription,
        assignment: StoredAssignment | None,
    ) -> StoredSubscription:
        """Replace the assignment in the record that was read; None removes it.

        Raises `ConcurrentChange` if the record was changed or deleted since.
        """
        value = with_assignment(stored.value, assignment)
        path = subscription_path(name, subscription)
        try:
            put = await self._metadata.put(path, value, expect=stored.version)
        except VersionConflict:
            raise _changed(name) from None
        return StoredSubscription(value, put.version)

    async def put_subscription(
        self, name: TopicName, subscription: str, kind: SubscriptionKind
    ) -> SubscriptionKind:
        """Store a subscription's type unless it has one; return the type that is stored."""
        path = subscription_path(name, subscription)
        try:
            await self._metadata.put(path, encode_subscription(kind), expect=ABSENT)
        except VersionConflict:
            return await self.subscription(name, subscription) or kind
        return kind

    async def remove_subscription(self, name: TopicName, subscription: str) -> None:
        """Delete a subscription's record."""
        await self._metadata.delete(subscription_path(name, subscription))

    async def consumers(self, name: TopicName, subscription: str) -> list[str]:
        """Names of the registered consumers of a subscription."""
        parts = await self._metadata.children(consumers_path(name, subscription))
        return [decode_part(part) for part in parts]

    async def put_consumer(self, name: TopicName, subscription: str, consumer: str) -> None:
        """Register a consumer, durably."""
        await self._metadata.put(consumer_path(name, subscription, consumer), b"{}")

    async def remove_consumer(self, name: TopicName, subscription: str, consumer: str) -> None:
        """Delete a consumer's registration."""
        await self._metadata.delete(consumer_path(name, subscription, consumer))

    # Load reports

    async def put_load(
        self,
        name: TopicName,
        segment_id: int,
        load: Load,
        now_ms: int,
        earlier: tuple[EarlierReport, ...] = (),
    ) -> LoadReport:
        """Store the load report of a segment, with those that it repeats."""
        put = await self._metadata.put(load_path(name, segment_id), encode_report(load, earlier))
        return LoadReport(load, now_ms, put.modifications, earlier)

    async def loads(self, name: TopicName, segment_ids: Sequence[int]) -> dict[int, LoadReport]:
        """The stored load reports of these segments; some may have none."""
        paths = [load_path(name, each) for each in segment_ids]
        records = await self._metadata.get_many(paths) if paths else []
        found: dict[int, LoadReport] = {}
        for segment_id, record in zip(segment_ids, records, strict=True):
            if record is None:
                continue
            try:
                load, earlier = decode_report(record.value)
            except (ValueError, KeyError, TypeError) as error:
                log.warning("load_report_ignored", key=record.key, error=repr(error))
                continue
            found[segment_id] = LoadReport(load, record.modified_ms, record.modifications, earlier)
        return found

    async def remove_load(self, name: TopicName, segment_id: int) -> None:
        """Delete the load report of a segment."""
        await self._metadata.delete(load_path(name, segment_id))

    # History

    async def history(self, name: TopicName) -> list[HistoryEntry]:
        """The entries of a topic's history, in the order in which they were written."""
        partition = _history_partition(name)
        records = await self._metadata.scan(*_history_range(name), partition=partition)
        entries: list[HistoryEntry] = []
        for record in records:
            try:
                entries.append(history.decode(record.value))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("history_entry_ignored", key=record.key, error=repr(error))
        return entries

    async def append_history(self, name: TopicName, entry: HistoryEntry) -> None:
        """Append an entry to a topic's history."""
        await self._metadata.put(
            f"{_history_level(name)}/",
            history.encode(entry),
            sequence=True,
            partition=_history_partition(name),
        )

    async def complete_history(self, stored: StoredTopic, *, now_ms: int) -> None:
        """Append the entries that the layout implies and the history lacks.

        Their causes come from the notes of their steps.
        """
        recorded = await self.history(stored.name)
        missing = history.missing(stored.record.layout, recorded, now_ms=now_ms)
        steps_of = await self.begun_for(stored.name) if missing else []
        causes = {step.epoch: step.cause for step in steps_of if step.kind in RESHAPES}
        for entry in missing:
            with_cause = replace(entry, cause=causes.get(entry.epoch, ""))
            await self.append_history(stored.name, with_cause)

    # Steps

    async def begin(self, step: Step) -> Step | None:
        """Note a step.  If another step has its key, that one is returned and nothing is noted.

        Another attempt at an equal step is another step.
        """
        try:
            await self._metadata.put(step.key, steps.encode(step), expect=ABSENT)
        except VersionConflict:
            found = await self._metadata.get(step.key)
            if found is None:
                return await self.begin(step)
            noted = steps.decode(found.value)
            return None if noted == step else noted
        return None

    async def end(self, step: Step) -> None:
        """Delete the note of a step that is done.

        The note of another attempt with the same key stays.
        """
        found = await self._metadata.get(step.key)
        if found is not None and found.value == steps.encode(step):
            with contextlib.suppress(VersionConflict):
                await self._metadata.delete(step.key, expect=found.version)

    async def noted(self, step: Step) -> Step | None:
        """The step that is noted under the key of `step`, if any."""
        record = await self._metadata.get(step.key)
        return None if record is None else steps.decode(record.value)

    async def begun_for(self, name: TopicName) -> list[Step]:
        """The steps of one topic that were begun and not ended."""
        return _steps(await self._metadata.scan(*steps.range_of(name), fresh=True))

    async def begun(self) -> list[Step]:
        """All steps that have begun and not ended."""
        return _steps(await self._metadata.scan(*children_range(steps.STEPS_ROOT), fresh=True))


def _stored(name: TopicName, found: Record | None) -> StoredTopic | None:
    if found is None:
        return None
    return StoredTopic(name, decode_topic(found.value), found.version, found.modifications)


def _steps(records: Sequence[Record]) -> list[Step]:
    found: list[Step] = []
    for record in records:
        try:
            found.append(steps.decode(record.value))
        except (ValueError, KeyError, TypeError, PeerError) as error:
            log.error("layout_step_unreadable", key=record.key, error=repr(error))
    return found


def matches(properties: Mapping[str, str], filters: Sequence[tuple[str, str]]) -> bool:
    """Whether a topic has all of these properties."""
    return all(properties.get(key) == value for key, value in filters)


def _history_level(name: TopicName) -> str:
    return f"{topic_path(name)}/history"


def _history_range(name: TopicName) -> tuple[str, str]:
    return children_range(_history_level(name))


def _history_partition(name: TopicName) -> str:
    return topic_path(name)


def _changed(name: TopicName) -> ConcurrentChange:
    return ConcurrentChange(f"{name} was changed by another request meanwhile: try again.")
