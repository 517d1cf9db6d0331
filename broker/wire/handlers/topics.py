"""Regular topics of a namespace: GET_TOPICS_OF_NAMESPACE and the WATCH_TOPIC_LIST family.

Segments and scalable topics are never listed.
"""

from collections.abc import Mapping

from broker.scalable.namespace_watch import topics_hash
from broker.wire.connection import Connection, Handler
from broker.wire.topic_watch import TopicListWatch, require_watch_capacity
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
    """GET_TOPICS_OF_NAMESPACE: all persistent topics, one for each partition; none if unchanged.

    The client applies its pattern itself (`filtered` is false).
    """
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
    """WATCH_TOPIC_LIST: send the matching topics, then every change.

    The pattern is applied here, because clients take the updates as they are.  A watch of the same
    id is replaced.
    """
    request = command.watch_topic_list
    require_watch_capacity(connection, request.watcher_id)
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
    """WATCH_TOPIC_LIST_CLOSE: close a watch; answered even if there is none."""
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
