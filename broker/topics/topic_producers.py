"""The producers of one topic: their names, their access to the topic, and their removal."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol
from weakref import ref

import structlog

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.client_connection import address_of
from broker.topics.context import TopicContext
from broker.topics.producer import (
    Producer,
    ProducerReplaced,
    ProducerRequest,
    ProducerState,
    PublishedTopic,
)
from broker.topics.producer_access import (
    AccessMode,
    Admission,
    ProducerAccess,
    ProducerBusy,
    ProducerFenced,
)
from broker.topics.producer_records import ProducerRecords
from broker.topics.publish_errors import EncryptionRequired, OwnReplicator
from broker.topics.weak_references import require_present
from config.bounds import WAITING_PRODUCERS
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


class AdmittingTopic(PublishedTopic, Protocol):
    """The topic whose producers these are."""

    @property
    def context(self) -> TopicContext:
        """Services that all topics use."""
        ...

    @property
    def policies(self) -> AppliedPolicies:
        """The policies in force."""
        ...

    def require_open(self, request: ProducerRequest) -> None:
        """Raise unless the topic takes this producer."""
        ...


class TopicProducers:
    """Admits the producers of one topic by their access mode and name, and removes them.

    A name belongs to one producer.  A producer that reconnects (with a higher epoch) replaces its
    predecessor.  Another one is refused, unless the connection of the present holder is dead.
    """

    def __init__(self, topic: AdmittingTopic, records: ProducerRecords) -> None:
        """`records` has what outlives a producer."""
        self._topic_reference = ref(topic)
        self._records = records
        self._producers: dict[str, Producer] = {}
        self._access = ProducerAccess(records.epoch)
        self._promotions = BackgroundTasks()
        self._dismissals = BackgroundTasks()
        self._nobody: asyncio.Future[None] | None = None
        self.past_messages_in = 0
        self.past_bytes_in = 0
        self.past_messages_dropped = 0

    @property
    def _topic(self) -> AdmittingTopic:
        return require_present(self._topic_reference)

    @property
    def by_name(self) -> Mapping[str, Producer]:
        """Producers that are attached, wait, or still have something in flight."""
        return self._producers

    @property
    def epoch(self) -> int | None:
        """The topic epoch; None before the first exclusive producer."""
        return self._access.epoch

    def returns(self, request: ProducerRequest) -> bool:
        """Whether a producer reconnects that may have something stored or in flight here.

        It may lack receipts, so it is admitted even while the topic is sealed.
        """
        name = request.name
        # The sender of another cluster's segment learns from the children what is stored (R4).
        if request.epoch == 0 or not name or request.source is not None:
            return False
        return name in self._producers or self._records.has_stored(name)

    async def add(self, request: ProducerRequest) -> Producer:
        """Admit a producer: it is OPEN then, or WAITING with `ready` to wait for.

        Raises `ProducerBusy`, `ProducerFenced`, `StaleSender`, and as `require_open`.
        """
        self._records.require_current(request)
        name = request.name or self._topic.context.producer_names.next()
        now_ms = self._topic.context.clock.now_ms()
        now_s = asyncio.get_running_loop().time()
        producer = Producer(self._topic, name, request, now_ms, now_s)
        try:
            await self._take_name(producer)
            self._require_below_maximum(producer)
            await self._admit(producer)
        except BaseException:
            producer.close_at_once()
            raise
        return producer

    def remove(self, producer: Producer) -> None:
        """Remove a producer that is closed and has nothing in flight."""
        name = producer.name
        if self._producers.get(name) is not producer:
            return
        del self._producers[name]
        self.past_messages_in += producer.messages_in
        self.past_bytes_in += producer.bytes_in
        self.past_messages_dropped += producer.messages_dropped
        self._records.end(producer)
        self._access.leave(name)
        self._promote_next()
        if not self._producers and self._nobody is not None and not self._nobody.done():
            self._nobody.set_result(None)

    async def wait_gone(self, timeout_s: float) -> bool:
        """Wait until all producers left; returns whether they did within the time."""
        if self._producers:
            self._nobody = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._nobody,), timeout=timeout_s)
        return not self._producers

    def note_seal(self) -> None:
        """Note which producers are attached when the segment begins to be sealed."""
        for producer in self._producers.values():
            if producer.sequence.writer is not None:
                producer.sequence.writer.at_seal = True

    def refuse_waiting(self, error: MagnetarError) -> None:
        """Refuse all producers that wait to be exclusive, with `error`."""
        for name in self._access.clear_queue():
            self._fail_waiting(self._producers[name], error)

    async def disconnect_all(self) -> None:
        """Close all producers, after the receipts of earlier SENDs."""
        self._promotions.cancel()
        await self._dismiss(list(self._producers.values()))

    async def _dismiss(self, producers: Sequence[Producer]) -> None:
        """Dismiss producers, to the end: one that takes nothing more has to be closed."""
        await self._dismissals.finish(_dismiss(producers))

    # Names

    async def _take_name(self, producer: Producer) -> None:
        while (holder := self._producers.get(producer.name)) is not None:
            await self._displace(holder, producer)
            self._require_still_open(producer)
        self._producers[producer.name] = producer

    async def _displace(self, holder: Producer, producer: Producer) -> None:
        """Return when `holder` is closed, or has nothing in flight.  Raises `ProducerBusy`."""
        if holder.state is ProducerState.CLOSED:
            # Messages must be stored in the order in which both producers sent them.
            await holder.idle()
        elif producer.replaces(holder):
            holder.close_at_once()
        elif producer.succeeds(holder):
            holder.disconnect()
        elif holder.connection is producer.connection or await holder.connection.is_alive():
            raise ProducerBusy(
                f"A producer named {producer.name!r} is connected to {self._topic.name}: close "
                "it first, or use another name."
            )
        else:
            holder.connection.abort("another producer took over and this peer is silent")
            holder.close_at_once()

    def _require_still_open(self, producer: Producer) -> None:
        """Raise unless the topic takes the producer, and it was not closed while it waited."""
        self._topic.require_open(producer.request)
        if producer.state is ProducerState.CLOSED:
            raise ProducerReplaced(
                f"Producer {producer.name!r} was closed while it was being opened: open it again."
            )

    def policies_changed(self) -> None:
        """Close the producers that do not encrypt, if that is required now.

        Sequence ids of the others are compared, or no longer.
        """
        for producer in list(self._producers.values()):
            self._records.policies_changed(producer)
        if self._topic.policies.requires_encryption:
            for producer in list(self._producers.values()):
                if not _may_be_encrypted(producer.request):
                    producer.disconnect()

    def require_allowed(self, request: ProducerRequest) -> None:
        """Raise for a producer that the topic never takes.

        `EncryptionRequired` for one that does not encrypt, where it must; `OwnReplicator`.
        """
        own = self._topic.context.settings.cluster_name
        if request.source_cluster == own:
            raise OwnReplicator(
                f"The replicator {request.name!r:.100} has come back to its own cluster {own!r}: "
                "correct the URLs of the cluster to which it sends (pulsar-admin clusters update)."
            )
        if self._topic.policies.requires_encryption and not _may_be_encrypted(request):
            raise EncryptionRequired(
                f"{self._topic.name} takes encrypted messages only, by the policy "
                "encryptionRequired of its namespace: give the producer an encryption key."
            )

    def _require_below_maximum(self, producer: Producer) -> None:
        """Raise `ProducerBusy` if there are as many others as the policies and settings allow.

        As in Apache Pulsar, replicators neither count nor are refused.
        """
        if producer.source_cluster is not None:
            return
        most = self._topic.policies.max_producers
        of_address = self._topic.context.settings.max_same_address_producers_per_topic
        if not most and not of_address:
            return
        others = [
            each
            for each in self._producers.values()
            if each is not producer
            and each.state is not ProducerState.CLOSED
            and each.source_cluster is None
        ]
        if most and len(others) >= most:
            raise ProducerBusy(
                f"{self._topic.name} has {len(others)} producers, and the maximum is {most}: close "
                "one, or raise maxProducersPerTopic."
            )
        address = address_of(producer.connection.remote)
        from_there = sum(address_of(each.connection.remote) == address for each in others)
        if of_address and from_there >= of_address:
            raise ProducerBusy(
                f"{self._topic.name} has {from_there} producers from {address}, and the maximum is "
                f"{of_address}: close one, or raise max_same_address_producers_per_topic."
            )

    # Access

    async def _admit(self, producer: Producer) -> None:
        mode = producer.request.access_mode
        if mode is not AccessMode.SHARED:
            await self._wait_until_drained()
            self._require_still_open(producer)
        if mode is AccessMode.WAIT_FOR_EXCLUSIVE and len(self._access.waiting) >= WAITING_PRODUCERS:
            raise ProducerBusy(
                f"{WAITING_PRODUCERS} producers wait for {self._topic.name}: try again later."
            )
        admission = self._access.admit(producer.name, mode, producer.request.topic_epoch)
        if admission is Admission.QUEUED:
            producer.move(ProducerState.WAITING)
            producer.ready = asyncio.get_running_loop().create_future()
            return
        if admission is Admission.ADMITTED_ALONE:
            await self._fence_others(producer)
        await self._open(producer)

    async def _wait_until_drained(self) -> None:
        """Wait until closed producers have nothing in flight."""
        for other in list(self._producers.values()):
            if other.state is ProducerState.CLOSED:
                await other.idle()

    async def _fence_others(self, producer: Producer) -> None:
        self.refuse_waiting(
            ProducerFenced(
                f"Producer {producer.name!r} took {self._topic.name} by fencing: open a new "
                "producer to compete again."
            )
        )
        await self._dismiss([other for other in self._producers.values() if other is not producer])

    async def _open(self, producer: Producer) -> None:
        """Open an admitted producer, and count its sequence ids from now on."""
        require_still_open = partial(self._require_still_open, producer)
        await self._records.begin(producer, require_still_open)
        if producer.request.access_mode is not AccessMode.SHARED:
            # The topic epoch is durable before an exclusive producer is open.
            producer.topic_epoch = self._access.epoch
            await self._records.save_epoch(producer.topic_epoch)
        require_still_open()
        producer.move(ProducerState.OPEN)

    def _promote_next(self) -> None:
        name = self._access.promote()
        if name is None:
            return
        self._promotions.start(self._promote(self._producers[name]))

    async def _promote(self, producer: Producer) -> None:
        try:
            if self._access.promote() != producer.name:
                return
            producer.move(ProducerState.OPENING)
            self._access.take(producer.name)
            await self._open(producer)
        except MagnetarError as error:
            self._fail_waiting(producer, error)
            return
        if producer.ready is not None and not producer.ready.done():
            producer.ready.set_result(None)

    def _fail_waiting(self, producer: Producer, error: MagnetarError) -> None:
        log.debug("waiting_producer_refused", producer=producer.name, error=str(error))
        if producer.ready is not None and not producer.ready.done():
            producer.ready.set_exception(error)
            producer.ready.exception()
        producer.close_at_once()


async def _dismiss(producers: Sequence[Producer]) -> None:
    """Take nothing more from them, answer what is in flight, then send CLOSE_PRODUCER.

    What waits for a publish rate is dropped: it could keep the caller for any time.
    """
    for producer in producers:
        producer.drop_waiting()
    for producer in producers:
        await producer.idle()
        producer.disconnect()


def _may_be_encrypted(request: ProducerRequest) -> bool:
    """Whether a producer encrypts, or is a replicator, which sends messages as they are."""
    return request.encrypted or request.source_cluster is not None
