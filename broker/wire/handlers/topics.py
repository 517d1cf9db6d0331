"""Regular topics of a namespace: GET_TOPICS_OF_NAMESPACE and the WATCH_TOPIC_LIST family.

Segments and scalable topics are never listed.
"""

import struct
from collections.abc import Mapping

from broker.topics.topic_listing import MatchingTopics, TopicListing, listing_of
from broker.wire.connection import Connection, Handler
from broker.wire.topic_pattern import UnsupportedPattern
from broker.wire.topic_watch import (
    TopicListWatch,
    matching_topics,
    require_watch_capacity,
    without_domain,
)
from magnetar.protocol.names import parse_namespace_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandGetTopicsOfNamespace,
    CommandGetTopicsOfNamespaceResponse,
    CommandSuccess,
)

NO_TOPICS = listing_of(())
_SIZES = struct.Struct(">II")
_LENGTH_DELIMITED = 2
_RESPONSE_TAG = BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


async def topics_of_namespace(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """GET_TOPICS_OF_NAMESPACE: the topics of a mode, one for each partition; none if unchanged.

    The names that match the client's pattern, if that is one that is evaluated here (`filtered`);
    else the client applies it.
    """
    request = command.get_topics_of_namespace
    namespace = parse_namespace_name(request.namespace)
    topics = connection.broker.topics
    arrival = topics.listings.arrival()
    async with connection.costly():
        listing = NO_TOPICS
        if request.mode != CommandGetTopicsOfNamespace.NON_PERSISTENT:
            listing = await topics.listings.get(namespace, arrival)
        if request.mode != CommandGetTopicsOfNamespace.PERSISTENT:
            others = await topics.non_persistent.list_names(namespace)
            if others:
                listing = listing_of(sorted((*listing.names, *others)))
        matching = await _matching(listing, request.topics_pattern)
        if matching is not None:
            _answer_matching(connection, request, matching)
            return
        unchanged = request.topics_hash == listing.hash
        shared = listing.unchanged if unchanged else listing.encoded
        connection.send_encoded(_head_of_response(request.request_id, len(shared)), shared)


async def _matching(listing: TopicListing, pattern: str) -> MatchingTopics | None:
    """The names that match a pattern; None without one, and for one that is not supported."""
    if not pattern:
        return None
    try:
        return await matching_topics(listing, without_domain(pattern))
    except UnsupportedPattern:
        return None


def _answer_matching(
    connection: Connection, request: CommandGetTopicsOfNamespace, matching: MatchingTopics
) -> None:
    changed = request.topics_hash != matching.hash
    response = CommandGetTopicsOfNamespaceResponse(
        request_id=request.request_id,
        topics=matching.names if changed else (),
        filtered=True,
        topics_hash=matching.hash,
        changed=changed,
    )
    connection.send(
        BaseCommand(
            type=BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE,
            get_topics_of_namespace_response=response,
        )
    )


def _head_of_response(request_id: int, shared_bytes: int) -> bytes:
    """The bytes of the answer's frame before those that all connections share."""
    own = CommandGetTopicsOfNamespaceResponse(request_id=request_id).SerializePartialToString()
    kind = BaseCommand(type=BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE).SerializeToString()
    field = _varint(_RESPONSE_TAG) + _varint(len(own) + shared_bytes)
    size = len(kind) + len(field) + len(own) + shared_bytes
    return _SIZES.pack(size + 4, size) + kind + field + own


def _varint(value: int) -> bytes:
    """An unsigned number as Protocol Buffers encode it: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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
        # A later watch may have its id by now.
        if connection.topic_watches.get(request.watcher_id) is watch:
            del connection.topic_watches[request.watcher_id]
        raise


async def close_topic_list_watch(
    connection: Connection, command: BaseCommand, entry: bytes | None
) -> None:
    """WATCH_TOPIC_LIST_CLOSE: close a watch; answered even if there is none.

    It is a task, as the watch that it closes: that may have come in the same read, and begins
    first.
    """
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
