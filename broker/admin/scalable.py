"""`/admin/v2/scalable/{tenant}/{namespace}[/{topic}]`: scalable topics.

Status codes are the documented ones (404 for what does not exist, 409 for what exists already, 412
for what cannot be done now), also where Apache Pulsar 5.0.0-M1 answers 500.  Changes of a topic,
and its statistics, are redirected (307) to the broker that leads it; any broker serves the rest.
"""

from http import HTTPStatus

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.redirect import require_here
from broker.admin.rest import (
    RestError,
    flag,
    mapping_of,
    namespace_of,
    no_content,
    number,
    refused,
    topic_of,
)
from magnetar.protocol.ids import EARLIEST, SegmentId
from magnetar.protocol.names import TopicName

BASE = "/admin/v2/scalable/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"
SUBSCRIPTION = TOPIC + "/subscriptions/{subscription}"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_topics),
        web.put(TOPIC, create),
        web.get(TOPIC, get),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/history", history),
        web.post(TOPIC + "/split/{segment}", split),
        web.post(TOPIC + "/merge/{first}/{second}", merge),
        web.put(TOPIC + "/offload", offload),
        web.get(TOPIC + "/offload/manifest", offload_manifests),
        web.post(TOPIC + "/offload/dropHot", drop_hot),
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.put(SUBSCRIPTION, create_subscription),
        web.delete(SUBSCRIPTION, delete_subscription),
        web.post(SUBSCRIPTION + "/seek", seek),
        web.post(SUBSCRIPTION + "/skip-all", skip_all),
        web.get(TOPIC + "/autoScalePolicy", auto_scale_policy),
        web.post(TOPIC + "/autoScalePolicy", refuse_auto_scale),
        web.delete(TOPIC + "/autoScalePolicy", delete_auto_scale_policy),
    ]


def _name(request: web.Request) -> TopicName:
    return topic_of(request, "topic")


async def _topic_at_leader(request: web.Request) -> TopicName:
    """The existing topic in the path; the request is redirected unless this broker may lead it."""
    name = _name(request)
    await request.app[BROKER].scalable.get(name)
    await require_here(request, name)
    return name


async def list_topics(request: web.Request) -> web.Response:
    """GET `?property=k=v`: names of topics with all these properties."""
    filters: dict[str, str] = {}
    for text in request.query.getall("property", []):
        key, sign, value = text.partition("=")
        if not (key and sign):
            raise refused(f"The filter {text!r} is not of the form key=value.")
        filters[key] = value
    broker = request.app[BROKER]
    await broker.namespaces.require(namespace_of(request))
    return web.json_response(await broker.scalable.list(namespace_of(request), filters))


async def create(request: web.Request) -> web.Response:
    """PUT `?numInitialSegments=N`, properties as body: create a topic."""
    segments = number(request, "numInitialSegments", 1)
    if segments < 1:
        raise refused(f"numInitialSegments = {segments} is too small: give 1 or more.")
    properties = await mapping_of(request)
    if not all(isinstance(value, str) for value in properties.values()):
        raise RestError(HTTPStatus.BAD_REQUEST, "Properties must be strings.")
    broker = request.app[BROKER]
    await broker.namespaces.require(namespace_of(request))
    await broker.scalable.create(
        _name(request),
        segments=segments,
        properties={key: str(value) for key, value in properties.items()},
    )
    return no_content()


async def get(request: web.Request) -> web.Response:
    """GET: the layout."""
    record = await request.app[BROKER].scalable.get(_name(request))
    return web.json_response(record.to_json())


