"""`LayoutWatch`, which follows the layout of a topic over reconnects."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from magnetar.context import ClientContext
from magnetar.errors import (
    AlreadyClosed,
    BrokerError,
    BrokerFailed,
    ConnectionLost,
    MagnetarError,
    NotSupported,
    OperationTimedOut,
)
from magnetar.layout import Layout, layout_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.names import InvalidTopicName, TopicDomain, parse_topic_name
from magnetar.refusals import Refusals
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind
from magnetar.wire.requests import error_in

__all__ = ["LayoutWatch"]

LayoutListener = Callable[[Layout], None]
FailureListener = Callable[[MagnetarError], None]


class LayoutWatch(Attachment):
    """Follows the layout of one scalable topic, over reconnects.

    A lookup finds the broker that serves the topic.  SCALABLE_TOPIC_LOOKUP opens a session there,
    in which the broker sends the layout and each later one.  Listeners are called with each layout
    that differs from the last, as it arrives.

    Once there is a layout, an error is retried after a pause.  If brokers say often enough that the
    topic does not exist (`Refusals`), the watch ends, and the failure listeners are called.
    """

    def __init__(self, context: ClientContext, topic: str, create_if_missing: bool = True) -> None:
        """`topic` is the name as the user gave it.  Raises `InvalidTopicName`."""
        super().__init__(context)
        parse_topic_name(topic)
        self._asked: Final = topic
        self._session_id: Final = context.ids.session_id()
        self._create_if_missing = create_if_missing
        self._first: asyncio.Future[None] | None = None
        """The first answer of the session that is being opened."""
        self._layout: Layout | None = None
        self._topic = topic
        self._controller_url: str | None = None
        self._refusals = Refusals()
        self._listeners: dict[object, LayoutListener] = {}
        self._failure_listeners: dict[object, FailureListener] = {}

    @property
    def layout(self) -> Layout:
        """The newest layout.  Raises `AlreadyClosed` unless `open` has returned."""
        if self._layout is None:
            raise AlreadyClosed(f"The layout of {self._asked} is not known; await open() first.")
        return self._layout

    @property
    def topic(self) -> str:
        """The topic as the broker resolved its name: `topic://...`."""
        return self._topic

    @property
    def controller_url(self) -> str | None:
        """The URL of the broker with the topic's controller; None if any broker may be asked."""
        return self._controller_url

    def on_change(self, listener: LayoutListener) -> Callable[[], None]:
        """Call `listener` with every new layout; returns the function that ends this."""
        return _listen(self._listeners, listener)

    def on_failure(self, listener: FailureListener) -> Callable[[], None]:
        """Call `listener` with the error if the watch fails; returns as `on_change`."""
        return _listen(self._failure_listeners, listener)

    # Attachment

    def describe(self) -> str:
        """The name used in errors."""
        return f"The layout of {self._asked}"

    async def find(self) -> Connection:
        """A connection to the broker that serves the topic."""
        try:
            return await self.context.pool.of_topic(self._asked)
        except BrokerError as error:
            raise self._refusals.judge(error) from error

    async def attach(self, connection: Connection) -> None:
        """Open the session and wait for its first answer.

        Raises `NotSupported` if the broker has no scalable topics, and `OperationTimedOut`.
        """
        if not connection.features.supports_scalable_topics:
            raise NotSupported(
                f"The broker at {connection.address} has no scalable topics; switch them on there "
                "(Apache Pulsar: scalableTopicsEnabled), or use a broker of version 5."
            )
        timeout_s = self.context.settings.operation_timeout_s
        self._first = first = self.context.loop.create_future()
        try:
            connection.attach(PeerKind.LAYOUT, self._session_id, self)
            connection.send(self._lookup())
            async with asyncio.timeout(timeout_s):
                await first
        except TimeoutError:
            raise OperationTimedOut(
                f"The broker did not send the layout of {self._asked} within {timeout_s:g} s; "
                "check whether it is overloaded, or raise operation_timeout_s."
            ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            self._first = None

    async def leave(self, connection: Connection) -> None:
        """Close the session; the broker does not answer that."""
        close = pb.CommandScalableTopicClose(session_id=self._session_id)
        connection.send(
            pb.BaseCommand(type=pb.BaseCommand.SCALABLE_TOPIC_CLOSE, scalable_topic_close=close)
        )

    def failed(self, error: MagnetarError) -> None:
        """Call the failure listeners."""
        for listener in list(self._failure_listeners.values()):
            listener(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """Take a layout, or an error in its place."""
        refusal = error_in(frame.command)
        if refusal is None:
            try:
                self._take(frame.command.scalable_topic_update)
            except BrokerError as broken:
                refusal = broken
        first = self._first
        if first is None or first.done():
            # `attach` may not have resumed since the first answer; `again` works then too.
            if refusal is not None:
                self.again(self._refusals.judge(refusal))
        elif refusal is not None:
            first.set_exception(refusal)
        else:
            self._refusals.granted()
            first.set_result(None)

    def connection_lost(self, error: ConnectionLost) -> None:
        """Lose the session, and fail the first answer if it has not come."""
        super().connection_lost(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _take(self, update: pb.CommandScalableTopicUpdate) -> None:
        topic = update.resolved_topic_name or self._resolved_here()
        try:
            layout = layout_of(update.dag, topic)
        except InvalidTopicName as error:
            raise BrokerFailed(
                f"The broker resolved {self._asked} to a name that cannot be: {error}"
            ) from error
        self._topic = topic
        self._controller_url = self._url_of(update.dag)
        last = self._layout
        if last is not None and (layout == last or not layout.may_follow(last)):
            return
        self._layout = layout
        for listener in list(self._listeners.values()):
            listener(layout)

    def _resolved_here(self) -> str:
        return str(parse_topic_name(self._asked).in_domain(TopicDomain.TOPIC))

    def _lookup(self) -> pb.BaseCommand:
        return pb.BaseCommand(
            type=pb.BaseCommand.SCALABLE_TOPIC_LOOKUP,
            scalable_topic_lookup=pb.CommandScalableTopicLookup(
                session_id=self._session_id,
                topic=self._asked,
                # A reconnect must not create a topic again that was deleted.
                create_if_missing=self._create_if_missing and not self._refusals.granted_before,
            ),
        )

    def _url_of(self, dag: pb.ScalableTopicDAG) -> str | None:
        pool, url = self.context.pool, dag.controller_broker_url
        if not pool.tls:
            return url or None
        # 5.0.0-M1 sends no TLS URL.  Without one a lookup finds the broker that serves the topic,
        # which mostly is the same.
        return dag.controller_broker_url_tls or pool.tls_url_of(url)


Listener = TypeVar("Listener")


def _listen(listeners: dict[object, Listener], listener: Listener) -> Callable[[], None]:
    key = object()
    listeners[key] = listener

    def end() -> None:
        listeners.pop(key, None)

    return end
