"""WATCH_SCALABLE_TOPICS: the scalable topics of a namespace, and their changes."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import structlog

from broker.policies.namespaces import Namespaces
from broker.scalable.answers import topics_diff, topics_error, topics_snapshot
from broker.scalable.layout import CorruptLayout
from broker.scalable.records import decode_topic, namespace_path, topic_at
from broker.scalable.topic_store import TopicStore, matches
from broker.scalable.watch import TooManySessions
from broker.topics.client_connection import ClientConnection
from broker.topics.topic_listing import topics_hash
from config.bounds import NAMESPACE_WATCH_COALESCE_S, SESSIONS_PER_CONNECTION
from magnetar.protocol.names import NamespaceName, parse_namespace_name
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.store import Event, EventKind, MetadataStore, Record

log = structlog.get_logger(__name__)

Filters = Sequence[tuple[str, str]]
TurnOf = Callable[[], AbstractAsyncContextManager[None]]
"""Waits for a connection's turn among costly requests; the block is the request."""


class NamespaceWatches:
    """Serves WATCH_SCALABLE_TOPICS: a snapshot of a namespace's topics, then each change.

    With filters only topics with all these properties are listed.  An error is only sent as a first
    answer; a later one closes the connection.
    """

    def __init__(self, metadata: MetadataStore, store: TopicStore, namespaces: Namespaces) -> None:
        self._metadata = metadata
        self._store = store
        self._namespaces = namespaces
        self._tasks: dict[ClientConnection, dict[int, asyncio.Task[None]]] = {}

    def open(
        self,
        connection: ClientConnection,
        watch_id: int,
        namespace: str,
        filters: Filters,
        current_hash: str | None,
        turn_of: TurnOf = nullcontext,
    ) -> None:
        """Send all topics, and each change until the watch is closed.

        The snapshot is left out if the topics still have the hash `current_hash`.  The topics are
        listed in a turn of the connection.
        """
        self.close(connection, watch_id)
        tasks = self._tasks.get(connection)
        if tasks is None:
            tasks = self._tasks[connection] = {}
            connection.on_close(lambda: self._connection_closed(connection))
        if len(tasks) >= SESSIONS_PER_CONNECTION:
            problem = TooManySessions(
                f"This connection watches {len(tasks)} namespaces already: close some."
            )
            connection.send(topics_error(watch_id, problem))
            return
        watch = _Watch(connection, watch_id, filters, turn_of)
        tasks[watch_id] = asyncio.create_task(self._serve(watch, namespace, current_hash))

    def close(self, connection: ClientConnection, watch_id: int) -> None:
        """End one watch.  Unknown watches are ignored."""
        task = self._tasks.get(connection, {}).pop(watch_id, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """End all watches."""
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connection_closed(self, connection: ClientConnection) -> None:
        for task in self._tasks.pop(connection, {}).values():
            task.cancel()

    async def _serve(self, watch: "_Watch", text: str, current_hash: str | None) -> None:
        try:
            namespace = parse_namespace_name(text)
            await self._namespaces.require(namespace)
            await self._follow(watch, namespace, current_hash)
        except MagnetarError as error:
            log.debug("namespace_watch_failed", namespace=text, error=str(error))
            if watch.sent is None:
                watch.connection.send(topics_error(watch.watch_id, error))
            else:
                watch.connection.close(f"the watch of {text} failed: {error}")
        except Exception:
            log.exception("namespace_watch_broken", namespace=text)
            watch.connection.close(f"the watch of {text} broke")
        else:
            watch.connection.close(f"the watch of {text} ended")
        finally:
            watch.cancel_flush()
            # One that was refused is none of those that the connection may have.
            tasks = self._tasks.get(watch.connection, {})
            if tasks.get(watch.watch_id) is asyncio.current_task():
                del tasks[watch.watch_id]

    async def _follow(
        self, watch: "_Watch", namespace: NamespaceName, current_hash: str | None
    ) -> None:
        # The watch is opened before the first listing, so that no change falls between.
        events = self._metadata.watch_children(namespace_path(namespace))
        try:
            async with watch.turn_of():
                watch.begin(await self._names(namespace, watch), current_hash)
            async for event in events:
                if event.kind is EventKind.RESYNC:
                    async with watch.turn_of():
                        names = await self._names(namespace, watch)
                    watch.replace(names)
                else:
                    watch.apply(event)
        finally:
            events.close()

    async def _names(self, namespace: NamespaceName, watch: "_Watch") -> set[str]:
        return {str(name) for name in await self._store.find(namespace, watch.filters)}


class _Watch:
    """The topics that one watch was sent, and those that there are by now."""

    def __init__(
        self, connection: ClientConnection, watch_id: int, filters: Filters, turn_of: TurnOf
    ) -> None:
        self.connection = connection
        self.watch_id = watch_id
        self.filters = filters
        self.turn_of = turn_of
        self.sent: set[str] | None = None
        self._now: set[str] = set()
        self._flush_timer: asyncio.TimerHandle | None = None

    def begin(self, names: set[str], current_hash: str | None) -> None:
        self._now = names
        self.sent = set(names)
        if current_hash != topics_hash(names):
            self.connection.send(topics_snapshot(self.watch_id, names))

    def apply(self, event: Event) -> None:
        name = topic_at(event.key)
        if name is None:
            return
        if event.record is not None and self._passes(event.record):
            self._now.add(str(name))
        else:
            self._now.discard(str(name))
        self._flush_soon()

    def _passes(self, record: Record) -> bool:
        try:
            return matches(decode_topic(record.value).properties, self.filters)
        except CorruptLayout as error:
            log.warning("topic_record_ignored", key=record.key, error=str(error))
            return False

    def replace(self, names: set[str]) -> None:
        self._now = names
        self._flush_soon()

    def cancel_flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None

    def _flush_soon(self) -> None:
        if self._flush_timer is None and self._now != self.sent:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(NAMESPACE_WATCH_COALESCE_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        sent = self.sent or set()
        added, removed = self._now - sent, sent - self._now
        if added or removed:
            self.sent = set(self._now)
            self.connection.send(topics_diff(self.watch_id, added, removed))
