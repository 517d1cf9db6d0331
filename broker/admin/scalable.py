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
    body_of,
    flag,
    mapping_of,
    namespace_of,
    no_content,
    number,
    number_in,
    refused,
    shortened,
    topic_of,
)
from broker.policies.json_numbers import INT32_MAX, is_number
from magnetar.protocol.ids import EARLIEST, SegmentId
from magnetar.protocol.names import TopicName

BASE = "/admin/v2/scalable/{tenant}/{namespace}"
TOPIC = BASE + "/{topic}"
SUBSCRIPTION = TOPIC + "/subscriptions/{subscription}"

CONSUMER_GRACE = TOPIC + "/consumerSessionGracePeriod"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.get(BASE, list_topics),
        web.put(TOPIC, create),
        web.get(TOPIC, get),
        web.delete(TOPIC, delete),
        web.get(TOPIC + "/stats", stats),
        web.get(TOPIC + "/segments/{segment}/stats", segment_stats),
        web.get(TOPIC + "/history", history),
        web.post(TOPIC + "/migrate", migrate),
        web.post(TOPIC + "/split/{segment}", split),
        web.post(TOPIC + "/merge/{segments:.+}", merge),
        web.post(TOPIC + "/rebucket/{segment}", rebucket),
        web.put(TOPIC + "/offload", offload),
        web.get(TOPIC + "/offload/manifest", offload_manifests),
        web.post(TOPIC + "/offload/dropHot", drop_hot),
        web.get(TOPIC + "/subscriptions", list_subscriptions),
        web.put(SUBSCRIPTION, create_subscription),
        web.delete(SUBSCRIPTION, delete_subscription),
        web.get(SUBSCRIPTION + "/replicatedSubscriptionStatus", show_replicated),
        web.post(SUBSCRIPTION + "/replicatedSubscriptionStatus", set_replicated),
        web.post(SUBSCRIPTION + "/seek", seek),
        web.post(SUBSCRIPTION + "/skip-all", skip_all),
        web.get(CONSUMER_GRACE, consumer_grace),
        web.post(CONSUMER_GRACE, set_consumer_grace),
        web.put(CONSUMER_GRACE, set_consumer_grace),
        web.delete(CONSUMER_GRACE, delete_consumer_grace),
    ]


def _name(request: web.Request) -> TopicName:
    return topic_of(request, "topic")


async def topic_at_leader(request: web.Request) -> TopicName:
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
    name = await topic_at_leader(request)
    await request.app[BROKER].scalable.delete(name, force=flag(request, "force"))
    return no_content()


async def stats(request: web.Request) -> web.Response:
    """GET: layout, rates, subscriptions."""
    return web.json_response(
        await request.app[BROKER].scalable.stats(await topic_at_leader(request))
    )


async def segment_stats(request: web.Request) -> web.Response:
    """GET: rates, sizes, producers and subscriptions of one segment; any broker answers."""
    segment_id = SegmentId(number(request, "segment"))
    return web.json_response(
        await request.app[BROKER].scalable.segment_stats(_name(request), segment_id)
    )


async def history(request: web.Request) -> web.Response:
    """GET: all splits, merges, prunings and moves, oldest first."""
    entries = await request.app[BROKER].scalable.history(_name(request))
    return web.json_response([entry.to_json() for entry in entries])


async def migrate(request: web.Request) -> web.Response:
    """POST `?force=true`: make the ordinary topic of the same name scalable."""
    name = _name(request)
    await require_here(request, name)
    await request.app[BROKER].scalable.migrate(name, force=flag(request, "force"))
    return no_content()


async def split(request: web.Request) -> web.Response:
    """POST: split one ACTIVE segment."""
    await request.app[BROKER].scalable.split(
        await topic_at_leader(request), SegmentId(number(request, "segment"))
    )
    return no_content()


async def merge(request: web.Request) -> web.Response:
    """POST `merge/0/1[/2...]`: merge adjacent ACTIVE segments, two or more."""
    parts = request.match_info["segments"].split("/")
    segment_ids = [SegmentId(number_in(part, "segment")) for part in parts]
    await request.app[BROKER].scalable.merge(await topic_at_leader(request), segment_ids)
    return no_content()


