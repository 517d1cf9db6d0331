"""`.../offload` of regular topics, and `/admin/v2/offload/orphans`.

PUT and GET of `/admin/v2/persistent/{tenant}/{namespace}/{topic}/offload` are Pulsar's; the rest is
Magnetar's own.  Segments and scalable topics have the same below their own paths.
"""

from aiohttp import web

from broker.admin.keys import BROKER
from broker.admin.message_ids import require_known_id
from broker.admin.persistent import TOPIC, existing_topic
from broker.admin.rest import body_of, no_content, refused
from broker.policies.json_numbers import is_number
from broker.scalable.offloading import offload_manifest, offload_status
from broker.topics.offloading import location_of
from magnetar.protocol.ids import LATEST, Position

OFFLOAD = TOPIC + "/offload"
ORPHANS = "/admin/v2/offload/orphans"


def routes() -> list[web.RouteDef]:
    """The resource's routes."""
    return [
        web.put(OFFLOAD, offload),
        web.get(OFFLOAD, status),
        web.get(OFFLOAD + "/manifest", manifest),
        web.post(OFFLOAD + "/dropHot", drop_hot),
        web.get(ORPHANS, orphans),
        web.delete(ORPHANS, delete_orphans),
    ]


async def offload(request: web.Request) -> web.Response:
    """PUT `?url=`, message id or nothing as body: copy ledgers that end before it.

    409 during a run.
    """
    up_to = _position(await body_of(request))
    topic = await existing_topic(request)
    url = request.query.get("url")
    await request.app[BROKER].offloads.offload(topic, url=url, up_to=up_to, alone=True)
    return no_content()


def _position(body: object) -> Position:
    if body is None:
        return LATEST
    members = body if isinstance(body, dict) else {}
    require_known_id(members)
    found = [each for name in ("ledgerId", "entryId") if is_number(each := members.get(name))]
    if len(found) != 2:
        raise refused("The body must be a message id with ledgerId and entryId, or empty.")
    return Position(*found)


async def status(request: web.Request) -> web.Response:
    """GET: the result of the last run."""
    topic = await existing_topic(request)
    return web.json_response(offload_status(topic, request.app[BROKER].offloads.outcome(topic)))


async def manifest(request: web.Request) -> web.Response:
    """GET: the result of the last run, and every ledger with its copy."""
    topic = await existing_topic(request)
    outcome = request.app[BROKER].offloads.outcome(topic)
    return web.json_response(await offload_manifest(topic, outcome))


async def drop_hot(request: web.Request) -> web.Response:
    """POST, `[ledger id, ...]` or nothing as body: delete ledgers with a complete copy.

    The answer has their ids.
    """
    ledger_ids = await ledger_ids_of(request)
    topic = await existing_topic(request)
    return web.json_response(await request.app[BROKER].offloads.drop_hot(topic, ledger_ids))


async def ledger_ids_of(request: web.Request) -> list[int] | None:
    """The ledger ids in the body; None, for all ledgers, if it is empty."""
    body = await body_of(request)
    if body is None:
        return None
    if not isinstance(body, list) or not all(is_number(each) for each in body):
        raise refused("The body must be a list of ledger ids, or empty for all.")
    return body


async def orphans(request: web.Request) -> web.Response:
    """GET `?url=`: objects that no topic's record names, left by crashes."""
    broker = request.app[BROKER]
    location = location_of(broker.settings, request.query.get("url"))
    found = await broker.managed_ledgers.orphaned_copies(location)
    return web.json_response(
        [
            {"object": each.key, "size": each.size_bytes, "modifiedTimestamp": each.modified_ms}
            for each in sorted(found)
        ]
    )


async def delete_orphans(request: web.Request) -> web.Response:
    """DELETE `?url=`: delete such objects, and answer with them.

    Nothing but this cluster may use the location.
    """
    broker = request.app[BROKER]
    location = location_of(broker.settings, request.query.get("url"))
    found = await broker.managed_ledgers.orphaned_copies(location)
    keys = sorted(each.key for each in found)
    await broker.managed_ledgers.cold.delete_objects(location, keys)
    return web.json_response(keys)
