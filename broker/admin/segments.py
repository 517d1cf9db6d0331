"""`/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}`: what brokers ask each other.

Rules:

- The segment's owner answers; anybody else sends on to it (307).  A segment that nobody owns is
  taken by who is asked with `authoritative=true`, as brokers do that have chosen him.
- Paths, methods and status codes are Pulsar's internal resource; GET of a segment, its `/stats` and
  `/internalStats`, and the feed are ours.  An error's body has its code beside the sentence, so
  that the broker that asked raises the same error.
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
    body_of,
    flag,
    mapping_of,
    no_content,
    number,
    refused,
    status_of,
)
from broker.admin.topic_stats import internal_stats
from broker.scalable.feed import Follower
from broker.scalable.local_segments import LocalSegments
from broker.scalable.remote_segments import FEED_PATH, SEGMENTS_PATH
from broker.topic import SubscriptionNotFound
from config.bounds import FEED_HEARTBEAT_S
from protocol.ids import EARLIEST, LATEST
from protocol.names import SegmentName, parse_topic_name, segment_name
from protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)

SEGMENT = SEGMENTS_PATH + "/{tenant}/{namespace}/{topic}/{descriptor}"
OFFLOAD = SEGMENT + "/offload"
SUBSCRIPTION = SEGMENT + "/subscription/{subscription}"

SegmentHandler = Callable[[web.Request, LocalSegments, SegmentName], Awaitable[web.Response]]
_STARTS = {"earliest": EARLIEST, "latest": LATEST}


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(SEGMENT, get),
        web.put(SEGMENT, create),
        web.delete(SEGMENT, delete),
        web.post(SEGMENT + "/terminate", terminate),
        web.get(SEGMENT + "/stats", stats),
        web.get(SEGMENT + "/internalStats", stats_of_ledgers),
        web.put(OFFLOAD, offload),
        web.get(OFFLOAD + "/manifest", offload_manifest),
        web.post(OFFLOAD + "/dropHot", drop_hot),
        web.put(SUBSCRIPTION, create_subscription),
        web.delete(SUBSCRIPTION, delete_subscription),
        web.get(SUBSCRIPTION + "/backlog", backlog),
        web.post(SUBSCRIPTION + "/seek", seek),
        web.post(SUBSCRIPTION + "/skip-all", skip_all),
        web.get(FEED_PATH, feed),
    ]


def _at_owner(handler: SegmentHandler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    @wraps(handler)
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            segment = _segment_of(request)
            await require_here(request, segment.topic_name)
            return await handler(request, request.app[BROKER].scalable.local_segments, segment)
        except MagnetarError as error:
            answer = {"reason": str(error), "code": int(error.code)}
            return web.json_response(answer, status=status_of(error))

    return handle


def _segment_of(request: web.Request) -> SegmentName:
    parts = (request.match_info[key] for key in ("tenant", "namespace", "topic", "descriptor"))
    return segment_name(parse_topic_name("segment://" + "/".join(parts)))


def _subscription_of(request: web.Request) -> str:
    return request.match_info["subscription"]


@_at_owner
async def get(request: web.Request, segments: LocalSegments, segment: SegmentName) -> web.Response:
    """GET `?load=false`: what is told of it; {} if it is not loaded and is not to be."""
    if request.query.get("load") == "false":
        view = await segments.view_of_running(segment)
        return web.json_response({} if view is None else view.to_json())
    return web.json_response((await segments.view(segment)).to_json())


@_at_owner
async def create(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """PUT `["subscription", ...]`: have it, with these subscriptions at Earliest."""
    names = await body_of(request)
    if names is not None and not isinstance(names, list):
        raise refused("The body must be a list of subscriptions.")
    await segments.open(segment)
    for name in names or ():
        await segments.create_subscription(segment, str(name), EARLIEST, {})
    return no_content()


@_at_owner
async def delete(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """DELETE: everything of a segment that no layout names."""
    await segments.delete(segment)
    return no_content()


@_at_owner
async def terminate(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """POST: seal it, once its producers have finished; answered when that is done."""
    await segments.seal(segment)
    return no_content()


@_at_owner
async def stats(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: what is counted there."""
    return web.json_response(await segments.stats(segment))