async def rebucket(request: web.Request) -> web.Response:
    """POST `?bucketCount=N`: give one ACTIVE segment another number of entry buckets."""
    await request.app[BROKER].scalable.rebucket(
        await topic_at_leader(request),
        [SegmentId(number(request, "segment"))],
        number(request, "bucketCount"),
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
    answer = await request.app[BROKER].scalable.stats(await topic_at_leader(request))
    subscriptions = answer.get("subscriptions")
    return web.json_response(sorted(subscriptions) if isinstance(subscriptions, dict) else [])


async def create_subscription(request: web.Request) -> web.Response:
    """PUT `?type=STREAM|QUEUE`: create a subscription, at Earliest on every ACTIVE segment.

    With `?replicated=true` it moves in other clusters too.
    """
    kind = request.query.get("type", "STREAM").upper()
    if kind not in {"STREAM", "QUEUE"}:
        raise refused(f"type = {kind!r} is unknown: give STREAM or QUEUE.")
    await request.app[BROKER].scalable.create_subscription(
        await topic_at_leader(request),
        request.match_info["subscription"],
        kind=kind,
        start=EARLIEST,
        replicated=flag(request, "replicated"),
    )
    return no_content()


async def delete_subscription(request: web.Request) -> web.Response:
    """DELETE `?force=true`: delete the subscription on every segment."""
    await request.app[BROKER].scalable.delete_subscription(
        await topic_at_leader(request),
        request.match_info["subscription"],
        force=flag(request, "force"),
    )
    return no_content()


async def show_replicated(request: web.Request) -> web.Response:
    """GET: whether the subscription moves in other clusters too, by the name of the segment."""
    found = await request.app[BROKER].scalable.replicated_subscription(
        await topic_at_leader(request), request.match_info["subscription"]
    )
    return web.json_response(found)


async def set_replicated(request: web.Request) -> web.Response:
    """POST, true or false as body: whether the subscription moves in other clusters too.

    It does so where its topic is replicated to them.
    """
    value = await body_of(request)
    if not isinstance(value, bool):
        raise refused("A subscription is replicated or not: send true or false.")
    await request.app[BROKER].scalable.set_replicated(
        await topic_at_leader(request), request.match_info["subscription"], replicated=value
    )
    return no_content()


async def seek(request: web.Request) -> web.Response:
    """POST `?timestamp=ms`: move the subscription to that time on every segment."""
    await request.app[BROKER].scalable.seek_subscription(
        await topic_at_leader(request),
        request.match_info["subscription"],
        number(request, "timestamp"),
    )
    return no_content()


async def skip_all(request: web.Request) -> web.Response:
    """POST: skip all messages that were published so far."""
    await request.app[BROKER].scalable.skip_all(
        await topic_at_leader(request), request.match_info["subscription"]
    )
    return no_content()


async def consumer_grace(request: web.Request) -> web.Response:
    """GET: seconds for which a lost ordered consumer keeps its segments; 204 if not set.

    With `?applied=true` the value in force, which may be the namespace's or the broker's.
    """
    name, scalable = await topic_at_leader(request), request.app[BROKER].scalable
    if flag(request, "applied"):
        return web.json_response(await scalable.applied_consumer_grace_s(name))
    grace_s = (await scalable.get(name)).consumer_grace_s
    return no_content() if grace_s is None else web.json_response(grace_s)


async def set_consumer_grace(request: web.Request) -> web.Response:
    """POST or PUT, a number of seconds as body: set it for this topic."""
    value = await body_of(request)
    if not isinstance(value, int) or not is_number(value, 0, INT32_MAX):
        raise refused(
            f"consumerSessionGracePeriod cannot be {shortened(repr(value))}: give a number of "
            f"seconds from 0 to {INT32_MAX}."
        )
    await request.app[BROKER].scalable.set_consumer_grace(await topic_at_leader(request), value)
    return no_content()


async def delete_consumer_grace(request: web.Request) -> web.Response:
    """DELETE: the namespace's, or the broker's, holds again."""
    await request.app[BROKER].scalable.set_consumer_grace(await topic_at_leader(request), None)
    return no_content()
