"""Segments over REST, for operators.

Paths begin with `/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}`.

Paths, methods and status codes are those of Pulsar's internal resource; GET of a segment, its
`/stats` and `/internalStats` are Magnetar's own.  The owner of a segment serves its requests; other
brokers redirect (307) to it.  A broker that is asked with `authoritative=true` takes a segment that
nobody owns.
"""

from collections.abc import Awaitable, Callable
from functools import wraps

import structlog
from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.offload import ledger_ids_of
from broker.admin.redirect import require_here
from broker.admin.rest import (
    Handler,
    body_of,
    flag,
    no_content,
    number,
    refused,
    shortened,
    status_of,
    subscription_properties_in,
    topic_of,
)
from broker.placement.typed_request import encode
from broker.scalable.local_segments import LocalSegments
from broker.scalable.segment_requests import (
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
    SkipSegmentBacklog,
    ViewRunningSegment,
    ViewSegment,
)
from broker.topics.compaction.reserved import require_of_clients
from broker.topics.internal_stats import internal_stats
from broker.topics.topic import LIST_SUBSCRIPTIONS, SubscriptionNotFound
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName, TopicDomain, parse_topic_name, segment_name
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
    ]


def errors_with_code(handler: Handler) -> Handler:
    """Answer errors with their code beside the sentence."""

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
    topic, descriptor = topic_of(request, TopicDomain.TOPIC), request.match_info["descriptor"]
    text = f"segment://{topic.namespace_name}/{topic.local_name}/{descriptor}"
    name = segment_name(parse_topic_name(text))
    if name.parent != topic:
        raise refused(f"{shortened(repr(descriptor))} is no segment: give START-END-ID.")
    return name


def _subscription_of(request: web.Request) -> str:
    return request.match_info["subscription"]


# Typed requests, from paths and queries


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
    if flag(request, "replicated"):
        name = segment.parent
        raise refused(
            "A subscription moves in other clusters with all segments of its topic: send this to "
            f"PUT /admin/v2/scalable/{name.namespace_name}/{name.local_name}/subscriptions/"
            f"{_subscription_of(request)}?replicated=true."
        )
    properties = subscription_properties_in(await body_of(request))
    require_of_clients(_subscription_of(request))
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
    return SkipSegmentBacklog(segment, _subscription_of(request))


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


# Requests of operators only


@_at_owner
async def create(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """PUT, `["subscription", ...]` as body: load a segment, and create these at Earliest."""
    names = await body_of(request)
    if names is None:
        names = []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused('The body must be a list of subscriptions: send ["name"].')
    for name in names:
        require_of_clients(name)
    await segments.open(segment)
    for name in names:
        await segments.create_subscription(segment, name, EARLIEST, {})
    return no_content()


@_at_owner
async def stats_of_ledgers(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: ledgers and cursors, as in `internalStats` of a topic."""
    return web.json_response(await internal_stats(await segments.open(segment)))


@_at_owner
async def backlog(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: the number of entries in the backlog of a subscription."""
    name = _subscription_of(request)
    found = (await segments.view(segment)).subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(f"{segment} has no subscription {name!r}: {LIST_SUBSCRIPTIONS}")
    return web.json_response(found.backlog)
