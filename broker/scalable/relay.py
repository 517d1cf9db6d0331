"""Relays of ordered consumers: their client connected to a broker that does not lead the topic.

A client finds the controller in the layout.  Behind a proxy, or with a layout that is out of date,
it asks another broker.  A refusal would end its `subscribe` for good.  So that broker registers the
consumer with the leader and relays between the two from then on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar, cast

import structlog

from broker.placement import BrokerAddress, Placement
from broker.scalable.relay_exchange import (
    RELAY_CLIENT,
    Broken,
    Effect,
    ExchangeState,
    Left,
    NotReady,
    PassOn,
    Refused,
    RelayExchange,
    Say,
)
from broker.topics.client_connection import ClientConnection
from config.bounds import (
    MAX_FRAME_SIZE,
    RELAY_ANSWER_S,
    RELAY_CONNECT_S,
    RELAY_KEEP_ALIVE_S,
    RELAY_LEAVE_S,
    RELAYED_CONSUMERS,
)
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.frames import Frame, FrameDecoder, FrameError, Received, encode_command
from magnetar.protocol.names import TopicName
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandScalableTopicSubscribe
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError

T = TypeVar("T")
log = structlog.get_logger(__name__)


class LeaderNotReady(PeerError):
    """The broker that was asked does not lead the topic now."""

    code: ClassVar[ServerError] = ServerError.SERVICE_NOT_READY


class RefusedByLeader(PeerError):
    """The leader refuses the consumer, with `answer` for the client."""

    def __init__(self, answer: BaseCommand) -> None:
        super().__init__(answer.scalable_topic_subscribe_response.message)
        self.answer = answer


class TooManyRelays(PeerError):
    """This broker relays RELAYED_CONSUMERS already, each with a socket here and at its leader."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


IsThere = Callable[[TopicName], Awaitable[bool]]
"""Whether a scalable topic is stored.  Raises `MetadataError`."""


class Relays:
    """The relayed consumers of this broker.

    One listener serves all relays, as thousands of topics may change hands in one turn; a change of
    a topic's leader concerns the relays of that topic only.
    """

    def __init__(self, placement: Placement, is_there: IsThere) -> None:
        self._placement = placement
        self._is_there = is_there
        self._open: set[Relay] = set()
        self._of_topic: dict[TopicName, dict[Relay, None]] = {}
        self._waiting: dict[TopicName, dict[asyncio.Event, None]] = {}
        self._looks = BackgroundTasks()
        self._deletion_listeners: list[Callable[[TopicName, ClientConnection], None]] = []
        self._forget = (
            placement.on_change(self._owner_changed),
            placement.on_brokers(self._brokers_changed),
        )

    @property
    def open(self) -> int:
        """The number of relayed consumers."""
        return len(self._open)

    @property
    def shared(self) -> bool:
        """Whether there may be other brokers."""
        return self._placement.shared

    def on_deletion(self, listener: Callable[[TopicName, ClientConnection], None]) -> None:
        """Call `listener` with each client whose relay ends with its topic."""
        self._deletion_listeners.append(listener)

    def may_relay(self, connection: ClientConnection) -> bool:
        """Whether a client may be relayed: not where a broker is alone, and no relaying broker."""
        return self._placement.shared and not connection.client_version.startswith(RELAY_CLIENT)

    def begin(
        self,
        connection: ClientConnection,
        request: CommandScalableTopicSubscribe,
        name: TopicName,
    ) -> "Relay | None":
        """Return a relay to the leader of the topic, or the broker that would lead it.

        It is None if that is this broker.

        Raises `TooManyRelays`.
        """
        leader = self._placement.controller_of(name)
        if not self.may_relay(connection) or leader.broker_id == self._placement.broker_id:
            return None
        if len(self._open) >= RELAYED_CONSUMERS:
            raise TooManyRelays(
                f"This broker relays {len(self._open)} ordered consumers already: look the topic's "
                "layout up and ask the controller named there."
            )
        relay = Relay(self._placement, connection, request, name, leader)
        self._open.add(relay)
        self._of_topic.setdefault(name, {})[relay] = None
        relay.ended.add_done_callback(lambda _: self._ended(name, relay))
        return relay

    def _ended(self, name: TopicName, relay: "Relay") -> None:
        self._open.discard(relay)
        _discard(self._of_topic, name, relay)

    def is_led(self, name: TopicName) -> bool:
        """Whether the leader of the topic is known."""
        return self._placement.known_owner(name) is not None

    async def wait_for_change(self, name: TopicName, at_most_s: float) -> None:
        """Return when the topic's owner or the brokers have changed, or after that time."""
        changed = asyncio.Event()
        self._waiting.setdefault(name, {})[changed] = None
        try:
            async with asyncio.timeout(at_most_s):
                await changed.wait()
        except TimeoutError:
            pass
        finally:
            _discard(self._waiting, name, changed)

    def stop(self) -> None:
        """End all relays.  Their clients' connections are closed elsewhere."""
        for forget in self._forget:
            forget()
        for relay in list(self._open):
            relay.close()
        self._looks.cancel()

    def _owner_changed(self, name: TopicName) -> None:
        for changed in self._waiting.get(name, ()):
            changed.set()
        leaderless = [one for one in self._of_topic.get(name, ()) if one.has_lost_its_leader()]
        if leaderless:
            self._looks.start(self._look_whether_it_is_there(name, leaderless))

    def _brokers_changed(self) -> None:
        for name in dict.fromkeys((*self._waiting, *self._of_topic)):
            self._owner_changed(name)

    async def _look_whether_it_is_there(self, name: TopicName, relays: "Sequence[Relay]") -> None:
        """End the relays of a topic without a leader."""
        is_there = True
        try:
            is_there = await self._is_there(name)
        except MagnetarError as error:
            log.debug("relayed_topic_not_read", topic=str(name), error=str(error))
        finally:
            for relay in relays:
                if relay.end_led(is_there=is_there) and not is_there:
                    for listener in self._deletion_listeners:
                        listener(name, relay.near)


