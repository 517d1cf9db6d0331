"""What outlives a producer: its sequence ids, the client that has its name, and the topic epoch."""

from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

from broker.topics.context import TopicContext
from broker.topics.deduplication import NO_POSITION, Deduplication
from broker.topics.name_writer import NameWriter
from broker.topics.producer import Producer, ProducerRequest, ProducerState
from broker.topics.received_parts import ReceivedParts
from broker.topics.replicated_messages import IdsByOrigin, IdsByPosition
from broker.topics.segment_sources import SegmentSources, SourceRefused, SourceState
from broker.topics.sequence_store import SequenceStore
from broker.topics.weak_references import require_present
from magnetar.protocol.managed_clients import is_managed
from magnetar.protocol.names import TopicDomain, TopicName
from storage.managed_ledger.ledger import ManagedLedger

TOPIC_EPOCH_PROPERTY: Final = "pulsar.topic.epoch"


class ProducerRecords(Protocol):
    """What a topic keeps about producers that may come back."""

    @property
    def epoch(self) -> int | None:
        """The topic epoch when the topic was loaded; None if it never had an exclusive producer."""
        ...

    def has_stored(self, name: str) -> bool:
        """Whether the topic may have messages of a producer of that name."""
        ...

    def require_current(self, request: ProducerRequest) -> None:
        """Raise `StaleSender` for the sender of a segment whose cluster has a newer one."""
        ...

    async def begin(self, producer: Producer, require_still_open: Callable[[], None]) -> None:
        """Count the sequence ids of an admitted producer from now on.

        `require_still_open` raises if the producer may no longer be opened; called after waits.
        """
        ...

    def policies_changed(self, producer: Producer) -> None:
        """Compare the sequence ids of an attached producer, or no longer, as policies have it."""
        ...

    def end(self, producer: Producer) -> None:
        """Note that a producer left and has nothing in flight."""
        ...

    async def save_epoch(self, epoch: int | None) -> None:
        """Make the topic epoch durable, as far as anything of the topic is."""
        ...


class NoProducerRecords:
    """`ProducerRecords` of a topic that stores nothing."""

    epoch: None = None

    def has_stored(self, name: str) -> bool:
        """See `ProducerRecords`."""
        return False

    def require_current(self, request: ProducerRequest) -> None:
        """See `ProducerRecords`."""

    async def begin(self, producer: Producer, require_still_open: Callable[[], None]) -> None:
        """See `ProducerRecords`.  Sequence ids are not compared."""

    def policies_changed(self, producer: Producer) -> None:
        """See `ProducerRecords`."""

    def end(self, producer: Producer) -> None:
        """See `ProducerRecords`."""

    async def save_epoch(self, epoch: int | None) -> None:
        """See `ProducerRecords`.  The epoch ends with the topic."""


class RecordingTopic(Protocol):
    """The topic that stores the records."""

    @property
    def name(self) -> TopicName:
        """Name of the topic."""
        ...

    @property
    def context(self) -> TopicContext:
        """Services that all topics use."""
        ...

    @property
    def ledger(self) -> ManagedLedger:
        """The topic's ledger, whose properties have the topic epoch."""
        ...

    @property
    def sequence_store(self) -> SequenceStore:
        """The store of the producers' sequence ids."""
        ...

    @property
    def sequences(self) -> Deduplication:
        """The last sequence id of each producer."""
        ...

    @property
    def deduplicates(self) -> bool:
        """Whether the policies have every SEND checked against the last sequence id."""
        ...

    @property
    def sealing(self) -> bool:
        """Whether it is being sealed, or is sealed."""
        ...


