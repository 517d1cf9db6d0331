"""The controllers of this broker's topics, and the ordered consumers of each connection."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.placement import PlacementNotReady
from broker.scalable.answers import subscribe_error, subscribed
from broker.scalable.controller import TopicController
from broker.scalable.controller_record import ControllerRecord
from broker.scalable.counters import ScalableCounters
from broker.scalable.grace_periods import GracePeriods
from broker.scalable.group_controller import GroupController
from broker.scalable.live_topics import LiveTopic, LiveTopics, twin
from broker.scalable.records import SubscriptionKind
from broker.scalable.relay import LeaderNotReady, RefusedByLeader, Relay, Relays
from broker.scalable.segments import Segments
from broker.scalable.topic_leadership import NotController, TopicLeadership, not_led
from broker.scalable.topic_store import TopicStore
from broker.scalable.watch import TooManySessions
from broker.topics.client_connection import ClientConnection
from broker.topics.compaction.reserved import require_of_clients
from config.bounds import (
    CONTROLLER_CLOSE_S,
    REGISTRATION_RETRY_MAX_S,
    REGISTRATION_RETRY_S,
    REGISTRATION_TRIES_S,
    SESSIONS_PER_CONNECTION,
)
from magnetar.background_tasks import BackgroundTasks, OwnerStopped
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.names import TopicDomain, TopicName, parse_topic_name, segment_name
from magnetar.protocol.pulsar_pb2 import STREAM as WIRE_STREAM
from magnetar.protocol.pulsar_pb2 import CommandScalableTopicSubscribe
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.metadata.store import MetadataError

if TYPE_CHECKING:
    # A single broker starts without the parts of a cluster.
    from broker.scalable.feed_follower import FeedFollower

log = structlog.get_logger(__name__)

_LED_ELSEWHERE = (NotController, PlacementNotReady)
_LEADER_UNKNOWN = (MetadataError, OwnerStopped)
"""Errors after which it is not known whether another broker leads the topic."""


class RegistrationCancelled(PeerError):
    """The consumer was unsubscribed, or its connection lost, while it was being registered."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_NOT_FOUND