async def delete(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the topic."""
    name = await _topic_at_leader(request)
    await request.app[BROKER].scalable.delete(name, force=flag(request, "force"))
    return no_content()


async def stats(request: web.Request) -> web.Response:
    """GET: layout, rates, subscriptions."""
    return web.json_response(
        await request.app[BROKER].scalable.stats(await _topic_at_leader(request))
    )


async def history(request: web.Request) -> web.Response:
    """GET: all splits, merges, prunings and moves, oldest first."""
    entries = await request.app[BROKER].scalable.history(_name(request))
    return web.json_response([entry.to_json() for entry in entries])


async def split(request: web.Request) -> web.Response:
    """POST: split one ACTIVE segment."""
    await request.app[BROKER].scalable.split(
        await _topic_at_leader(request), SegmentId(number(request, "segment"))
    )
    return no_content()


async def merge(request: web.Request) -> web.Response:
    """POST: merge two adjacent ACTIVE segments."""
    await request.app[BROKER].scalable.merge(
        await _topic_at_leader(request),
        SegmentId(number(request, "first")),
        SegmentId(number(request, "second")),
    )
    return no_content()


async def offload(request: web.Request) -> web.Response:
    """PUT `?url=`: copy the closed ledgers of every segment; answer with the segments."""
    scalable = request.app[BROKER].scalable
    asked = await scalable.offload(_name(request), request.query.get("url"))
    return web.json_response(list(asked))


async def offload_manifests(request: web.Request) -> web.Response:
    """GET: for each segment the state of its offload, and its copies."""
    found = await request.app[BROKER].scalable.offload_manifests(_name(request))
    return web.json_response({"segments": {str(each): found[each] for each in sorted(found)}})


async def drop_hot(request: web.Request) -> web.Response:
    """POST: delete all ledgers with a complete copy; answer with them, for each segment."""
    found = await request.app[BROKER].scalable.drop_hot(_name(request))
    return web.json_response({str(each): list(found[each]) for each in sorted(found)})


async def list_subscriptions(request: web.Request) -> web.Response:
    """GET: the names of all durable subscriptions."""
    answer = await request.app[BROKER].scalable.stats(await _topic_at_leader(request))
    subscriptions = answer.get("subscriptions")
    return web.json_response(sorted(subscriptions) if isinstance(subscriptions, dict) else [])


async def create_subscription(request: web.Request) -> web.Response:
    """PUT `?type=STREAM|QUEUE`: create a subscription, at Earliest on every ACTIVE segment."""
    kind = request.query.get("type", "STREAM").upper()
    if kind not in {"STREAM", "QUEUE"}:
        raise refused(f"type = {kind!r} is unknown: give STREAM or QUEUE.")
    await request.app[BROKER].scalable.create_subscription(
        await _topic_at_leader(request),
        request.match_info["subscription"],
        kind=kind,
        start=EARLIEST,
    )
    return no_content()


async def delete_subscription(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the subscription on every segment."""
    await request.app[BROKER].scalable.delete_subscription(
        await _topic_at_leader(request),
        request.match_info["subscription"],
        force=flag(request, "force"),
    )
    return no_content()


async def seek(request: web.Request) -> web.Response:
    """POST `?timestamp=ms`: move the subscription to that time on every segment."""
    await request.app[BROKER].scalable.seek_subscription(
        await _topic_at_leader(request),
        request.match_info["subscription"],
        number(request, "timestamp"),
    )
    return no_content()


async def skip_all(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far."""
    await request.app[BROKER].scalable.skip_all(
        await _topic_at_leader(request), request.match_info["subscription"]
    )
    return no_content()


async def auto_scale_policy(request: web.Request) -> web.Response:
    """GET: the policy is off, because segments split and merge by hand only."""
    await request.app[BROKER].scalable.get(_name(request))
    return web.json_response({"enabled": False})


async def refuse_auto_scale(request: web.Request) -> web.Response:
    """POST: refuse any policy but the disabled one: there is no automatic split or merge."""
    policy = await mapping_of(request)
    await request.app[BROKER].scalable.get(_name(request))
    if policy.get("enabled") is False:
        return no_content()
    raise refused("Segments split and merge by hand only: use split/{id} and merge/{a}/{b}.")


async def delete_auto_scale_policy(request: web.Request) -> web.Response:
    """DELETE: do nothing, because a topic never has this policy."""
    await request.app[BROKER].scalable.get(_name(request))
    return no_content()
