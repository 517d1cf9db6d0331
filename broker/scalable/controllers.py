"""The controllers of all topics of this broker, and what each connection registered with them.

Rules:

- A controller is made when the first ordered consumer of its topic comes, and lasts until the topic
  goes or nobody has used it for long; it takes in what is registered before it answers.
- A registration is known by its connection and consumer id.  SCALABLE_TOPIC_UNSUBSCRIBE takes it
  back, also while it is still being stored; unknown ids are none of our business and succeed.
- Work that a client began goes on when its connection ends: what it stored must be told of.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import structlog

from broker.scalable.answers import subscribe_error, subscribed
from broker.scalable.controller import TopicController
from broker.scalable.group_controller import GroupController
from broker.scalable.leadership import Leadership
from broker.scalable.live_topics import LiveTopic, LiveTopics
from broker.scalable.records import SubscriptionKind
from broker.scalable.segments import Segments
from broker.scalable.topic_store import TopicStore
from broker.scalable.watch import TooManySessions
from config.bounds import SESSIONS_PER_CONNECTION
from protocol.names import TopicDomain, TopicName, parse_topic_name, segment_name
from protocol.pulsar_pb2 import STREAM as WIRE_STREAM
from protocol.pulsar_pb2 import CommandScalableTopicSubscribe, ScalableConsumerAssignment
from protocol.server_error import MagnetarError, PeerError, ServerError

if TYPE_CHECKING:
    from broker.connection import Connection

log = structlog.get_logger(__name__)


class RegistrationTakenBack(PeerError):
    """The consumer was unsubscribed, or the broker stops, while it was being registered."""

    code: ClassVar[ServerError] = ServerError.CONSUMER_NOT_FOUND


class EmptyName(PeerError):
    """A subscription or consumer came without a name."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


@dataclass(eq=False, slots=True)
class Registration:
    """One SCALABLE_TOPIC_SUBSCRIBE.  `controller` is None until it is stored."""

    subscription: str
    consumer_name: str
    controller: TopicController | None = None
    taken_back: bool = False


