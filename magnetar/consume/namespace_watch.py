"""Follows which scalable topics a namespace has, over reconnects.

Rules:

- Any broker is asked (WATCH_SCALABLE_TOPICS); it tells all topics that have the properties asked
  for, and then what came and what went.
- After a reconnect the hash of what is known goes along; a broker where nothing changed says
  nothing then, so silence is an answer.
- Listeners are told of what came and went, in the turn in which it is told; of a snapshot only the
  difference.
- An error, once topics were told, is not the end (`Refusals`).
"""

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from magnetar.bounds import NAMESPACE_QUIET_S, NAMESPACE_TOPICS
from magnetar.consume.known_topics import Change, KnownTopics
from magnetar.context import ClientContext
from magnetar.errors import (
    BrokerError,
    ConnectionLost,
    MagnetarError,
    NotSupported,
    OperationTimedOut,
)
from magnetar.refusals import Refusals
from magnetar.wire.attachment import Attachment
from magnetar.wire.connection import Connection, PeerKind
from magnetar.wire.requests import error_in
from protocol import pulsar_pb2 as pb
from protocol.frames import Frame
from protocol.names import parse_namespace_name

__all__ = ["NamespaceWatch"]

ChangeListener = Callable[[Change], None]
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


class NamespaceWatch(Attachment):
    """See the module's rules."""

    def __init__(
        self,
        context: ClientContext,
        namespace: str,
        properties: Mapping[str, str] = _NO_PROPERTIES,
        *,
        changed: ChangeListener,
        ended: Callable[[MagnetarError], None],
    ) -> None:
        """Of `tenant/namespace`.  `changed` is told of every change, the first snapshot included;
        `ended` why the watch ended by itself, should it.  Raises `InvalidNamespaceName`.
        """
        super().__init__(context)
        self._namespace: Final = str(parse_namespace_name(namespace))
        self._properties: Final = dict(properties)
        self._watch_id: Final = context.ids.session_id()
        self._changed: Final = changed
        self._ended: Final = ended
        self._known = KnownTopics()
        self._refusals = Refusals()
        self._first: asyncio.Future[None] | None = None

    @property
    def topics(self) -> frozenset[str]:
        """The names that are known: `topic://...`."""
        return self._known.names

    # Attachment

    def describe(self) -> str:
        """What it is."""
        return f"The watch of the topics of {self._namespace}"

    async def find(self) -> Connection:
        """Any broker."""
        return await self.context.pool.any()

    async def attach(self, connection: Connection) -> None:
        """Ask; until the first snapshot."""
        if not connection.features.supports_scalable_topics:
            raise NotSupported(
                f"The broker at {connection.address} has no scalable topics; switch them on there "
                "(Apache Pulsar: scalableTopicsEnabled), or use a broker of version 5."
            )
        connection.attach(PeerKind.NAMESPACE, self._watch_id, self)
        silence_says_no = self._refusals.granted_before
        timeout_s = self.context.settings.operation_timeout_s
        self._first = first = self.context.loop.create_future()
        try:
            connection.send(self._watch())
            async with asyncio.timeout(NAMESPACE_QUIET_S if silence_says_no else timeout_s):
                await first
        except TimeoutError:
            if not silence_says_no:
                raise OperationTimedOut(
                    f"The broker has not told the topics of {self._namespace} within "
                    f"{timeout_s:g} s; look whether it is overloaded, or allow more by "
                    "operation_timeout_s."
                ) from None
        except BrokerError as error:
            raise self._refusals.judge(error) from error
        finally:
            self._first = None

    async def leave(self, connection: Connection) -> None:
        """End the watch; the broker does not answer that."""
        close = pb.CommandWatchScalableTopicsClose(watch_id=self._watch_id)
        connection.send(
            pb.BaseCommand(
                type=pb.BaseCommand.WATCH_SCALABLE_TOPICS_CLOSE, watch_scalable_topics_close=close
            )
        )

    def failed(self, error: MagnetarError) -> None:
        """The watch has ended by itself."""
        self._ended(error)

    # Handler

    def received(self, frame: Frame) -> None:
        """Topics, or why there are none."""
        refusal = error_in(frame.command)
        if refusal is not None:
            self._refused(refusal)
            return
        self._refusals.granted()
        change = self._take(frame.command.watch_scalable_topics_update)
        if len(self.topics) > NAMESPACE_TOPICS:
            self._refused(_too_many(self._namespace, len(self.topics)))
            return
        if change:
            self._changed(change)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def connection_lost(self, error: ConnectionLost) -> None:
        """The watch is gone with it."""
        super().connection_lost(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _refused(self, error: BrokerError | NotSupported) -> None:
        if self._first is not None:
            if not self._first.done():
                self._first.set_exception(error)
        else:
            self.again(error if isinstance(error, NotSupported) else self._refusals.judge(error))

    def _take(self, update: pb.CommandWatchScalableTopicsUpdate) -> Change:
        if update.HasField("diff"):
            return self._known.apply(update.diff.added, update.diff.removed)
        return self._known.replace(update.snapshot.topics)

    def _watch(self) -> pb.BaseCommand:
        watch = pb.CommandWatchScalableTopics(watch_id=self._watch_id, namespace=self._namespace)
        for key, value in sorted(self._properties.items()):
            watch.property_filters.add(key=key, value=value)
        known = self._known.hash
        if known is not None:
            watch.current_hash = known
        return pb.BaseCommand(
            type=pb.BaseCommand.WATCH_SCALABLE_TOPICS, watch_scalable_topics=watch
        )


def _too_many(namespace: str, count: int) -> NotSupported:
    return NotSupported(
        f"Namespace {namespace} has {count} topics that match, and one consumer takes at most "
        f"{NAMESPACE_TOPICS}; use properties to choose among them, or consumers of topics."
    )
