"""Segments over REST: for operators by their paths, for other brokers as typed requests.

`/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}` and `/admin/v2/segment-requests`.

Paths, methods and status codes are those of Pulsar's internal resource; GET of a segment, its
`/stats` and `/internalStats`, and the feed are Magnetar's own.  The owner of a segment serves its
requests; other brokers redirect (307) to it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

import structlog
from aiohttp import WSMsgType, web

from broker.admin.keys import BROKER
from broker.admin.offload import ledger_ids_of
from broker.admin.redirect import require_here
from broker.admin.rest import (
    Handler,
    body_of,
    flag,
    mapping_of,
    no_content,
    number,
    refused,
    status_of,
)
from broker.admin.topic_stats import internal_stats
from broker.placement.typed_request import MalformedRequest, encode
from broker.scalable.feed import FEED_PATH, Follower
from broker.scalable.local_segments import LocalSegments
from broker.scalable.segment_requests import (
    SEGMENT_REQUESTS,
    CreateSubscription,
    DeleteSegment,
    DeleteSubscription,
    DropHotLedgers,
    OffloadManifest,
    OffloadSegment,
    SealSegment,
    SeekSubscription,
    SeekSubscriptionToTime,
    SegmentRequest,
    SegmentStats,
    ViewRunningSegment,
    ViewSegment,
)
from broker.scalable.segments import SEGMENT_REQUESTS_PATH
from broker.topics.topic import SubscriptionNotFound
from config.bounds import FEED_HEARTBEAT_S
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName, parse_topic_name, segment_name
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

SEGMENT = "/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}"
OFFLOAD = SEGMENT + "/offload"
SUBSCRIPTION = SEGMENT + "/subscription/{subscription}"

RequestOf = Callable[[web.Request, SegmentName], Awaitable[SegmentRequest[object]]]
SegmentHandler = Callable[[web.Request, LocalSegments, SegmentName], Awaitable[web.Response]]
_STARTS = {"earliest": EARLIEST, "latest": LATEST}


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(SEGMENT, _handler_of(_view)),
        web.put(SEGMENT, create),
        web.delete(SEGMENT, _handler_of(_delete)),
        web.post(SEGMENT + "/terminate", _handler_of(_terminate)),
        web.get(SEGMENT + "/stats", _handler_of(_stats)),
        web.get(SEGMENT + "/internalStats", stats_of_ledgers),
        web.put(OFFLOAD, _handler_of(_offload)),
        web.get(OFFLOAD + "/manifest", _handler_of(_offload_manifest)),
        web.post(OFFLOAD + "/dropHot", _handler_of(_drop_hot)),
        web.put(SUBSCRIPTION, _handler_of(_create_subscription)),
        web.delete(SUBSCRIPTION, _handler_of(_delete_subscription)),
        web.get(SUBSCRIPTION + "/backlog", backlog),
        web.post(SUBSCRIPTION + "/seek", _handler_of(_seek)),
        web.post(SUBSCRIPTION + "/skip-all", _handler_of(_skip_all)),
        web.post(SEGMENT_REQUESTS_PATH + "/{kind}", requests_of_brokers),
        web.get(FEED_PATH, feed),
    ]


def errors_with_code(handler: Handler) -> Handler:
    """Answer errors with code and sentence, so that a requesting broker raises the same error."""

    @wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except MagnetarError as error:
            answer = {"reason": str(error), "code": int(error.code)}
            return web.json_response(answer, status=status_of(error))

    return handle


def _at_owner(handler: SegmentHandler) -> Handler:
    @wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        segment = _segment_of(request)
        await require_here(request, segment.topic_name)
        return await handler(request, request.app[BROKER].scalable.local_segments, segment)

    return errors_with_code(handle)


def _segment_of(request: web.Request) -> SegmentName:
    parts = (request.match_info[key] for key in ("tenant", "namespace", "topic", "descriptor"))
    return segment_name(parse_topic_name("segment://" + "/".join(parts)))


def _subscription_of(request: web.Request) -> str:
    return request.match_info["subscription"]


# Requests of operators, and of brokers


async def _view(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """GET `?load=false`: the state of a segment; {} if it is neither loaded nor to be loaded."""
    running = request.query.get("load") == "false"
    return ViewRunningSegment(segment) if running else ViewSegment(segment)


async def _delete(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """DELETE: delete a segment that no layout names, with all its data."""
    return DeleteSegment(segment)


async def _terminate(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """POST: seal a segment once its producers have finished, and answer then."""
    return SealSegment(segment)


async def _stats(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """GET: the counters of a segment."""
    return SegmentStats(segment)


async def _offload(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """PUT `?url=`: copy closed ledgers; those of a sealed segment are all closed."""
    return OffloadSegment(segment, request.query.get("url"))


async def _offload_manifest(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """GET: the state of the offload, and every ledger with its copy."""
    return OffloadManifest(segment)


async def _drop_hot(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """POST, `[ledger id, ...]` or nothing as body: delete ledgers with a complete copy."""
    return DropHotLedgers(segment, await ledger_ids_of(request))


async def _create_subscription(
    request: web.Request, segment: SegmentName
) -> SegmentRequest[object]:
    """PUT `?start=earliest|latest`, properties as body: create a subscription if it is missing."""
    start = _STARTS.get(request.query.get("start", "earliest"))
    if start is None:
        raise refused("start is unknown: give earliest or latest.")
    properties = {key: str(value) for key, value in (await mapping_of(request)).items()}
    return CreateSubscription(segment, _subscription_of(request), start, properties)


async def _delete_subscription(
    request: web.Request, segment: SegmentName
) -> SegmentRequest[object]:
    """DELETE `?force=true`: delete a subscription."""
    return DeleteSubscription(segment, _subscription_of(request), flag(request, "force"))


async def _seek(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """POST `?timestamp=ms`: seek to the first message published then or later; 0 is Earliest."""
    timestamp_ms, name = number(request, "timestamp"), _subscription_of(request)
    if timestamp_ms <= 0:
        return SeekSubscription(segment, name, EARLIEST)
    return SeekSubscriptionToTime(segment, name, timestamp_ms)


async def _skip_all(request: web.Request, segment: SegmentName) -> SegmentRequest[object]:
    """POST: skip all messages that were published so far."""
    return SeekSubscription(segment, _subscription_of(request), LATEST)


def _handler_of(make: RequestOf) -> Handler:
    """Build a handler that runs the typed request that `make` reads, and answers its result."""

    @_at_owner
    async def handle(
        request: web.Request, segments: LocalSegments, segment: SegmentName
    ) -> web.Response:
        asked = await make(request, segment)
        answer = encode(await asked.run(segments))
        if isinstance(asked, ViewRunningSegment) and answer is None:
            answer = {}
        return no_content() if answer is None else web.json_response(answer)

    return handle


@errors_with_code
async def requests_of_brokers(request: web.Request) -> web.StreamResponse:
    """POST, the fields of a typed request as body: run it.

    See `broker.scalable.segment_requests`.
    """
    kind = request.match_info["kind"]
    known = SEGMENT_REQUESTS.get(kind)
    if known is None:
        raise MalformedRequest(
            f"{kind!r} is no request about a segment here: run the same version of the broker "
            "everywhere."
        )
    asked = known.from_json(await body_of(request))
    await require_here(request, asked.segment.topic_name)
    segments = request.app[BROKER].scalable.local_segments
    return web.json_response(encode(await asked.run(segments)))


# Requests of operators alone


@_at_owner
async def create(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """PUT, `["subscription", ...]` as body: load a segment, and create these at Earliest."""
    names = await body_of(request)
    if names is not None and not isinstance(names, list):
        raise refused("The body must be a list of subscriptions.")
    await segments.open(segment)
    for name in names or ():
        await segments.create_subscription(segment, str(name), EARLIEST, {})
    return no_content()


@_at_owner
async def stats_of_ledgers(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: ledgers and cursors, as in `internalStats` of a topic."""
    return web.json_response(internal_stats(await segments.open(segment)))