class Controllers:
    """See the module's rules."""

    def __init__(
        self,
        topics: LiveTopics,
        store: TopicStore,
        segments: Segments,
        leadership: Leadership,
        *,
        grace_s: float,
    ) -> None:
        self._topics = topics
        self._store = store
        self._segments = segments
        self._leadership = leadership
        self._grace_s = grace_s
        self._controllers: dict[TopicName, TopicController] = {}
        self._making: dict[TopicName, asyncio.Task[TopicController]] = {}
        self._registered: dict[Connection, dict[int, Registration]] = {}
        self._work: set[asyncio.Task[None]] = set()
        topics.on_layout(self._layout_changed)

    def of(self, name: TopicName) -> TopicController | None:
        """The controller of a topic, if it has one."""
        return self._controllers.get(name)

    def group(self, name: TopicName, subscription: str) -> GroupController | None:
        """The ordered consumers of a subscription, if there are any."""
        controller = self._controllers.get(name)
        return None if controller is None else controller.groups.get(subscription)

    # Commands

    async def subscribe(
        self, connection: "Connection", request: CommandScalableTopicSubscribe
    ) -> None:
        """SCALABLE_TOPIC_SUBSCRIBE: answered in its own response, whatever happens."""
        registration = Registration(request.subscription, request.consumer_name)
        try:
            # Before anything is awaited: an UNSUBSCRIBE right behind must find it.
            self._enter(connection, request.consumer_id, registration)
        except TooManySessions as error:
            connection.send(subscribe_error(request.request_id, error))
            return
        task = asyncio.create_task(self._subscribe(connection, request, registration))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        await asyncio.shield(task)

    async def _subscribe(
        self,
        connection: "Connection",
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> None:
        try:
            assignment = await self._register(connection, request, registration)
        except MagnetarError as error:
            log.debug("ordered_consumer_refused", topic=request.topic, error=str(error))
            self._discard(connection, request.consumer_id, registration)
            connection.send(subscribe_error(request.request_id, error))
            return
        connection.send(subscribed(request.request_id, assignment))

    async def _register(
        self,
        connection: "Connection",
        request: CommandScalableTopicSubscribe,
        registration: Registration,
    ) -> ScalableConsumerAssignment:
        if not request.subscription.strip() or not request.consumer_name.strip():
            raise EmptyName("An ordered consumer needs names for subscription and consumer: set.")
        name = parse_topic_name(request.topic)
        if name.domain is TopicDomain.SEGMENT:
            name = segment_name(name).parent
        controller = await self._lead(await self._topics.get(name))
        stream = request.consumer_type == WIRE_STREAM
        assignment = await controller.register(
            request.subscription,
            SubscriptionKind.STREAM if stream else SubscriptionKind.CHECKPOINT,
            request.consumer_name,
            connection,
            request.consumer_id,
        )
        registration.controller = controller
        if registration.taken_back:
            await self._take_back(connection, request.consumer_id, registration)
            raise RegistrationTakenBack(
                f"Consumer {request.consumer_name!r} was unsubscribed meanwhile: subscribe again."
            )
        return assignment

    async def unsubscribe(self, connection: "Connection", consumer_id: int) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE: the consumer leaves now."""
        registration = self._registered.get(connection, {}).pop(consumer_id, None)
        if registration is not None:
            registration.taken_back = True
            await self._take_back(connection, consumer_id, registration)

    async def _take_back(
        self, connection: "Connection", consumer_id: int, registration: Registration
    ) -> None:
        controller = registration.controller
        if controller is None:
            return
        group = controller.groups.get(registration.subscription)
        if group is not None:
            group.unregister(registration.consumer_name, connection, consumer_id)
            await controller.settled()

    # Life

    async def _lead(self, live: LiveTopic) -> TopicController:
        """The topic's controller, made by the first who asks and shared by all."""
        await self._leadership.claim(live.name)
        making = self._making.get(live.name)
        if making is None:
            known = self._controllers.get(live.name)
            if known is not None and known.live is live:
                return known
            making = self._making[live.name] = asyncio.create_task(self._make(live))
            making.add_done_callback(lambda _: self._making.pop(live.name, None))
        return await asyncio.shield(making)

    async def _make(self, live: LiveTopic) -> TopicController:
        controller = TopicController(live, self._store, self._segments, grace_s=self._grace_s)
        # Known before it is complete: what happens at the segments meanwhile must reach it.
        self._controllers[live.name] = controller
        try:
            await controller.restore()
        except BaseException:
            del self._controllers[live.name]
            await controller.close()
            raise
        return controller

    async def topic_deleted(self, name: TopicName) -> None:
        """The topic is going: its consumers are forgotten."""
        making = self._making.get(name)
        if making is not None:
            await asyncio.wait((making,))
        controller = self._controllers.pop(name, None)
        self._leadership.forget(name)
        if controller is not None:
            await controller.close()

    async def stop(self) -> None:
        """The broker stops: registrations stay, for the next start."""
        work = [*self._work, *self._making.values()]
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        controllers = list(self._controllers.values())
        self._controllers.clear()
        for controller in controllers:
            await controller.close()
        await self._leadership.stop()

    def is_idle(self, name: TopicName) -> bool:
        """Whether the topic has no controller, or one that may go."""
        controller = self._controllers.get(name)
        return name not in self._making and (controller is None or controller.idle)

    async def let_go(self, name: TopicName) -> None:
        """Nobody uses the topic: the next ordered consumer makes its controller anew.

        The topic stays led by this process; that costs no more than its name.
        """
        controller = self._controllers.pop(name, None)
        if controller is not None:
            await controller.close()

    def _layout_changed(self, live: LiveTopic) -> None:
        controller = self._controllers.get(live.name)
        if controller is not None:
            controller.layout_changed()

    # Connections

    def _enter(
        self, connection: "Connection", consumer_id: int, registration: Registration
    ) -> None:
        registered = self._registered.get(connection)
        if registered is None:
            registered = self._registered[connection] = {}
            connection.on_close(lambda: self._connection_closed(connection))
        if len(registered) >= SESSIONS_PER_CONNECTION:
            raise TooManySessions(
                f"This connection has {len(registered)} ordered consumers already: close some."
            )
        registered[consumer_id] = registration

    def _connection_closed(self, connection: "Connection") -> None:
        self._registered.pop(connection, None)

    def _discard(
        self, connection: "Connection", consumer_id: int, registration: Registration
    ) -> None:
        registered = self._registered.get(connection, {})
        if registered.get(consumer_id) is registration:
            del registered[consumer_id]