def _discard(of_topic: dict[TopicName, dict[T, None]], name: TopicName, one: T) -> None:
    """Remove one of a topic's items, and with the last one the topic."""
    others = of_topic.get(name, {})
    others.pop(one, None)
    if not others:
        of_topic.pop(name, None)


class Relay(asyncio.Protocol):
    """One ordered consumer, and the connection to the broker that leads its topic.

    Each consumer has a connection of its own, so that ids cannot clash and the leader notices a
    client that is gone at once.  Until the first assignment the registration may be tried again.
    Afterwards the client's connection is closed when the leader's is lost, or the topic has another
    leader: then the client looks its controller up again.
    """

    def __init__(
        self,
        placement: Placement,
        near: ClientConnection,
        request: CommandScalableTopicSubscribe,
        name: TopicName,
        leader: BrokerAddress,
    ) -> None:
        self._placement = placement
        self.near = near
        """The client's connection."""
        self._name = name
        self._leader = leader
        self._exchange = RelayExchange(
            request,
            near.client_version,
            near.protocol_version,
            near.features,
            placement.dialer.auth_data,
        )
        self._decoder = FrameDecoder(MAX_FRAME_SIZE)
        self._transport: asyncio.Transport | None = None
        owner = placement.known_owner(name)
        self._seen_leading = owner is not None and owner.broker_id == leader.broker_id
        self._leaderless = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answered: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the relay has ended."""
        self._forget = near.on_close(self.close)

    # Life

    async def register(self) -> None:
        """Return when the client has its first assignment.

        Raises `LeaderNotReady` when it may be tried again, and `RefusedByLeader`.
        """
        connecting = asyncio.create_task(self._connect())
        connecting.add_done_callback(self._connecting_ended)
        try:
            async with asyncio.timeout(RELAY_ANSWER_S):
                await self._answered
        except TimeoutError as error:
            # An answer may come in the same turn as the end of its time: then it was passed on.
            if self._exchange.state is not ExchangeState.SERVING:
                raise self._not_ready(f"no answer within {RELAY_ANSWER_S:g} s") from error
        finally:
            connecting.cancel()
            # What is left in the turn of its first assignment is ended by `leave`.
            if self._exchange.state not in (ExchangeState.SERVING, ExchangeState.LEAVING):
                self.close()

    async def leave(self) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE: have the leader forget the consumer, and end."""
        last = self._exchange.leave()
        if last is not None:
            self._effect(last)
            await asyncio.wait((self.ended,), timeout=RELAY_LEAVE_S)
        self.close()

    def close(self) -> None:
        """End, and leave the client's connection alone."""
        self._end(self._not_ready("it is not waited for any more"), tell=False)

    # The connection to the leader

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send CONNECT."""
        self._transport = cast("asyncio.Transport", transport)
        if self._exchange.state is ExchangeState.ENDED:
            self._transport.abort()
        else:
            self._effect(self._exchange.begin())

    def data_received(self, data: bytes) -> None:
        """Take in commands of the leader."""
        if self.ended.done():
            return
        try:
            frames: Sequence[Received] = self._decoder.feed(data)
            error: FrameError | None = None
        except FrameError as broken:
            frames, error = broken.frames_before, broken
        for frame in frames:
            if not isinstance(frame, Frame):
                error = FrameError("A broker sent SEND: look at its log.")
                break
            effect = self._exchange.received(frame.command)
            if effect is not None:
                self._effect(effect)
            if self._exchange.state is ExchangeState.ENDED:
                return
        if error is not None:
            self._effect(Broken(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the leader has closed the connection, or is gone."""
        self._end(self._not_ready(f"it has closed the connection ({exc or 'without a word'})"))

    async def _connect(self) -> None:
        """Connect.  Raises `OSError`, also after RELAY_CONNECT_S; `ValueError` for no address."""
        async with asyncio.timeout(RELAY_CONNECT_S):
            await self._placement.dialer.connect(self._leader, lambda: self)

    def _connecting_ended(self, connecting: asyncio.Task[None]) -> None:
        if not connecting.cancelled() and (error := connecting.exception()) is not None:
            why = str(error) or f"not within {RELAY_CONNECT_S:g} s"
            self._end(self._not_ready(f"it cannot be reached from here ({why})"))

    def _effect(self, effect: Effect) -> None:
        if isinstance(effect, Say):
            if self._transport is not None:
                self._transport.write(encode_command(effect.command))
        elif isinstance(effect, PassOn):
            self.near.send(effect.command)
            if effect.first:
                self._timer = self._loop.call_later(RELAY_KEEP_ALIVE_S, self._keep_alive)
                if not self._answered.done():
                    self._answered.set_result(None)
        elif isinstance(effect, Refused):
            self._end(RefusedByLeader(effect.answer))
        elif isinstance(effect, NotReady):
            self._end(LeaderNotReady(effect.why))
        elif isinstance(effect, Left):
            self.close()
        else:
            log.warning("relay_broken", leader=self._leader.broker_id, why=effect.why)
            self._end(self._not_ready("it sent what it must not"))

    def _keep_alive(self) -> None:
        """Check every RELAY_KEEP_ALIVE_S, while it serves, that the leader still answers."""
        # If only the way to the leader is gone its session lives, and so does its owner record.
        self._timer = self._loop.call_later(RELAY_KEEP_ALIVE_S, self._keep_alive)
        effect = self._exchange.keep_alive()
        if isinstance(effect, Say):
            self._effect(effect)
        elif effect is not None:
            self._end(self._not_ready(effect.why))

    # The leader

    def has_lost_its_leader(self) -> bool:
        """End if another broker leads the topic.

        Returns True, once, if none does any more while the client is served; then the caller is to
        call `end_led`.
        """
        owner = self._placement.known_owner(self._name)
        if owner is not None and owner.broker_id == self._leader.broker_id:
            self._seen_leading = True
        elif owner is not None:
            self._end(self._not_led())
        elif self._was_leading():
            if self._exchange.state is not ExchangeState.SERVING:
                self._end(self._not_led())
            elif not self._leaderless:
                self._leaderless = True
                return True
        return False

    def end_led(self, *, is_there: bool) -> bool:
        """End, as no broker leads the topic, which exists or has been deleted.

        Returns whether it served its client.
        """
        served = self._exchange.state is ExchangeState.SERVING
        # A client of a deleted topic that is sent away would create it again.
        self._end(self._not_led(), tell=is_there)
        return served

    def _was_leading(self) -> bool:
        """Whether the leader has lost its lead, where the topic has none.

        Otherwise it is about to take the lead, or has taken it and the event is still to come.
        """
        return self._seen_leading or self._leader.broker_id not in self._placement.brokers

    # The end

    def _end(self, why: MagnetarError, *, tell: bool = True) -> None:
        """End both sides; with `tell`, a served client is sent away to look up its controller."""
        state = self._exchange.state
        if state is ExchangeState.ENDED:
            return
        self._exchange.end()
        self._decoder.discard()
        self._forget()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        if not self._answered.done():
            self._answered.set_exception(why)
        self.ended.set_result(None)
        if tell and state is ExchangeState.SERVING:
            log.debug("relay_ended", topic=str(self._name), why=str(why))
            self.near.close(str(why))

    def _not_led(self) -> LeaderNotReady:
        return self._not_ready("it does not lead the topic any more")

    def _not_ready(self, why: str) -> LeaderNotReady:
        return LeaderNotReady(
            f"{self._name} is led by {self._leader.broker_id} as far as is known, and {why}: look "
            "its layout up again and ask the controller named there."
        )