@_at_owner
async def backlog(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: the number of entries in the backlog of a subscription."""
    name = _subscription_of(request)
    found = (await segments.view(segment)).subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(f"{segment} has no subscription {name!r}: see its topic's.")
    return web.json_response(found.backlog)


# The feed


async def feed(request: web.Request) -> web.StreamResponse:
    """GET: a WebSocket by which another broker follows topics; see `broker.scalable.feed`."""
    feeds = request.app[BROKER].scalable.feeds
    socket = web.WebSocketResponse(heartbeat=FEED_HEARTBEAT_S)
    await socket.prepare(request)
    follower = feeds.connect()
    sending = asyncio.create_task(_send_batches(follower, socket))
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            feeds.hear(follower, str(message.data))
    except ConnectionResetError:
        log.debug("segment_feed_cut", remote=request.remote)
    finally:
        feeds.disconnect(follower)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return socket


async def end_feeds(app: web.Application) -> None:
    """End all feeds when the server stops, without waiting for followers."""
    app[BROKER].scalable.feeds.stop()


async def _send_batches(follower: Follower, socket: web.WebSocketResponse) -> None:
    try:
        while (batch := await follower.next_batch()) is not None:
            await socket.send_str(batch)
    except ConnectionError:
        return
    except Exception:
        # Closed below, because the follower would get nothing more without noticing it.
        log.exception("segment_feed_broken")
    await socket.close()
