"""One topic: producers and subscriptions over one managed ledger."""

import asyncio
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import ClassVar, Final, Protocol

import structlog

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.backlog_gauge import BacklogGauge
from broker.topics.carried_ids import FinalSequences
from broker.topics.compaction.outcome import CompactionHistory
from broker.topics.compaction.reading import ReadStart
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.completeness import INCOMPLETE, Completeness
from broker.topics.consumer import Consumer, SubscribeRequest
from broker.topics.consumer_admission import require_rate
from broker.topics.context import TopicContext
from broker.topics.deduplication import Deduplication
from broker.topics.dispatch.errors import ConsumerBusy, SubscriptionRefused
from broker.topics.dispatch.last_message import LastMessage
from broker.topics.dispatch.start_position import Inherits, start_position
from broker.topics.producer import Producer, ProducerRequest
from broker.topics.producer_records import StoredProducerRecords
from broker.topics.publish_throttle import Publishing, PublishRates
from broker.topics.publishing import PublishPipeline
from broker.topics.rates import RateSampler, sample_topic, topic_traffic
from broker.topics.replication import NoReplication, TopicReplication, is_replicator_cursor
from broker.topics.sequence_store import SequenceStore
from broker.topics.subscribe_limit import SubscribeLimit
from broker.topics.subscription import Subscription
from broker.topics.throttle import Level, RateLimit, changed_limit, in_force
from broker.topics.topic_producers import TopicProducers
from broker.topics.transactional_acks import forget_subscription
from broker.topics.unstamped_batches import UNSTAMPED_PROPERTY
from config.bounds import CURSORS_AT_ONCE, SEAL_WAIT_S
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.frames import FrameError
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata, transaction_named_by
from magnetar.protocol.names import SegmentName, TopicDomain, TopicName
from magnetar.protocol.pulsar_pb2 import CommandSubscribe
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from magnetar.protocol.state_table import StateTable
from magnetar.protocol.txn_id import TxnId
from storage.callbacks import SlicedCalls, ignore
from storage.ledger.store import LedgerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import CursorNotFound, Entry, ManagedLedgerState
from storage.metadata.store import MetadataError
from txn.buffer import SegmentBuffer
from txn.records import TxnState
from txn.segment_owner import SegmentOwner

log = structlog.get_logger(__name__)


class TopicNotFound(PeerError):
    """The topic does not exist and may not be created."""

    code: ClassVar[ServerError] = ServerError.TOPIC_NOT_FOUND


class TopicTerminated(PeerError):
    """The topic is sealed: read the layout again and write to its successors."""

    code: ClassVar[ServerError] = ServerError.TOPIC_TERMINATED_ERROR


class TopicUnavailable(PeerError):
    """The topic is being closed or loaded: try again at once."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


LIST_SUBSCRIPTIONS: Final = "see which there are with GET .../subscriptions."
"""What to do next when a topic lacks a subscription."""


class SubscriptionNotFound(PeerError):
    """The topic has no such subscription and it may not be created."""

    code: ClassVar[ServerError] = ServerError.SUBSCRIPTION_NOT_FOUND


class TopicState(enum.Enum):
    """State of a topic; `_MOVES` has the moves between them."""

    LOADING = "loading"
    OPEN = "open"
    SEALING = "sealing"
    """New producers are refused; attached ones finish."""
    SEALED = "sealed"
    """The ledger is terminated, for ever."""
    CLOSING = "closing"
    """New requests are refused."""
    CLOSED = "closed"


_S = TopicState
_MOVES: StateTable[TopicState] = StateTable(
    {
        _S.LOADING: frozenset({_S.OPEN, _S.SEALED, _S.CLOSING}),
        _S.OPEN: frozenset({_S.SEALING, _S.CLOSING}),
        _S.SEALING: frozenset({_S.SEALED, _S.CLOSING}),
        _S.SEALED: frozenset({_S.CLOSING}),
        _S.CLOSING: frozenset({_S.CLOSED}),
        _S.CLOSED: frozenset(),
    },
    defect=RuntimeError,
)
_READABLE = (_S.OPEN, _S.SEALING, _S.SEALED)


class TopicEvents(Protocol):
    """Receives events of all topics.  Calls run on the event loop, return at once and never raise.

    Receivers ignore events of topics that are no segments.
    """

    def consumer_attached(self, topic: "Topic", subscription: str, consumer: Consumer) -> None:
        """A consumer was added to a subscription."""
        ...

    def consumer_closed(
        self, topic: "Topic", subscription: str, consumer: Consumer, *, by_command: bool
    ) -> None:
        """A consumer left: by CLOSE_CONSUMER (`by_command`) or with its connection."""
        ...

    def subscription_drained(self, topic: "Topic", subscription: str) -> None:
        """The topic is sealed and the subscription's backlog has become 0."""
        ...

    def subscription_rewound(self, topic: "Topic", subscription: str) -> None:
        """A seek: a drained subscription need not be drained any longer."""
        ...

    def unstamped_batch_found(self, topic: "Topic") -> None:
        """The topic has batches without entry hashes now: no consumers should share it."""
        ...

    def topic_unloaded(self, topic: "Topic") -> None:
        """The topic is not loaded here any more; another broker may load it."""
        ...