@_at_owner
async def stats_of_ledgers(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: its ledgers and cursors, as `internalStats` of a topic has them."""
    return web.json_response(internal_stats(await segments.open(segment)))


@_at_owner
async def offload(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """PUT `?url=`: copy what has ended; all of it, once the segment is sealed."""
    await segments.offload(segment, request.query.get("url"))
    return no_content()


@_at_owner
async def offload_manifest(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: how that stands, and every ledger with what is known of its copy."""
    return web.json_response(await segments.offload_manifest(segment))


@_at_owner
async def drop_hot(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """POST `[ledger id, ...]` or nothing: delete the ledgers whose copy is whole."""
    return web.json_response(await segments.drop_hot(segment, await ledger_ids_of(request)))


@_at_owner
async def create_subscription(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """PUT `?start=earliest|latest`, properties as body: unless it exists."""
    start = _STARTS.get(request.query.get("start", "earliest"))
    if start is None:
        raise refused("start is unknown: give earliest or latest.")
    properties = {key: str(value) for key, value in (await mapping_of(request)).items()}
    await segments.create_subscription(segment, _subscription_of(request), start, properties)
    return no_content()


@_at_owner
async def delete_subscription(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """DELETE `?force=true`."""
    name = _subscription_of(request)
    await segments.delete_subscription(segment, name, force=flag(request, "force"))
    return no_content()


@_at_owner
async def backlog(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """GET: a number."""
    name = _subscription_of(request)
    found = (await segments.view(segment)).subscriptions.get(name)
    if found is None:
        raise SubscriptionNotFound(f"{segment} has no subscription {name!r}: see its topic's.")
    return web.json_response(found.backlog)


@_at_owner
async def seek(request: web.Request, segments: LocalSegments, segment: SegmentName) -> web.Response:
    """POST `?timestamp=ms`: the first message published then or later; 0 is Earliest."""
    timestamp_ms, name = number(request, "timestamp"), _subscription_of(request)
    if timestamp_ms <= 0:
        await segments.seek(segment, name, EARLIEST)
    else:
        await segments.seek_to_time(segment, name, timestamp_ms)
    return no_content()


@_at_owner
async def skip_all(
    request: web.Request, segments: LocalSegments, segment: SegmentName
) -> web.Response:
    """POST: nothing published so far is delivered any more."""
    await segments.seek(segment, _subscription_of(request), LATEST)
    return no_content()


# The feed


async def feed(request: web.Request) -> web.StreamResponse:
    """A WebSocket by which another broker follows topics; see `broker.scalable.feed`."""
    feeds = request.app[BROKER].scalable.feeds
    socket = web.WebSocketResponse(heartbeat=FEED_HEARTBEAT_S)
    await socket.prepare(request)
    follower = feeds.connect()
    telling = asyncio.create_task(_tell(follower, socket))
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            feeds.hear(follower, str(message.data))
    except ConnectionResetError:
        log.debug("segment_feed_cut", remote=request.remote)
    finally:
        feeds.disconnect(follower)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    return socket


async def end_feeds(app: web.Application) -> None:
    """The server stops: who follows is to look elsewhere, and nobody is waited for."""
    app[BROKER].scalable.feeds.stop()


async def _tell(follower: Follower, socket: web.WebSocketResponse) -> None:
    try:
        while (batch := await follower.next_batch()) is not None:
            await socket.send_str(batch)
    except ConnectionError:
        return
    except Exception:
        # Closed, as it would hear nothing more and not know it.
        log.exception("segment_feed_broken")
    await socket.close()