class EmptyName(PeerError):
    """A subscription or consumer came without a name."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


@dataclass(eq=False, slots=True)
class Registration:
    """One SCALABLE_TOPIC_SUBSCRIBE.

    `served_by` is None until a controller has stored it, or a relay was begun.
    """

    subscription: str
    consumer_name: str
    served_by: TopicController | Relay | None = None
    cancelled: bool = False


class Controllers:
    """Makes and ends the topic controllers of this broker, and registers ordered consumers.

    A controller is made for the first ordered consumer of a topic.  It ends with the topic, with
    this broker's lead of the topic, or when nobody has used it for long.  With the lead the
    connections registered with it are closed: nothing else makes a client look its controller up
    again.

    Where another broker leads, consumers are relayed to it (see `relay`).
    """

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        leads: TopicLeadership,
        controller_record: ControllerRecord,
        feeds: "FeedFollower | None",
        relays: Relays,
        *,
        grace_periods: GracePeriods,
        counters: ScalableCounters,
    ) -> None:
        """`feeds` follows segments at other brokers; None on a single broker."""
        self._topics = topics
        self._store = store
        self._segments = segments
        self._leads = leads
        self._controller_record = controller_record
        self._feeds = feeds
        self._relays = relays
        self._grace_periods = grace_periods
        self._counters = counters
        self._controllers: dict[TopicName, TopicController] = {}
        self._making: dict[TopicName, asyncio.Task[TopicController]] = {}
        self._registered: dict[ClientConnection, dict[int, Registration]] = {}
        self._left_behind: dict[TopicName, dict[ClientConnection, Callable[[], None]]] = {}
        """Connections with ordered consumers of topics that are, or may be, deleted; each with the
        function that ends waiting for its end."""
        self._undecided: set[TopicName] = set()
        """Those topics of which it is not known whether they are deleted."""
        self._work = BackgroundTasks()
        self._closing = BackgroundTasks()
        self._registration_listeners: list[Callable[[LiveTopic], None]] = []
        topics.on_layout(self._layout_changed)
        relays.on_deletion(self._leave_behind)

    def on_registration(self, listener: Callable[[LiveTopic], None]) -> None:
        """Call `listener` with the topic after each registration of an ordered consumer here."""
        self._registration_listeners.append(listener)

    def of(self, name: TopicName) -> TopicController | None:
        """The controller of a topic, if it has one."""
        return self._controllers.get(name)

    def group(self, name: TopicName, subscription: str) -> GroupController | None:
        """The ordered consumers of a subscription, if there are any."""
        controller = self._controllers.get(name)
        return None if controller is None else controller.groups.get(subscription)

    def grace_s(self, live: LiveTopic) -> int:
        """How long a consumer of the topic that is lost now keeps its segments, in seconds."""
        return self._grace_periods.grace_s(live)

    # Commands

    async def subscribe(
        self, connection: ClientConnection, request: CommandScalableTopicSubscribe
    ) -> None:
        """SCALABLE_TOPIC_SUBSCRIBE: register a consumer; the answer is sent in any case.

        The registration goes on when the connection ends, as it may be stored already.
        """
        registration = Registration(request.subscription, request.consumer_name)
        try:
            # Before anything is awaited: an UNSUBSCRIBE that follows at once must find it.
            self._enter(connection, request.consumer_id, registration)
        except TooManySessions as error:
            connection.send(subscribe_error(request.request_id, error))
            return
        await self._work.finish(self._subscribe(connection, request, registration))

    async def _subscribe(
        self,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        try:
            await self._register(connection, request, registration)
        except MagnetarError as error:
            log.debug("ordered_consumer_refused", topic=request.topic, error=str(error))
            self._discard(connection, request.consumer_id, registration)
            if isinstance(error, RefusedByLeader):
                connection.send(error.answer)
            else:
                connection.send(subscribe_error(request.request_id, error))

    async def _register(
        self,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        """Register the consumer, here or at the leader, and have its first assignment sent."""
        if not request.subscription.strip() or not request.consumer_name.strip():
            raise EmptyName("An ordered consumer needs names for subscription and consumer: set.")
        require_of_clients(request.subscription)
        name = parse_topic_name(request.topic)
        if name.domain is TopicDomain.SEGMENT:
            name = segment_name(name).parent
        name = twin(name)
        time_s = asyncio.get_running_loop().time
        until_s = time_s() + REGISTRATION_TRIES_S
        backoff = Backoff(REGISTRATION_RETRY_S, REGISTRATION_RETRY_MAX_S)
        # A client never retries a first registration, so it is retried here while no broker serves
        # the topic.  A failing metadata store is retried too: even if it stored the registration,
        # the next try registers the same consumer.
        while True:
            try:
                await self._register_at_leader(name, connection, request, registration)
            except (*_LED_ELSEWHERE, *_LEADER_UNKNOWN, LeaderNotReady):
                registration.served_by = None
                if not self._relays.may_relay(connection) or time_s() >= until_s:
                    raise
            else:
                return
            self._require_awaited(connection, request, registration)
            await self._relays.wait_for_change(name, backoff.pause_s())
            self._require_awaited(connection, request, registration)

    async def _register_at_leader(
        self,
        name: TopicName,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        try:
            live = await self._topics.get(name)
            await self._register_here(live, connection, request, registration)
        except (*_LED_ELSEWHERE, *_LEADER_UNKNOWN) as error:
            if isinstance(error, _LEADER_UNKNOWN) and not self._relays.is_led(name):
                raise
            self._require_awaited(connection, request, registration)
            relay = self._relays.begin(connection, request, name)
            if relay is None:
                raise
            registration.served_by = relay
            await relay.register()

    async def _register_here(
        self,
        live: LiveTopic,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        controller = await self._lead(live)
        stream = request.consumer_type == WIRE_STREAM
        assignment = await controller.register(
            request.subscription,
            SubscriptionKind.STREAM if stream else SubscriptionKind.CHECKPOINT,
            request.consumer_name,
            connection,
            request.consumer_id,
        )
        registration.served_by = controller
        if registration.cancelled:
            await self._unregister(connection, request.consumer_id, registration)
            raise _cancelled(request)
        connection.send(subscribed(request.request_id, assignment))
        for listener in self._registration_listeners:
            listener(live)

    def _require_awaited(
        self,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        """Raise if the consumer has left, subscribed again, or lost its connection."""
        if self._registered.get(connection, {}).get(request.consumer_id) is not registration:
            raise _cancelled(request)

    async def unsubscribe(self, connection: ClientConnection, consumer_id: int) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE: the consumer leaves, even while it is still being registered.

        Unknown consumer ids are ignored.
        """
        registration = self._registered.get(connection, {}).pop(consumer_id, None)
        if registration is not None:
            registration.cancelled = True
            await self._unregister(connection, consumer_id, registration)

    async def _unregister(
        self, connection: ClientConnection, consumer_id: int, registration: Registration
    ) -> None:
        served_by = registration.served_by
        if isinstance(served_by, Relay):
            await served_by.leave()
        elif served_by is not None:
            group = served_by.groups.get(registration.subscription)
            if group is not None:
                group.unregister(registration.consumer_name, connection, consumer_id)
                await served_by.settled()

    # Controllers

    async def _lead(self, live: LiveTopic) -> TopicController:
        """Take the lead of a topic; return its controller, which all callers share."""
        await self._leads.take(live.name)
        await self._controller_record.claim(live.name)
        making = self._making.get(live.name)
        if making is None:
            known = self._controllers.get(live.name)
            if known is not None and known.live is live:
                return known
            making = self._making[live.name] = asyncio.create_task(self._make(live))
            making.add_done_callback(lambda _: self._making.pop(live.name, None))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if making.cancelled() and (task is None or not task.cancelling()):
                raise not_led(live.name) from None  # the broker stops, this task goes on
            raise

    async def _make(self, live: LiveTopic) -> TopicController:
        former = self._controllers.pop(live.name, None)
        if former is not None:
            await former.close()
        grace_s = partial(self._grace_periods.grace_s, live)
        controller = TopicController(
            live, self._store, self._segments, grace_s=grace_s, counters=self._counters
        )
        # Added before it is complete, so that events of segments reach it meanwhile.
        self._controllers[live.name] = controller
        try:
            if self._feeds is not None:
                await self._feeds.follow(live.name)
            await self._grace_periods.follow(live)
            await controller.restore()
            # The lead may have been lost and taken again: then another controller is made.
            known = self._controllers.get(live.name)
            if known is not controller or not self._leads.leads(live.name):
                raise not_led(live.name)
            if controller.groups:
                self._counters.controllers_taken_over += 1
        except BaseException:
            if self._controllers.get(live.name) is controller:
                self._forget(live.name)
            await controller.close()
            raise
        return controller

    def _forget(self, name: TopicName) -> TopicController | None:
        if self._feeds is not None:
            self._feeds.unfollow(name)
        return self._controllers.pop(name, None)

    def lead_ended(self, name: TopicName) -> None:
        """End the controller of a topic: another broker leads it, or may.

        The connections registered with it are closed, so that clients register there.
        """
        self._controller_record.forget(name)
        if name in self._undecided:
            self.deletion_decided(name, False)
        controller = self._forget(name)
        if controller is not None:
            log.info("controller_ended", topic=str(name))
            controller.send_away(not_led(name))
            self._close_soon(controller)

    def _close_soon(self, controller: TopicController) -> None:
        self._closing.start(controller.close())

    async def topic_deleted(self, name: TopicName) -> None:
        """End the controller of a topic that is being deleted; see `deletion_decided`."""
        making = self._making.get(name)
        if making is not None:
            await asyncio.wait((making,))
        controller = self._forget(name)
        self._controller_record.forget(name)
        if controller is not None:
            self._undecided.add(name)
            for connection in controller.connections():
                self._leave_behind(name, connection)
            await controller.close()

    def deletion_decided(self, name: TopicName, is_gone: bool) -> None:
        """Take in whether a topic that was to be deleted is gone; if so, see `created`.

        If it stays, its ordered consumers are sent away to register again: nobody assigns them
        segments any more.
        """
        self._undecided.discard(name)
        if not is_gone:
            self._send_away(name, f"{name} was not deleted: look its layout up again")

    def created(self, name: TopicName) -> None:
        """Send ordered consumers of an earlier topic of this name away, to register with this one.

        Not before: a client that looks up a topic that is gone creates it again.
        """
        self._send_away(name, f"{name} was deleted and made again")

    def awaits(self, name: TopicName) -> bool:
        """Whether there are ordered consumers of an earlier topic of this name."""
        return name in self._left_behind

    def _leave_behind(self, name: TopicName, connection: ClientConnection) -> None:
        connections = self._left_behind.setdefault(name, {})
        if connection not in connections:
            connections[connection] = connection.on_close(lambda: self._gone(name, connection))
            self._topics.follow_name(name)

    def _gone(self, name: TopicName, connection: ClientConnection) -> None:
        connections = self._left_behind.get(name, {})
        connections.pop(connection, None)
        if not connections:
            self._left_behind.pop(name, None)
            self._topics.forget_name(name)

    def _send_away(self, name: TopicName, why: str) -> None:
        for connection, forget in self._left_behind.pop(name, {}).items():
            forget()
            connection.close(why)

    async def stop(self) -> None:
        """End all controllers; stored registrations stay, for the next start or leader.

        Among several brokers, registrations in progress are tried at another broker until `close`,
        and registrations that are being stored delay this call by CONTROLLER_CLOSE_S at most.
        """
        work: list[asyncio.Task[object]] = [*self._making.values()]
        if not self._relays.shared:
            work += self._work.running
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for name in list(self._controllers):
            controller = self._forget(name)
            if controller is not None:
                self._close_soon(controller)
        if self._closing.busy:
            # A slow store must not hold up a drain; `close` waits for what is still being stored.
            at_most_s = CONTROLLER_CLOSE_S if self._relays.shared else None
            await asyncio.wait(self._closing.running, timeout=at_most_s)
        await self._controller_record.stop()

    async def close(self) -> None:
        """End all registrations in progress; no client is connected any more."""
        self._work.cancel()
        ending = (*self._work.running, *self._closing.running)
        await asyncio.gather(*ending, return_exceptions=True)
        self._relays.stop()

    def is_idle(self, name: TopicName) -> bool:
        """Whether the topic has no controller, or one that nobody uses."""
        controller = self._controllers.get(name)
        return name not in self._making and (controller is None or controller.idle)

    async def unload(self, name: TopicName) -> None:
        """End the controller of a topic that nobody uses; the next ordered consumer makes another.

        This process still leads the topic.
        """
        controller = self._forget(name)
        if controller is not None:
            await controller.close()

    def _layout_changed(self, live: LiveTopic) -> None:
        controller = self._controllers.get(live.name)
        if controller is not None:
            controller.layout_changed()

    # Connections

    def _enter(
        self, connection: ClientConnection, consumer_id: int, registration: Registration
    ) -> None:
        registered = self._registered.get(connection)
        if registered is None:
            registered = self._registered[connection] = {}
            connection.on_close(lambda: self._connection_closed(connection))
        earlier = registered.get(consumer_id)
        if earlier is None and len(registered) >= SESSIONS_PER_CONNECTION:
            _forget_gone(connection, registered)
        if earlier is None and len(registered) >= SESSIONS_PER_CONNECTION:
            raise TooManySessions(
                f"This connection has {len(registered)} ordered consumers already: close some."
            )
        registered[consumer_id] = registration
        if earlier is not None and isinstance(earlier.served_by, Relay):
            # The leader sees another connection for each registration and closes none of them.
            earlier.served_by.close()

    def _connection_closed(self, connection: ClientConnection) -> None:
        self._registered.pop(connection, None)

    def _discard(
        self, connection: ClientConnection, consumer_id: int, registration: Registration
    ) -> None:
        registered = self._registered.get(connection, {})
        if registered.get(consumer_id) is registration:
            del registered[consumer_id]


def _forget_gone(connection: ClientConnection, registered: dict[int, Registration]) -> None:
    """Forget the consumers that have left: the official client says so at segments alone."""
    for consumer_id, each in list(registered.items()):
        if isinstance(each.served_by, Relay):
            gone = each.served_by.ended.done()
        elif each.served_by is not None:
            group = each.served_by.groups.get(each.subscription)
            gone = group is None or group.forget_if_left(
                each.consumer_name, connection, consumer_id
            )
        else:
            gone = False
        if gone:
            del registered[consumer_id]


def _cancelled(request: CommandScalableTopicSubscribe) -> RegistrationCancelled:
    return RegistrationCancelled(
        f"Consumer {request.consumer_name!r} was unsubscribed meanwhile: subscribe again."
    )