class _SubscriptionCalls:
    """Calls of all subscriptions of a topic: of few at once, of many in slices."""

    __slots__ = ("apply_policies", "read_on", "topic_sealed")

    def __init__(self) -> None:
        self.read_on = SlicedCalls[str, Subscription](Subscription.read_on)
        self.apply_policies = SlicedCalls[str, Subscription](Subscription.apply_policies)
        self.topic_sealed = SlicedCalls[str, Subscription](Subscription.topic_sealed)

    def discard(self, name: str) -> None:
        """Do not call this subscription: it is deleted."""
        for calls in (self.read_on, self.apply_policies, self.topic_sealed):
            calls.discard(name)

    def clear(self) -> None:
        """Call none any more: the topic is closed."""
        for calls in (self.read_on, self.apply_policies, self.topic_sealed):
            calls.clear()


class Topic:
    """One loaded topic: producers and subscriptions over a managed ledger.

    Made by `TopicRegistry`, used by handlers and scalable topics.  When its ledger failed, so that
    its end is not known, or when its ownership is lost, the topic is given up: it closes, and the
    next request loads it anew.
    """

    def __init__(
        self,
        context: TopicContext,
        name: TopicName,
        ledger: ManagedLedger,
        store: SequenceStore,
        buffer: SegmentBuffer,
        events: TopicEvents,
        give_up: "Callable[[Topic], None]",
    ) -> None:
        """Take an open ledger, its loaded sequence ids and transactions.

        `give_up` is called when the ledger or its ownership is lost: the topic is to be closed.
        """
        self.context = context
        self.name = name
        self.ledger = ledger
        self.state = TopicState.LOADING
        self.uses = self.client_changes = 0
        """Requests for the topic, and changes of its clients and subscriptions, since the load."""
        self.consumer_count = 0
        """Attached consumers, those of readers included."""
        self.sequence_store = store
        self.buffer = buffer
        self.owner = buffer.owner
        self.policies = context.policies(name)
        self.last_message, self.backlog = LastMessage(self), BacklogGauge(self)
        self.compaction = CompactionHistory()
        self._events, self._give_up = events, give_up
        self._producers = TopicProducers(self, StoredProducerRecords(self))
        self._publishing = PublishPipeline(
            ledger, context.publish_limits, store, buffer, self._ledger_failed
        )
        # Other topics may have got any batches before they became segments.
        is_segment = name.domain is TopicDomain.SEGMENT
        self.shareable = is_segment and UNSTAMPED_PROPERTY not in ledger.properties
        """Whether consumers may share it by entry buckets: no batch is known to lack its hashes."""
        if self.shareable:
            self._publishing.on_unstamped_batch = self.note_unstamped_batch
        self._subscriptions: dict[str, Subscription] = {}
        self._replicator_cursors: dict[str, Subscription] = {}
        self.replication: TopicReplication = NoReplication()
        self._calls = _SubscriptionCalls()
        self.entries_read_total = 0
        """Entries sent to bulk readers, which are no consumers, since the topic was loaded."""
        self.bytes_read_total = 0
        self._past_messages_out = self._past_bytes_out = 0
        self.rate_sampler = RateSampler(asyncio.get_running_loop().time(), len(self.traffic))
        """Samples `traffic`: see `broker.topics.rate_timer`."""
        self._subscription_change = asyncio.Lock()
        self._work = BackgroundTasks(
            log, failure_event="background_work_failed", expected=(MagnetarError,)
        )
        self._sealing: asyncio.Task[Position] | None = None
        self._failure: MagnetarError | None = None
        self._forget_appends = ledger.on_append(store.appended)
        self._forget_read_listener = buffer.on_max_read_position(self._on_max_read_position_moved)
        ledger.on_stop(self._ledger_failed)
        self._begin_rates()

    def _begin_rates(self) -> None:
        """Make the rates of the topic, without limits as yet."""
        self._dispatch_limit: RateLimit | None = None
        self._subscribe_limit = SubscribeLimit()
        self.publish_rates = PublishRates(
            self._publishing,
            self.context.throttled_sends,
            self.context.publish_limit,
            self._publish_by,
        )

    def _publish_by(self, path: Publishing) -> None:
        """Serve all SENDs by this path from now on."""
        self.publish = path.publish
        self.refuse = path.refuse
        self.damaged = path.damaged

    @classmethod
    async def load(
        cls,
        context: TopicContext,
        name: TopicName,
        ledger: ManagedLedger,
        *,
        store: SequenceStore,
        owner: SegmentOwner,
        events: TopicEvents,
        give_up: "Callable[[Topic], None]",
        buffer_class: type[SegmentBuffer] = SegmentBuffer,
        replicate: "Callable[[Topic], TopicReplication]" = NoReplication.of,
    ) -> "Topic":
        """Load the topic of a ledger that was just opened; `opened` lets it serve.

        After a failure the ledger is still open: the caller closes it.
        """
        await store.load(ledger)
        async with AsyncExitStack() as on_failure:
            # W7, A3: claims, headers and the aborted set before acknowledgements.
            buffer = await buffer_class.load(str(name), ledger, owner, context.transactions)
            on_failure.push_async_callback(buffer.close)
            topic = cls(context, name, ledger, store, buffer, events, give_up)
            topic.replication = replicate(topic)
            on_failure.push_async_callback(topic._abandon)
            await topic.load_subscriptions()
            topic.apply_policies(topic.policies)
            await topic.replication.open()
            on_failure.pop_all()
        return topic

    async def load_subscriptions(self) -> None:
        """Make a subscription of each cursor of the ledger."""
        for number, (name, cursor) in enumerate(list(self.ledger.cursors.items()), start=1):
            subscription = Subscription(self, name, cursor)
            if is_replicator_cursor(name):
                self._replicator_cursors[name] = subscription
                continue
            self._subscriptions[name] = subscription
            # A3: acknowledgements of open transactions, before consumers attach.
            await subscription.load_transactions()
            if number % CURSORS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _abandon(self) -> None:
        """Close the subscriptions after a failed load; the caller closes ledger and buffer."""
        self._forget_appends()
        self._forget_read_listener()
        self._calls.clear()
        self._end_rates()
        await self.replication.close()
        for subscription in self.followers:
            await subscription.close(persist=False)

    def opened(self) -> None:
        """Begin to serve: the topic is loaded."""
        if self.ledger.state is ManagedLedgerState.TERMINATED:
            self._move(TopicState.SEALED)
            self._calls.topic_sealed.call_all(self._subscriptions)
            self.replication.topic_sealed()
        else:
            self._move(TopicState.OPEN)
        failure = self._failure or self.owner.lost
        if failure is not None:
            # It came during the load, when the topic could not be given up yet.
            self._ledger_failed(failure)

    # Queries

    @property
    def sealed(self) -> bool:
        """True once the ledger is terminated: nothing will ever be appended."""
        return self.state is TopicState.SEALED

    @property
    def sealing(self) -> bool:
        """Whether it is being sealed, or is sealed: new producers are refused."""
        return self.state in (TopicState.SEALING, TopicState.SEALED)

    @property
    def closing(self) -> bool:
        """Whether this instance serves no more: the next request loads a new one."""
        return self.state in (TopicState.CLOSING, TopicState.CLOSED)

    @property
    def idle(self) -> bool:
        """Whether no client is attached and no work is in progress."""
        return (
            self.state in (TopicState.OPEN, TopicState.SEALED)
            and self.ledger.state in (ManagedLedgerState.OPEN, ManagedLedgerState.TERMINATED)
            and not self.producers
            and not self._publishing.in_flight
            and not self._work.busy
            and not self.compaction.running
            and self.buffer.idle
            and not self._subscription_change.locked()
            and (self._sealing is None or self._sealing.done())
            and self.replication.idle
            and all(subscription.idle for subscription in self.followers)
        )

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """Subscriptions by name, durable or not."""
        return self._subscriptions

    @property
    def replicator_cursors(self) -> Mapping[str, Subscription]:
        """The cursors of replicators to other clusters, by name."""
        return self._replicator_cursors

    @property
    def followers(self) -> list[Subscription]:
        """All that have a position in the topic: its subscriptions, and replicators."""
        return [*self._subscriptions.values(), *self._replicator_cursors.values()]

    @property
    def producers(self) -> Mapping[str, Producer]:
        """Producers by name: attached, waiting, or with something still in flight."""
        return self._producers.by_name

    @property
    def epoch(self) -> int | None:
        """Number of the last exclusive admission of a producer; None before the first."""
        return self._producers.epoch

    @property
    def sequences(self) -> Deduplication:
        """The last sequence id of each producer."""
        return self.sequence_store.sequences

    @property
    def deduplicates(self) -> bool:
        """Whether the policies have every SEND checked against the last sequence id."""
        return self.policies.deduplicates

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """The counters of which rates are taken, in the order of `Traffic`."""
        return topic_traffic(self._producers, self._subscriptions, self.past_out)

    def sample_rates(self, now_s: float) -> Iterator[None]:
        """Read the counters of the topic, its subscriptions and its clients, one in each step."""
        self.replication.sample_rates(now_s)
        return sample_topic(
            self.rate_sampler, now_s, self._producers, self._subscriptions, self.past_out
        )

    @property
    def messages_in_total(self) -> int:
        """Messages published since the topic was loaded."""
        now = sum(producer.messages_in for producer in self.producers.values())
        return self._producers.past_messages_in + now

    @property
    def bytes_in_total(self) -> int:
        """Bytes of entries published since the topic was loaded."""
        now = sum(producer.bytes_in for producer in self.producers.values())
        return self._producers.past_bytes_in + now

    @property
    def past_out(self) -> tuple[int, int]:
        """Messages, and bytes of entries, that were sent to consumers of deleted subscriptions."""
        return self._past_messages_out, self._past_bytes_out

    def apply_policies(self, policies: AppliedPolicies) -> None:
        """Use these policies from now on.  Attached clients stay, also above a maximum.

        Only producers that do not encrypt are closed where that is required.
        """
        self.policies = policies
        self._publishing.require_encryption(policies.requires_encryption)
        self._producers.policies_changed()
        self._publishing.limit_messages(policies.max_message_bytes)
        self._publishing.limit_delays(
            policies.max_delivery_delay_ms if policies.delays_delivery else 0
        )
        self.publish_rates.apply(policies.publish_rate)
        self._subscribe_limit.apply(policies.subscribe_rate)
        self._dispatch_limit = changed_limit(
            self._dispatch_limit, policies.dispatch_rate, Level.TOPIC, self.published_rates
        )
        self._calls.apply_policies.call_all(self._subscriptions)
        self.replication.apply()
        # Retention may keep less now, for which no timer is set.
        self.ledger.trim_soon()

    @property
    def dispatch_limits(self) -> tuple[RateLimit, ...]:
        """The rates of sending to consumers of all subscriptions together."""
        return in_force(self._dispatch_limit, self.context.dispatch_limit)

    def published_rates(self, now_s: float) -> tuple[float, float]:
        """Messages and bytes per second that are published; `now_s` is the event loop's time."""
        # Without the counters of what was sent: there may be 10,000 subscriptions.
        counts = self.messages_in_total, self.bytes_in_total, 0, 0
        messages, size_bytes, _, _ = self.rate_sampler.rates(now_s, counts)
        return messages, size_bytes

    def _end_rates(self) -> None:
        self.publish_rates.close()
        if self._dispatch_limit is not None:
            self._dispatch_limit.close()

    async def carry_out_end(
        self, txn: TxnId, end: TxnState, subscriptions: Iterable[str] = ()
    ) -> None:
        """Carry out the end of a transaction; returns when readers and subscriptions see it.

        It is in the header already.  `subscriptions` have acknowledgements of the transaction.
        """
        # Acknowledgements first: what the transaction wrote is often derived from what it read.
        for name in subscriptions:
            subscription = self._subscriptions.get(name)
            if subscription is not None and subscription.transactional is not None:
                await subscription.transactional.pending.carry_out_end(txn, end)
        await self.buffer.carry_out_end(txn, end)

    def max_read_position(self) -> Position:
        """The last position that consumers may read: the max read position of transactions."""
        return self.buffer.max_read_position

    def is_aborted(self, entry: Entry) -> bool:
        """Whether an entry at or before the max read position is never to be delivered."""
        if not self.buffer.anything_aborted:
            return False
        try:
            named = transaction_named_by(parse_metadata(entry.data))
        except FrameError:
            return False
        return named is not None and self.buffer.is_aborted(TxnId(*named))

    def _on_max_read_position_moved(self) -> None:
        self._calls.read_on.call_all(self._subscriptions)

    def require_open(self, request: ProducerRequest) -> None:
        """Raise unless the topic takes this producer.

        `TopicTerminated`, `TopicUnavailable`, `EncryptionRequired`, `OwnReplicator`.
        """
        if self.sealing:
            # It gets the receipts of its stored messages, and TopicTerminated for the first other.
            if self._producers.returns(request):
                return
            raise TopicTerminated(
                f"{self.name} is sealed: look its topic up again and write to the successors."
            )
        if self.state is not TopicState.OPEN:
            raise self._unavailable()
        self._producers.require_allowed(request)

    def require_readable(self) -> None:
        """Raise `TopicUnavailable` unless the stored entries may be read."""
        if self.state not in _READABLE:
            raise self._unavailable()

    # Producers

    async def add_producer(self, request: ProducerRequest) -> Producer:
        """Attach a producer by its access mode; one that waits for others has `ready` set.

        Raises `ProducerBusy`, `ProducerFenced`, `TopicTerminated`, `TopicUnavailable`.
        """
        self.require_open(request)
        self.client_changes += 1
        return await self._producers.add(request)

    async def require_room(self) -> None:
        """Raise `BacklogQuotaExceeded` if the backlog reaches a quota that refuses producers.

        A topic that is sealed takes no new messages, so that it has no need to refuse producers.
        """
        if not self.sealing:
            await self.backlog.require_room()

    async def close_producers(self) -> None:
        """Close all producers, after the receipts of earlier SENDs; clients open them anew."""
        await self._producers.disconnect_all()

    def producer_gone(self, producer: Producer) -> None:
        """Remove a closed producer that has nothing in flight any more."""
        self.client_changes += 1
        self._producers.remove(producer)

    # Subscriptions

    async def subscribe(self, request: SubscribeRequest) -> Consumer:
        """Attach a consumer, and create its subscription if need be.

        Raises `SubscriptionNotFound`, `SubscriptionRefused`, `TopicUnavailable`, and as
        `Subscription.add_consumer`.
        """
        self.require_readable()
        if request.type.label not in self.policies.subscription_types:
            raise SubscriptionRefused(
                f"{request.type.label} subscriptions are not enabled on {self.name}: use one of "
                f"{', '.join(sorted(self.policies.subscription_types))}."
            )
        require_rate(self._subscribe_limit, self.name, request)
        subscription = self._subscriptions.get(request.subscription)
        if subscription is None:
            creation = self._subscription_for(request)
            # A reader's subscription ends with its consumer: without one nobody would end it.
            subscription = await (self._work.finish(creation) if request.durable else creation)
        if subscription.durable is not request.durable:
            kind = "durable" if subscription.durable else "not durable"
            raise SubscriptionRefused(
                f"Subscription {request.subscription!r} exists on {self.name} and is {kind}: "
                "use another name."
            )
        if request.replicated:
            # One that is deleted meanwhile takes no consumer either, and says so.
            with suppress(CursorNotFound):
                await self.set_replicated(subscription, replicated=True)
        return await subscription.add_consumer(request)

    async def set_replicated(self, subscription: Subscription, *, replicated: bool) -> None:
        """Move a subscription in other clusters too from now on, or no longer.

        Raises as `Cursor.set_replicated`.
        """
        cursor = subscription.cursor
        if cursor.replicated is not replicated:
            is_at_start = cursor.backlog == self.ledger.entry_count
            note = self._note_of(INCOMPLETE, is_at_start=is_at_start) if replicated else ""
            await cursor.set_replicated(replicated, note)
            self.replication.subscriptions_changed()

    def _note_of(self, completeness: Completeness, *, is_at_start: bool) -> str:
        """What the cursor of a subscription notes that is to be replicated from now on."""
        if self.name.domain is not TopicDomain.SEGMENT:
            return ""
        from_start = is_at_start and not self.ledger.has_lost(EARLIEST)
        sources = self.sequence_store.sources
        received = {} if sources is None else sources.last_received()
        return completeness.begun(received, from_start=from_start).note

    def append_marker(self, entry: bytes) -> None:
        """Store an entry that brokers write for brokers, without a word about what becomes of it.

        Raises as `ManagedLedger.append`, such as for a topic that has ended.
        """
        self.ledger.append_all((entry,), ignore)

    async def start_of(self, request: CommandSubscribe, inherits: Inherits) -> Position:
        """The start of the subscription, if this SUBSCRIBE creates it.  See `start_position`."""
        return await start_position(self, request, inherits)

    async def create_initial_subscription(self, name: str) -> None:
        """Create the subscription that a PRODUCER names, unless nothing new will be stored.

        Raises `SubscriptionRefused`, `ReservedSubscription`.
        """
        require_of_clients(name)
        if not name.strip():
            raise SubscriptionRefused(
                "PRODUCER came with an initial subscription of blanks: give it a name, or none."
            )
        if self.state is not TopicState.OPEN:
            return
        if name not in self.subscriptions and not self.policies.creates_subscriptions:
            raise SubscriptionRefused(
                f"{self.name} has no subscription {name!r}, and policies forbid to create it "
                "automatically: create it first, or allow autoSubscriptionCreation."
            )
        await self.create_subscription(name, EARLIEST)

    async def create_subscription(
        self,
        name: str,
        start: Position,
        *,
        properties: Mapping[str, str] | None = None,
        replicated: bool = False,
        completeness: Completeness = INCOMPLETE,
    ) -> Subscription:
        """Return the durable subscription `name`; it is created at `start` if it is missing.

        A new one has these properties, and the note whether users want it replicated, with what is
        known of its completeness.
        """
        creation = self._create_subscription(
            name, start, properties or {}, replicated=replicated, completeness=completeness
        )
        return (await self._work.finish(creation))[0]

    async def create_missing_subscription(
        self, name: str, start: Position, *, properties: Mapping[str, str], replicated: bool
    ) -> Subscription | None:
        """The same, but None if there is one of that name."""
        creation = self._create_subscription(name, start, properties, replicated=replicated)
        subscription, is_new = await self._work.finish(creation)
        return subscription if is_new else None

    async def open_replicator_cursor(self, name: str, start: Position) -> Subscription:
        """Return the cursor of a replicator; it is made at `start` if it is missing.

        It has `Cursor.began`.  Raises `MetadataError`, `TopicUnavailable`.
        """
        return await self._work.finish(self._open_replicator_cursor(name, start))

    async def _open_replicator_cursor(self, name: str, start: Position) -> Subscription:
        async with self._subscription_change:
            if self.closing:
                raise self._unavailable()
            if name not in self._replicator_cursors:
                cursor = await self.ledger.open_cursor(name, start, begins=True)
                self._replicator_cursors[name] = Subscription(self, name, cursor)
            found = self._replicator_cursors[name]
            # Of one that Apache Pulsar or an earlier version made nobody knows what it has sent.
            found.cursor.begin_here()
            return found

    async def delete_replicator_cursor(self, name: str) -> None:
        """Delete the cursor of a replicator: what is stored is not kept for it any more.

        Raises `MetadataError`, and `TopicUnavailable` if the topic is closing: its next owner
        deletes what is left.
        """
        await self._work.finish(self._delete_replicator_cursor(name))

    async def _delete_replicator_cursor(self, name: str) -> None:
        async with self._subscription_change:
            cursor = self._replicator_cursors.get(name)
            if cursor is None:
                return
            if self.closing:
                raise self._unavailable()
            await self.ledger.delete_cursor(name)
            del self._replicator_cursors[name]
            await cursor.close(persist=False)

    async def unsubscribe(self, name: str, *, force: bool) -> None:
        """Delete a subscription and its cursor.

        Raises `ConsumerBusy` while it has consumers unless `force`, `SubscriptionNotFound`.
        """
        await self._work.finish(self._unsubscribe(name, force=force))

    async def unsubscribe_if(self, subscription: Subscription, still: Callable[[], bool]) -> bool:
        """Delete a subscription if `still()` is true in the turn of the loop in which it closes.

        Returns whether it was deleted.
        """
        return await self._work.finish(self._unsubscribe_if(subscription, still))

    async def _unsubscribe_if(self, subscription: Subscription, still: Callable[[], bool]) -> bool:
        async with self._subscription_change:
            known = self._subscriptions.get(subscription.name) is subscription
            if not known or self.state not in _READABLE or not still():
                return False
            await self._delete_subscription(subscription)
            return True

    async def _create_subscription(
        self,
        name: str,
        start: Position,
        properties: Mapping[str, str],
        *,
        replicated: bool,
        completeness: Completeness = INCOMPLETE,
    ) -> tuple[Subscription, bool]:
        """The durable subscription of a name, and whether it is new."""
        async with self._subscription_change:
            self.require_readable()
            existing = self._subscriptions.get(name)
            if existing is not None and existing.durable:
                return existing, False
            made = await self._make_durable(
                name, start, properties, replicated=replicated, completeness=completeness
            )
            return made, True

    async def _unsubscribe(self, name: str, *, force: bool) -> None:
        async with self._subscription_change:
            subscription = self._subscriptions.get(name)
            if subscription is None:
                raise SubscriptionNotFound(
                    f"{self.name} has no subscription {name!r}: {LIST_SUBSCRIPTIONS}"
                )
            if subscription.consumers and not force:
                raise ConsumerBusy(
                    f"Subscription {name!r} on {self.name} has consumers: close them, or force."
                )
            await self._delete_subscription(subscription)

    async def _delete_subscription(self, subscription: Subscription) -> None:
        """Close a subscription and delete its cursor; the caller has the lock."""
        name = subscription.name
        self.client_changes += 1
        del self._subscriptions[name]
        self._calls.discard(name)
        await subscription.close(persist=False)
        self._past_messages_out += subscription.messages_out_total
        self._past_bytes_out += subscription.bytes_out_total
        try:
            await self.ledger.delete_cursor(name)
        except (MetadataError, LedgerError):
            await self._restore(Subscription(self, name, subscription.cursor))
            raise
        if subscription.cursor.replicated:
            self.replication.subscriptions_changed()
        if subscription.durable:
            await self._forget_transactions_of(name)

    async def _restore(self, subscription: Subscription) -> None:
        """Keep a subscription whose deletion failed."""
        try:
            await subscription.load_transactions()
        except MagnetarError as error:
            self._ledger_failed(error)
        else:
            self._keep(subscription)

    async def _forget_transactions_of(self, name: str) -> None:
        try:
            await forget_subscription(self, name)
        except MagnetarError as error:
            log.warning("acknowledgement_records_left", topic=str(self.name), error=str(error))

    async def _subscription_for(self, request: SubscribeRequest) -> Subscription:
        name = request.subscription
        async with self._subscription_change:
            self.require_readable()
            existing = self._subscriptions.get(name)
            if existing is not None:
                return existing
            if not request.durable:
                self._require_below_maximum()
                reader = self.ledger.open_reader_cursor(name, request.start)
                subscription = Subscription(self, name, reader)
                subscription.read_start = ReadStart.after(request.start, reader)
                return self._keep(subscription)
            if not (request.create and self.policies.creates_subscriptions):
                raise SubscriptionNotFound(
                    f"{self.name} has no subscription {name!r}: create it first."
                )
            return await self._make_durable(
                name, request.start, request.properties, replicated=request.replicated
            )

    async def _make_durable(
        self,
        name: str,
        start: Position,
        properties: Mapping[str, str],
        *,
        replicated: bool,
        completeness: Completeness = INCOMPLETE,
    ) -> Subscription:
        if name != COMPACTION_CURSOR:
            self._require_below_maximum()
        # Records of an earlier subscription of that name may be left.
        await forget_subscription(self, name)
        is_at_start = start == EARLIEST or not self.ledger.entry_count
        note = self._note_of(completeness, is_at_start=is_at_start) if replicated else ""
        cursor = await self.ledger.open_cursor(
            name, start, properties=properties, replicated=replicated, replication_note=note
        )
        subscription = Subscription(self, name, cursor)
        subscription.read_start = ReadStart.after(start, cursor)
        await subscription.load_transactions()
        return self._keep(subscription)

    def _require_below_maximum(self) -> None:
        """Raise `SubscriptionRefused` if there are as many subscriptions as the policies allow."""
        most = self.policies.max_subscriptions
        if most and len(self._subscriptions) >= most:
            raise SubscriptionRefused(
                f"{self.name} has {len(self._subscriptions)} subscriptions, and the maximum is "
                f"{most}: delete one, or raise maxSubscriptionsPerTopic."
            )

    def _keep(self, subscription: Subscription) -> Subscription:
        self._subscriptions[subscription.name] = subscription
        self.client_changes += 1
        if subscription.cursor.replicated:
            self.replication.subscriptions_changed()
        subscription.note_use()
        if self.sealed:
            subscription.topic_sealed()
        return subscription

    # Events of its subscriptions

    def consumer_attached(self, subscription: str, consumer: Consumer) -> None:
        """See `TopicEvents`."""
        self.client_changes += 1
        self.consumer_count += 1
        self._events.consumer_attached(self, subscription, consumer)

    def consumer_closed(self, subscription: str, consumer: Consumer, *, by_command: bool) -> None:
        """See `TopicEvents`."""
        self.client_changes += 1
        self.consumer_count -= 1
        self._events.consumer_closed(self, subscription, consumer, by_command=by_command)

    def subscription_drained(self, subscription: str) -> None:
        """See `TopicEvents`."""
        self._events.subscription_drained(self, subscription)

    def subscription_rewound(self, subscription: str) -> None:
        """See `TopicEvents`."""
        self._events.subscription_rewound(self, subscription)

    def note_unstamped_batch(self) -> None:
        """Note, durably, that a batch has no entry hashes.

        The order of keys does not depend on it: see `EntryBucketDispatcher`.
        """
        if self.shareable:
            self.shareable = False
            self._publishing.on_unstamped_batch = None
            self._work.start(self.ledger.set_properties({UNSTAMPED_PROPERTY: "true"}))
            self._events.unstamped_batch_found(self)

    # The end of a segment

    def begin_seal(self) -> None:
        """Move from OPEN to SEALING: new producers get TopicTerminated, attached ones finish."""
        if self.sealing:
            return
        if self.state is not TopicState.OPEN:
            raise self._unavailable()
        self._move(TopicState.SEALING)
        self._producers.note_seal()
        self._producers.refuse_waiting(TopicTerminated(f"{self.name} is being sealed."))

    async def seal(self, *, wait_for_producers: bool = False) -> Position:
        """Terminate the ledger, and report the end to all clients; returns the last position.

        With `wait_for_producers`, and on a segment always, producers of v5 clients first have
        SEAL_WAIT_S to leave by themselves.  Idempotent; after a failure it may be called again, of
        an ordinary topic after it was loaded anew.
        """
        self.begin_seal()
        if self._sealing is None:
            wait = wait_for_producers or self.name.domain is TopicDomain.SEGMENT
            self._sealing = asyncio.get_running_loop().create_task(self._seal(wait=wait))
        sealing = self._sealing
        try:
            return await asyncio.shield(sealing)
        finally:
            if sealing.done() and (sealing.cancelled() or sealing.exception() is not None):
                self._sealing = None

    async def _seal(self, *, wait: bool) -> Position:
        if self.state is TopicState.SEALING and wait:
            # They follow the topic's layout and leave by themselves.
            gone = await self._producers.wait_gone(SEAL_WAIT_S)
            log.debug("segment_sealing", topic=str(self.name), producers_gone=gone)
        try:
            last = await self.ledger.terminate()
        except MagnetarError as error:
            # Segments are sealed again.  Any other topic would refuse producers for ever if nobody
            # tries again: it is loaded anew, with the end that is stored or without one.
            if not wait:
                self._ledger_failed(error)
            raise
        if self.state is TopicState.SEALING:
            self._move(TopicState.SEALED)
            self.publish_rates.close()
            await self._producers.disconnect_all()
            self._calls.topic_sealed.call_all(self._subscriptions)
            self.replication.topic_sealed()
            await self.sequence_store.end()
        return last

    async def final_sequences(self, segment: SegmentName, changed_ms: int) -> FinalSequences:
        """The last sequence ids and ranges of this sealed segment, its parents' included.

        `changed_ms` is when the layout change began that seals it.  Raises `SequencesAwaited`,
        `TopicUnavailable` while it is not sealed.
        """
        if self._sealing is not None:
            # Its failure is not this request's; an unload cancels it.
            await asyncio.wait((self._sealing,))
        if not self.sealed:
            raise self._unavailable()
        await self.sequence_store.wait_inherited()
        return self.sequence_store.final(segment, changed_ms)

    # The end of this instance

    async def close(self) -> None:
        """Disconnect all clients, make cursors durable, release the ledger.

        Raises the first failure, after everything was tried.
        """
        if self.closing:
            return
        self._move(TopicState.CLOSING)
        self._calls.clear()
        if self._sealing is not None:
            self._sealing.cancel()
        self.publish_rates.close()
        await self._producers.disconnect_all()
        await self.replication.close()
        failures: list[MagnetarError] = []
        async with self._subscription_change:
            for number, subscription in enumerate(self.followers, start=1):
                try:
                    await subscription.close(persist=True)
                except MagnetarError as error:
                    failures.append(error)
                if number % CURSORS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        await self._work.wait()
        self._forget_appends()
        self._forget_read_listener()
        self._calls.clear()
        for close in (self.buffer.close, self.sequence_store.close, self.ledger.close):
            try:
                await close()
            except MagnetarError as error:
                failures.append(error)
        self._publishing.release()
        self._end_rates()
        self._move(TopicState.CLOSED)
        if failures:
            raise failures[0]

    def ownership_lost(self, error: MagnetarError) -> None:
        """Give the topic up: another process owns the segment now."""
        self._ledger_failed(error)

    def _ledger_failed(self, error: MagnetarError) -> None:
        """Give the topic up: its ledger must be opened anew."""
        self._failure = error
        # W4: appends in flight may still be stored.
        self.buffer.stop(error)
        if self.state in _READABLE:
            log.warning("topic_closed_after_ledger_failure", topic=str(self.name), error=str(error))
            self._give_up(self)

    def _unavailable(self) -> TopicUnavailable:
        return TopicUnavailable(f"{self.name} is {self.state.value}: try again at once.")

    def _move(self, to: TopicState) -> None:
        self.state = _MOVES.move(self.state, to, "{}", self.name)