class StoredProducerRecords:
    """`ProducerRecords` in the ledger of a topic."""

    def __init__(self, topic: RecordingTopic) -> None:
        self._topic_reference = ref(topic)
        epoch = topic.ledger.properties.get(TOPIC_EPOCH_PROPERTY)
        self.epoch = int(epoch) if epoch is not None else None

    @property
    def _topic(self) -> RecordingTopic:
        return require_present(self._topic_reference)

    def has_stored(self, name: str) -> bool:
        """See `ProducerRecords`."""
        known = self._topic.sequences.get(name)
        return known is not None and known.position != NO_POSITION

    def require_current(self, request: ProducerRequest) -> None:
        """See `ProducerRecords`."""
        if request.source is not None:
            self._sources().require_current(request.source)

    async def begin(self, producer: Producer, require_still_open: Callable[[], None]) -> None:
        """See `ProducerRecords`."""
        topic, request = self._topic, producer.request
        if request.source is not None:
            await self._begin_sender(producer, request.source, require_still_open)
            return
        if producer.source_cluster is not None:
            await self._begin_replicator(producer, producer.source_cluster)
            return
        store = topic.sequence_store
        if request.user_provided_name and topic.deduplicates:
            await store.wait_inherited()
            require_still_open()
        producer.sequence = store.sequences.attach(producer.name)
        if self._note_writer(producer):
            # Durable before the first SEND: a later owner could not tell a client that counts from
            # the start again from one that sends again, and would drop new messages.
            await store.save_writer()
        if request.epoch > 0:
            await store.publish_time_of(producer.sequence)
        producer.track(
            producer.sequence,
            enforce=topic.deduplicates,
            resends=request.epoch > 0,
        )

    async def _begin_sender(
        self, producer: Producer, state: SourceState, require_still_open: Callable[[], None]
    ) -> None:
        """Begin a session of the sender of another cluster's segment."""
        store = self._topic.sequence_store
        await store.wait_inherited()
        require_still_open()
        sources = self._sources()
        parts = ReceivedParts(sources, sources.attach(state))
        producer.track_replicated(parts)
        # The session before it had the same name, so nothing of it is on its way any more (R7).
        while (told := sources.stored_of(parts.session)) is None:
            await store.save_writer()
            require_still_open()
        parts.told = told

    def _sources(self) -> SegmentSources:
        sources = self._topic.sequence_store.sources
        if sources is None:
            raise SourceRefused(f"{self._topic.name} is no segment: replicate to a segment.")
        return sources

    async def _begin_replicator(self, producer: Producer, cluster: str) -> None:
        """Recognise what the replicator of a cluster sends again."""
        store, clock = self._topic.sequence_store, self._topic.context.clock
        sequences = store.sequences
        if not producer.connection.features.supports_repl_dedup_by_lid_and_eid:
            producer.track_replicated(
                IdsByOrigin(cluster, sequences, self._deduplicates, clock.now_ms)
            )
            return
        source = sequences.sources.attach(cluster)
        producer.track_replicated(
            IdsByPosition(
                source,
                self._deduplicates,
                lambda: sequences.sources.detach(cluster, clock.now_ms()),
                resends=producer.request.epoch > 0,
            )
        )
        if not source.saved:
            # Before the first SEND, as a replay has to know how to count that.
            await store.save_writer()
            source.saved = True

    def _deduplicates(self) -> bool:
        return self._topic.deduplicates

    def policies_changed(self, producer: Producer) -> None:
        """See `ProducerRecords`."""
        enforce = self._topic.deduplicates
        if producer.replicated is not None or producer.state is not ProducerState.OPEN:
            return
        if (producer.guard is not None) is enforce:
            return
        if producer.sequence.writer is not None:
            # What the client has sent under the name is noted when it leaves and comes back.
            producer.disconnect()
        else:
            producer.track(producer.sequence, enforce=enforce, resends=False)

    def end(self, producer: Producer) -> None:
        """See `ProducerRecords`."""
        if producer.replicated is not None:
            producer.replicated.end()
            return
        topic, name = self._topic, producer.name
        self._note_end(producer)
        sequences = topic.sequences
        if sequences.get(name) is producer.sequence:
            sequences.detach(name, topic.context.clock.now_ms())

    async def save_epoch(self, epoch: int | None) -> None:
        """See `ProducerRecords`."""
        await self._topic.ledger.set_properties({TOPIC_EPOCH_PROPERTY: str(epoch)})

    def _note_writer(self, producer: Producer) -> bool:
        """Note which client has the name from now on; a layout change passes that on.

        Returns whether that has to be durable before the producer may send.
        """
        request, sequence = producer.request, producer.sequence
        is_segment = self._topic.name.domain is TopicDomain.SEGMENT
        if not request.user_provided_name or not (is_segment or is_managed(request.properties)):
            return False
        if not self._topic.deduplicates:
            # What it sends is not compared with them, so they may not be compared later either.
            sequence.carried = ()
        if request.request_id is None:
            sequence.writer = None
            return False
        known = sequence.writer
        if known is None or request.epoch == 0 or not known.is_client(request.request_id):
            known = NameWriter(
                request.request_id, request.connection.client_version, fresh=request.epoch == 0
            )
        elif not known.sent:
            # What it sends first here may not be what it has sent first.
            known.fresh = False
        known.closed_ms = None
        known.at_seal = self._topic.sealing
        sequence.writer = known
        return self._topic.deduplicates

    def _note_end(self, producer: Producer) -> None:
        writer = producer.sequence.writer
        if writer is None:
            return
        if producer.guard is None and producer.messages_in:
            writer.note_sent(None)
        if producer.closed_by_client:
            writer.closed_ms = self._topic.context.clock.now_ms()
        if producer.guard is not None:
            self._topic.sequence_store.writers_changed()
