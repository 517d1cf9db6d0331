"""GET_TOPICS_OF_NAMESPACE and the WATCH_TOPIC_LIST family: the regular topics of a namespace.

Rules: listing leaves the pattern to the client (`filtered` is false); watching applies it here,
because clients take the updates as they are.  Segments and scalable topics are never listed.
"""

from collections.abc import Mapping

from broker.scalable.namespace_watch import topics_hash
from broker.wire.connection import Connection, Handler
from broker.wire.topic_watch import TopicListWatch, require_room
from magnetar.protocol.names import parse_namespace_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandGetTopicsOfNamespace,
    CommandGetTopicsOfNamespaceResponse,
    CommandSuccess,
)


async def topics_of_namespace(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """GET_TOPICS_OF_NAMESPACE: every persistent topic, partitions each; none if unchanged."""
    request = command.get_topics_of_namespace
    namespace = parse_namespace_name(request.namespace)
    names: list[str] = []
    if request.mode != CommandGetTopicsOfNamespace.NON_PERSISTENT:
        names = await connection.broker.topics.list_names(namespace)
    known = topics_hash(names)
    changed = request.topics_hash != known
    connection.send(
        BaseCommand(
            type=BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE,
            get_topics_of_namespace_response=CommandGetTopicsOfNamespaceResponse(
                request_id=request.request_id,
                topics=names if changed else (),
                filtered=False,
                topics_hash=known,
                changed=changed,
            ),
        )
    )


async def watch_topic_list(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """WATCH_TOPIC_LIST: what matches now, then every change.  The same id again starts anew."""
    request = command.watch_topic_list
    require_room(connection, request.watcher_id)
    watch = TopicListWatch(connection, request)
    connection.topic_watches[request.watcher_id] = watch
    try:
        await watch.start(request)
    except BaseException:
        watch.close()
        connection.topic_watches.pop(request.watcher_id, None)
        raise


def close_topic_list_watch(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """WATCH_TOPIC_LIST_CLOSE: answered even if there is no such watch."""
    request = command.watch_topic_list_close
    watch = connection.topic_watches.pop(request.watcher_id, None)
    if watch is not None:
        watch.close()
    connection.send(
        BaseCommand(type=BaseCommand.SUCCESS, success=CommandSuccess(request_id=request.request_id))
    )


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.GET_TOPICS_OF_NAMESPACE: topics_of_namespace,
    BaseCommand.WATCH_TOPIC_LIST: watch_topic_list,
    BaseCommand.WATCH_TOPIC_LIST_CLOSE: close_topic_list_watch,
}
